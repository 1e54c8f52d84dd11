"""The compiled pipeline, in all its forms: what a cluster takes."""

import json
import subprocess
import sys

import pytest
import yaml

from components import job_limits, lineage_events, notices
from components.images import COMPONENT_IMAGE
from components.object_store import SECRET_KEYS
from components.signing_secret import FOLDER
from pipelines import CLEANUP, SEARCH, SHARED, TITLES
from pipelines.compile import compile_pipeline
from pipelines.forms import Form
from pipelines.local import for_this_machine
from pipelines.sizes import SIZES
from trainer import recipes
from trainer.errors import ConfigError, StorageError

PARAMETERS = {
    "data_root", "source", "recipe", "overrides", "gate", "launcher", "nodes", "nproc", "gpus", "image",
    "job", "output", "credentials", "data_version", "step_cpu", "step_memory", "signing", "registry",
    "notify", "warm_start", "prune",
}  # fmt: skip
ALONE = {
    "data_root",
    "source",
    "recipe",
    "overrides",
    "credentials",
    "data_version",
    "notify",
    "prune",
    "step_cpu",
    "step_memory",
}
FORMS = {
    "bucket": Form(), "volume": Form(volume=True), "shared": Form(shared=True, parallelism=3),
    "data": Form(until="shards"), "limited": Form(deadline=3600, ttl=60),
    "conditional": Form(conditional=True), "conditional_shared": Form(conditional=True, shared=True),
    "search": Form(trials=3, parallelism=2), "search_gpus": Form(trials=2, gpus=4, volume=True),
}  # fmt: skip
PASTED = ("{{$.inputs.parameters['", "']}}")
MAIN = ("bucket", "volume", "shared")
STEPS = {
    "bucket": [*TITLES], "volume": [*TITLES], "shared": [*SHARED, "train", "evaluate", "export"],
    "data": ["prepare"], "limited": [*TITLES], "conditional": [*TITLES],
    "conditional_shared": [*SHARED, "train", "evaluate", "export"],
    "search": ["prepare", *SEARCH], "search_gpus": ["prepare", *SEARCH],
}  # fmt: skip


def of(*forms):
    return pytest.mark.parametrize("compiled", forms, indirect=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def compiled(folder, request):
    """The pipeline's two documents: its graph, and what Kubernetes is to add to its pods."""
    form = getattr(request, "param", "bucket")
    path = folder / f"{form}.yaml"
    if not path.exists():
        compile_pipeline(path, FORMS[form])
    documents = list(yaml.safe_load_all(path.read_text()))
    documents[0]["form"] = form
    return documents


@pytest.fixture(scope="module")
def spec(compiled):
    return compiled[0]


@of("bucket", "shared", "data")
def test_weights_are_fetched_by_the_first_step_where_a_training_follows(spec):
    tasks = [task for graph in graphs(spec) for task in graph.get("dag", {}).get("tasks", {}).items()]
    (first,) = [task for name, task in tasks if name in ("prepare", "plan")]
    constant = first["inputs"]["parameters"]["trains"]["runtimeValue"]["constant"]
    assert constant is (spec["form"] != "data")


def graphs(spec):
    return [spec["root"], *spec["components"].values()]


def tasks(spec):
    of_graphs = [graph["dag"]["tasks"] for graph in graphs(spec) if "dag" in graph]
    return {name: task for of_graph in of_graphs for name, task in of_graph.items()}


def asked_of_the_launcher(spec):
    """What the train step is told of its job in one argument: constants, and where parameters come from."""
    inputs = tasks(spec)["train"]["inputs"]["parameters"]
    return {
        name: inputs[value[len(PASTED[0]) : -len(PASTED[1])]] if value.startswith(PASTED[0]) else value
        for name, value in inputs["request"]["runtimeValue"]["constant"].items()
    }


def pods(compiled):
    return compiled[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]


def test_the_form_for_a_bucket_requires_a_data_root(spec):
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert set(parameters) == PARAMETERS
    assert [name for name, of in parameters.items() if not of.get("isOptional")] == ["data_root"]
    assert all(of["description"] for of in parameters.values())


@of("volume")
def test_the_form_for_a_volume_requires_a_claim(spec):
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert set(parameters) == PARAMETERS | {"claim"}
    assert [name for name, of in parameters.items() if not of.get("isOptional")] == ["claim"]
    assert parameters["data_root"]["defaultValue"] == "/data/kubedet"


@of("shared")
def test_the_form_that_shares_the_work_says_among_how_many(spec):
    assert set(spec["root"]["inputDefinitions"]["parameters"]) == PARAMETERS | {"partitions"}


@of("data")
def test_data_alone_need_no_parameter_of_a_training(spec):
    assert set(spec["root"]["inputDefinitions"]["parameters"]) == ALONE
    assert tasks(spec)["cleanup"]["inputs"]["parameters"]["launcher"] == {"runtimeValue": {"constant": ""}}


@of(*FORMS)
def test_every_argument_of_a_step_is_told_and_the_pipelines_own_as_the_table_does(spec):
    root, described = spec["root"]["inputDefinitions"]["parameters"], set()
    for name in [*STEPS[spec["form"]], "cleanup"]:
        arguments = spec["components"][f"comp-{name}"]["inputDefinitions"]["parameters"]
        own = {key: of for key, of in arguments.items() if not key.startswith("pipelinechannel--")}
        for key, argument in own.items():
            assert argument["description"] and "see the pipeline" not in argument["description"], (name, key)
            if key in root and argument["description"] == root[key]["description"]:
                described.add(key)
    assert {"source", "data_root", "data_version", "credentials", "overrides"} <= described


def test_recipe_and_launcher_are_offered_as_lists(spec):
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert set(parameters["launcher"]["literals"]) == {"local", "kubernetes", "pytorchjob", "trainjob"}
    assert parameters["recipe"]["literals"] == list(recipes.RECIPES)
    assert {name for name, of in parameters.items() if "literals" in of} == {"launcher", "recipe"}


@of(*FORMS)
def test_every_step_has_image_title_resources_retries_and_no_cache(spec):
    executors = spec["deploymentSpec"]["executors"]
    all_tasks = tasks(spec)
    assert set(executors) == {f"exec-{name}" for name in (*STEPS[spec["form"]], "cleanup")}
    for name in (*STEPS[spec["form"]], "cleanup"):
        assert all_tasks[name]["taskInfo"]["name"] == (TITLES | SHARED | SEARCH | CLEANUP)[name]
        assert all_tasks[name]["retryPolicy"]["maxRetryCount"] >= 1
        assert not all_tasks[name].get("cachingOptions", {}).get("enableCache")
        container = executors[f"exec-{name}"]["container"]
        assert container["image"] == COMPONENT_IMAGE
        resources = container["resources"]
        assert resources["resourceCpuRequest"] and resources["resourceMemoryRequest"]
        # The step that starts a PyTorchJob waits; its pods have the GPUs.
        assert ("accelerator" in resources) == ((name, spec["form"]) == ("trial", "search_gpus"))


@of(*FORMS)
def test_no_retry_has_a_hidden_limit_of_hours(spec):
    """Argo gives a pod that is tried again what is left of it as its deadline, from the first try on."""
    for task in tasks(spec).values():
        if "retryPolicy" in task:
            assert int(task["retryPolicy"]["backoffMaxDuration"].removesuffix("s")) >= 30 * 24 * 3600


@of(*MAIN)
def test_what_heavy_steps_ask_for_is_a_parameter_and_those_that_wait_ask_for_little(spec):
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert (parameters["step_cpu"]["defaultValue"], parameters["step_memory"]["defaultValue"]) == SIZES[
        "small"
    ]
    for name in (*STEPS[spec["form"]], "cleanup"):
        resources = spec["deploymentSpec"]["executors"][f"exec-{name}"]["container"]["resources"]
        words = (resources["resourceCpuRequest"], resources["resourceMemoryRequest"])
        if name in ("train", "cleanup"):
            assert words == ("250m", "512Mi")
        else:
            assert "step_cpu" in words[0] and "step_memory" in words[1]


@of(*FORMS)
def test_every_step_reads_keys_from_the_secret_that_the_run_names(compiled):
    steps = {name: pod for name, pod in pods(compiled).items() if name != "exec-cleanup"}
    assert set(steps) == {f"exec-{name}" for name in STEPS[compiled[0]["form"]]}
    for pod in steps.values():
        secret = pod["secretAsEnv"][0]
        assert secret["optional"] is True
        assert secret["secretNameParameter"] == {"componentInputParameter": "pipelinechannel--credentials"}
        assert {pair["secretKey"]: pair["envVar"] for pair in secret["keyToEnv"]} == SECRET_KEYS
    # And knows its name, to say that it gives none.
    for name in STEPS[compiled[0]["form"]]:
        source = tasks(compiled[0])[name]["inputs"]["parameters"]["credentials"]
        assert source == {"componentInputParameter": "pipelinechannel--credentials"}


@of(*FORMS)
def test_steps_that_know_an_end_have_the_webhooks_address_from_a_secret_that_need_not_exist(compiled):
    told = {}
    for name, pod in pods(compiled).items():
        for secret in pod.get("secretAsEnv", []):
            # The clean-up stands in the outermost graph, whose inputs have the parameters' own names.
            of = "notify" if name == "exec-cleanup" else "pipelinechannel--notify"
            if secret["secretNameParameter"] == {"componentInputParameter": of}:
                assert secret["optional"] is True
                told[name] = {pair["secretKey"]: pair["envVar"] for pair in secret["keyToEnv"]}
    expected = {"exec-prepare", "exec-plan", "exec-evaluate", "exec-export", "exec-cleanup"} & set(
        pods(compiled)
    )
    assert told == dict.fromkeys(expected, notices.SECRET_KEYS)
    # The clean-up must run where the keys of the store are wrong.
    assert len(pods(compiled)["exec-cleanup"]["secretAsEnv"]) == 1


@of(*FORMS)
def test_steps_that_tell_of_their_lineage_have_the_address_from_a_secret_that_need_not_exist(compiled):
    told = {}
    for name, pod in pods(compiled).items():
        for secret in pod.get("secretAsEnv", []):
            if secret["secretNameParameter"] == {"runtimeValue": {"constant": lineage_events.SECRET}}:
                assert secret["optional"] is True
                told[name] = {pair["secretKey"]: pair["envVar"] for pair in secret["keyToEnv"]}
    expected = {f"exec-{name}" for name in lineage_events.STEPS} & set(pods(compiled))
    assert len(expected) >= 1 and told == dict.fromkeys(expected, lineage_events.SECRET_KEYS)


@of(*FORMS)
def test_every_step_knows_its_run(compiled):
    path = "metadata.labels['pipeline/runid']"
    for pod in pods(compiled).values():
        assert {"name": "KUBEDET_RUN_ID", "fieldPath": path} in pod["fieldPathAsEnv"]


@of(*FORMS)
def test_no_step_runs_as_root(compiled):
    names = {f"exec-{name}" for name in (*STEPS[compiled[0]["form"]], "cleanup")}
    assert set(pods(compiled)) == names
    for pod in pods(compiled).values():
        assert pod["securityContext"] == {"runAsNonRoot": True}


@of(*MAIN)
def test_the_train_step_alone_reads_what_jobs_may_ask_for(compiled):
    limits = {name: pod["configMapAsEnv"] for name, pod in pods(compiled).items() if "configMapAsEnv" in pod}
    ((config_map,),) = limits.values()
    assert set(limits) == {"exec-train"} and config_map["optional"] is True
    assert config_map["configMapNameParameter"]["runtimeValue"]["constant"] == job_limits.CONFIG_MAP
    assert {pair["configMapKey"]: pair["envVar"] for pair in config_map["keyToEnv"]} == job_limits.VARIABLES


@of(*MAIN)
def test_only_the_export_mounts_the_key_that_the_run_names(compiled):
    mounts = {name: pod["secretAsVolume"] for name, pod in pods(compiled).items() if "secretAsVolume" in pod}
    ((mount,),) = mounts.values()
    assert set(mounts) == {"exec-export"}
    assert mount["mountPath"] == FOLDER and mount["optional"] is True
    assert mount["secretNameParameter"] == {"componentInputParameter": "pipelinechannel--signing"}


def test_the_form_for_a_bucket_mounts_nothing(compiled):
    assert not any("pvcMount" in pod for pod in pods(compiled).values())


@of("volume")
def test_the_form_for_a_volume_mounts_the_claim_in_every_step(compiled):
    steps = {name: pod for name, pod in pods(compiled).items() if name != "exec-cleanup"}
    assert "pvcMount" not in pods(compiled)["exec-cleanup"] and steps
    for pod in steps.values():
        (mount,) = pod["pvcMount"]
        assert mount["mountPath"] == "/data"
        assert mount["pvcNameParameter"] == {"componentInputParameter": "pipelinechannel--claim"}
    assert asked_of_the_launcher(compiled[0])["claim"] == {
        "componentInputParameter": "pipelinechannel--claim"
    }


@of(*FORMS)
def test_a_clean_up_follows_however_the_steps_end(spec):
    ends = [
        (name, task)
        for name, task in spec["root"]["dag"]["tasks"].items()
        if task.get("triggerPolicy", {}).get("strategy") == "ALL_UPSTREAM_TASKS_COMPLETED"
    ]
    ((name, end),) = ends
    assert name == "cleanup" and len(spec["root"]["dag"]["tasks"]) == 2
    (steps,) = end["dependentTasks"]
    assert end["inputs"]["parameters"]["status"] == {"taskFinalStatus": {"producerTask": steps}}
    # Both get the run's id, from which the job's name follows.
    run_id = {"runtimeValue": {"constant": "{{$.pipeline_job_uuid}}"}}
    assert end["inputs"]["parameters"]["run_id"] == run_id
    if "train" in STEPS[spec["form"]]:
        assert tasks(spec)["train"]["inputs"]["parameters"]["run_id"] == run_id


@of(*MAIN)
def test_only_a_pass_exports_and_the_condition_costs_no_pod(spec):
    all_tasks = tasks(spec)
    assert all_tasks["export"]["triggerPolicy"]["condition"].endswith("-Output'] == 'pass'")
    read = all_tasks["export"]["inputs"]["parameters"]["pipelinechannel--evaluate-Output"]
    assert read == {"taskOutputParameter": {"outputParameterKey": "Output", "producerTask": "evaluate"}}
    assert all_tasks["export"]["dependentTasks"] == ["evaluate", "train"]
    # A graph costs a pod: there is the root, the one that the clean-up follows, and loops.
    held = [name for name, component in spec["components"].items() if "dag" in component]
    assert len(held) == (3 if spec["form"] == "shared" else 1)


@of("conditional", "conditional_shared")
def test_a_model_is_made_only_where_the_data_are_worth_it(spec):
    last = "shard" if "shard" in STEPS[spec["form"]] else "prepare"
    assert set(spec["root"]["inputDefinitions"]["parameters"]) >= PARAMETERS | {"min_new_images", "min_drift"}
    steps = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    (held,) = [task for name, task in steps.items() if name.startswith("condition")]
    condition = held["triggerPolicy"]["condition"]
    assert condition == f"inputs.parameter_values['pipelinechannel--{last}-Output'] == 'train'"
    read = held["inputs"]["parameters"][f"pipelinechannel--{last}-Output"]
    assert read == {"taskOutputParameter": {"outputParameterKey": "Output", "producerTask": last}}
    # All that makes a model is below it; what it takes from outside is declared on the way.
    inner = spec["components"][held["componentRef"]["name"]]
    assert set(inner["dag"]["tasks"]) == {"train", "evaluate", "export"}
    declared = inner["inputDefinitions"]
    assert set(held["inputs"]["parameters"]) == set(declared["parameters"])
    assert set(held["inputs"]["artifacts"]) == set(declared["artifacts"])
    for task in inner["dag"]["tasks"].values():
        for source in task["inputs"]["parameters"].values():
            outside = source.get("componentInputParameter")
            assert outside is None or outside in declared["parameters"]
    assert inner["dag"]["tasks"]["export"]["triggerPolicy"]["condition"].endswith("-Output'] == 'pass'")


@of(*MAIN)
def test_without_the_condition_no_number_of_images_is_asked_for(spec):
    first = tasks(spec)["plan" if "plan" in STEPS[spec["form"]] else "prepare"]
    assert first["inputs"]["parameters"]["min_new_images"] == {"runtimeValue": {"constant": 0.0}}
    assert first["inputs"]["parameters"]["min_drift"] == {"runtimeValue": {"constant": 0.0}}


@of("bucket")
def test_a_run_of_one_partition_has_twelve_pods(spec):
    """A driver for each graph, and for each step a driver and its own."""
    graphs_, steps = 2, len(TITLES) + len(CLEANUP)
    assert graphs_ + 2 * steps == 12 and len(tasks(spec)) == steps + 1


@of("search")
def test_trials_have_a_pod_each_and_the_best_follows_them(spec):
    asked = set(spec["root"]["inputDefinitions"]["parameters"])
    assert asked == ALONE | {"study", "space"}
    steps = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    (loop,) = [task for name, task in steps.items() if name.startswith("for-loop")]
    assert json.loads(loop["parameterIterator"]["items"]["raw"]) == ["0", "1", "2"]
    assert loop["iteratorPolicy"] == {"parallelismLimit": 2} and loop["dependentTasks"] == ["prepare"]
    inner = spec["components"][loop["componentRef"]["name"]]
    assert set(inner["dag"]["tasks"]) == {"trial"}
    item = loop["parameterIterator"]["itemInput"]
    given = inner["dag"]["tasks"]["trial"]["inputs"]["parameters"]
    assert given["number"] == {"componentInputParameter": item}
    # An item of another kind than the driver thinks it has would end the run.
    assert inner["inputDefinitions"]["parameters"][item]["parameterType"] == "STRING"
    assert given["trials"] == {"runtimeValue": {"constant": 3.0}}
    assert steps["best"]["inputs"]["parameters"]["ended"]["taskOutputParameter"]["producerTask"] in steps
    # All that changes what is searched is the same for the trials and whoever reads their study.
    for name in ("study", "recipe", "overrides", "space", "data_root"):
        source = {"componentInputParameter": f"pipelinechannel--{name}"}
        assert given[name] == steps["best"]["inputs"]["parameters"][name] == source


@of("search_gpus")
def test_a_trials_pod_has_the_gpus_that_its_processes_use(compiled):
    spec = compiled[0]
    of_pod = spec["deploymentSpec"]["executors"]["exec-trial"]["container"]["resources"]["accelerator"]
    assert (of_pod["resourceType"], of_pod["resourceCount"]) == ("nvidia.com/gpu", "4")
    assert tasks(spec)["trial"]["inputs"]["parameters"]["gpus"] == {"runtimeValue": {"constant": 4.0}}
    (mount,) = pods(compiled)["exec-trial"]["emptyDirMounts"]
    assert (mount["mountPath"], mount["medium"]) == ("/dev/shm", "Memory")


def test_a_registry_is_told_by_the_export(spec):
    inputs = tasks(spec)["export"]["inputs"]["parameters"]
    assert inputs["registry"] == {"componentInputParameter": "pipelinechannel--registry"}
    assert inputs["run_id"] == {"runtimeValue": {"constant": "{{$.pipeline_job_uuid}}"}}


@of(*MAIN)
def test_the_train_step_has_its_job_in_one_argument_and_further_fields_in_another(spec):
    job_arguments = asked_of_the_launcher(spec)
    of_run = {"launcher", "nodes", "nproc", "gpus", "image"}
    assert set(job_arguments) == {*of_run, "claim", "default_image"}
    for name in of_run:
        assert job_arguments[name] == {"componentInputParameter": f"pipelinechannel--{name}"}
    declared = spec["components"]["comp-train"]["inputDefinitions"]["parameters"]
    assert not set(job_arguments) & set(declared) and declared["job"]["parameterType"] == "STRUCT"


def test_where_a_train_task_is_told_to_run_reaches_its_pods(spec):
    passed = spec["components"]["comp-train"]["taskConfigPassthroughs"]
    fields = {item["field"]: item.get("applyToTask", False) for item in passed}
    assert fields["KUBERNETES_TOLERATIONS"] is False and fields["KUBERNETES_NODE_SELECTOR"] is False
    declared = spec["components"]["comp-train"]["inputDefinitions"]["parameters"]
    assert declared["task_config"]["parameterType"] == "TASK_CONFIG"


@of("limited")
def test_limits_of_a_run(compiled):
    config = compiled[1]["platforms"]["kubernetes"]["pipelineConfig"]
    ends = {f"resourceTtlOn{end}": 60 for end in ("Completion", "Success", "Failure")}
    assert config == ends | {"activeDeadlineSeconds": 3600}


def test_no_secret_and_no_path_of_this_machine(folder, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    monkeypatch.setenv("MINIO_SECRET_KEY", "minio123")
    for form in FORMS.values():
        compile_pipeline(folder / "secretive.yaml", form)
        text = (folder / "secretive.yaml").read_text()
        for word in ("wJalrXUtnFEMI", "minio123", sys.prefix):
            assert word not in text
    # The names of variables and of keys in a Secret stand beside each other, and nowhere else.
    (first, _) = yaml.safe_load_all(text)
    assert not [name for name in (*SECRET_KEYS, *SECRET_KEYS.values()) if name in yaml.safe_dump(first)]


def test_the_image_can_be_another_registrys(tmp_path):
    code = "from pathlib import Path; from pipelines.compile import compile_pipeline; "
    code += f"compile_pipeline(Path({str(tmp_path / 'p.yaml')!r}))"
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env={"KUBEDET_IMAGE": "registry.example/team/kubedet:7", "PATH": ""},
    )
    (spec, _) = yaml.safe_load_all((tmp_path / "p.yaml").read_text())
    containers = [executor["container"] for executor in spec["deploymentSpec"]["executors"].values()]
    assert {container["image"] for container in containers} == {"registry.example/team/kubedet:7"}
    assert asked_of_the_launcher(spec)["default_image"] == "registry.example/team/kubedet:7"


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        compile_pipeline(tmp_path / "file" / "pipeline.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_local_runs_neither_retry_nor_clean_up(spec):
    local = yaml.safe_load(for_this_machine(yaml.safe_dump(spec)))
    all_tasks = tasks(local)
    assert not any("retryPolicy" in task for task in all_tasks.values())
    assert set(all_tasks) == set(tasks(spec)) - {"cleanup"}


@of("shared")
def test_parts_are_shared_among_pods_and_put_together(spec):
    all_tasks = tasks(spec)
    plan = {"taskOutputParameter": {"outputParameterKey": "Output", "producerTask": "plan"}}
    for part, whole in (("fetch", "download"), ("write", "shard")):
        source = all_tasks[whole]["inputs"]["parameters"]["parts"]["taskOutputParameter"]
        loop = all_tasks[source["producerTask"]]
        assert loop["parameterIterator"]["items"]["inputParameter"] in loop["inputs"]["parameters"]
        assert plan in loop["inputs"]["parameters"].values()
        # 256 partitions are not 256 pods at once.
        assert loop["iteratorPolicy"] == {"parallelismLimit": 3}
        inner = spec["components"][loop["componentRef"]["name"]]["dag"]["tasks"]
        assert set(inner) == {part}


@pytest.mark.parametrize(
    "fields",
    [
        {"parallelism": -1},
        {"deadline": -1},
        {"ttl": -5},
        {"until": "export"},
        {"conditional": True, "until": "shards"},
    ],
)
def test_forms_that_cannot_be(fields):
    with pytest.raises(ConfigError, match=next(iter(fields))):
        Form(**fields)
