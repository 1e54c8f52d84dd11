"""The compiled pipeline with its compile options: graph, parameters, and what the pods of its steps get."""

import json
import re
import subprocess
import sys

import pytest
import yaml

from components import jobs
from components.environment import SECRET_KEYS, SIGNING_FOLDER, SIGNING_KEY
from components.images import COMPONENT_IMAGE
from operations import notifications
from pipelines import CLEANUP_TITLE, SEARCH_TITLES, STEP_TITLES
from pipelines.compiler import compile_pipeline
from pipelines.parameters import SMALL
from pipelines.pipeline_run import CompileOptions
from trainer.base.errors import StorageError

OPTIONS = {
    "bucket": CompileOptions(),
    "shared": CompileOptions(volume=True, deadline=3600, ttl=60),
    "data": CompileOptions(until="shards"),
    "conditional": CompileOptions(conditional=True),
    "search": CompileOptions(trials=3, parallelism=2),
    "search_gpus": CompileOptions(trials=2, gpus=4, volume=True),
}
DATA = ["download", "convert-to-shards"]
STEPS = {
    "bucket": [*STEP_TITLES],
    "shared": [*STEP_TITLES],
    "data": DATA,
    "conditional": [*STEP_TITLES],
    "search": [*DATA, *SEARCH_TITLES],
    "search_gpus": [*DATA, *SEARCH_TITLES],
}
RUN_ID = {"runtimeValue": {"constant": "{{$.pipeline_job_uuid}}"}}


@pytest.fixture(scope="session")
def compiled(tmp_path_factory, request):
    """The two documents: the graph, and the Kubernetes settings of its pods."""
    form = getattr(request, "param", "bucket")
    path = tmp_path_factory.getbasetemp() / "compiled" / f"{form}.yaml"
    if not path.exists():
        compile_pipeline(path, OPTIONS[form])
    documents = list(yaml.safe_load_all(path.read_text()))
    documents[0]["form"] = form
    return documents


@pytest.fixture(scope="session")
def spec(compiled):
    return compiled[0]


def of(*forms):
    """Compile with these options; without it for a bucket."""
    return pytest.mark.parametrize("compiled", forms, indirect=True)


def graphs(spec):
    return [spec["root"], *spec["components"].values()]


def tasks(spec):
    of_graphs = [graph["dag"]["tasks"] for graph in graphs(spec) if "dag" in graph]
    return {name: task for of_graph in of_graphs for name, task in of_graph.items()}


def steps(spec):
    return spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]


def pods(compiled):
    return compiled[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]


def outside(name):
    return {"componentInputParameter": f"pipelinechannel--{name}"}


@of(*OPTIONS)
def test_the_driver_refuses_no_input(compiled):
    assert refusals(*compiled) == []


@of(*OPTIONS)
def test_a_clean_up_follows_however_the_steps_end(spec):
    end = spec["root"]["dag"]["tasks"]["cleanup"]
    assert end["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"
    assert len(spec["root"]["dag"]["tasks"]) == 2
    (before,) = end["dependentTasks"]
    assert end["inputs"]["parameters"]["status"] == {"taskFinalStatus": {"producerTask": before}}
    # Both get the run's id, from which the job's name follows.
    assert end["inputs"]["parameters"]["run_id"] == RUN_ID
    if "train" in STEPS[spec["form"]]:
        assert tasks(spec)["train"]["inputs"]["parameters"]["run_id"] == RUN_ID


@of("bucket", "shared")
def test_only_a_pass_exports_and_the_condition_costs_no_pod(spec):
    exported = tasks(spec)["export"]
    assert exported["triggerPolicy"]["condition"].endswith("-Output'] == 'pass'")
    read = exported["inputs"]["parameters"]["pipelinechannel--evaluate-Output"]
    assert read == {"taskOutputParameter": {"outputParameterKey": "Output", "producerTask": "evaluate"}}
    assert exported["dependentTasks"] == ["evaluate", "train"]
    assert exported["inputs"]["parameters"]["registry"] == outside("registry")
    # A driver for each graph (the root, and the one before the clean-up), two pods for each step.
    inner = [graph for graph in graphs(spec) if "dag" in graph]
    assert len(inner) == 2
    assert len(inner) + 2 * (len(tasks(spec)) - 1) == 14


@of("conditional")
def test_a_condition_surrounds_training(spec):
    (held,) = [task for name, task in steps(spec).items() if name.startswith("condition")]
    condition = held["triggerPolicy"]["condition"]
    assert condition == "inputs.parameter_values['pipelinechannel--download-Output'] == 'train'"
    inner = spec["components"][held["componentRef"]["name"]]
    assert set(inner["dag"]["tasks"]) == {"convert-to-shards", "train", "evaluate", "export"}
    assert inner["dag"]["tasks"]["export"]["triggerPolicy"]["condition"].endswith("-Output'] == 'pass'")


@of("bucket", "data", "conditional")
def test_constants_of_the_first_step(spec):
    inputs = tasks(spec)["download"]["inputs"]["parameters"]
    # Published weights are fetched only if a training follows.
    assert inputs["trains"]["runtimeValue"]["constant"] is (spec["form"] != "data")
    constant = {"runtimeValue": {"constant": 0.0}}
    is_conditional = spec["form"] == "conditional"
    assert inputs["min_new_images"] == (outside("min_new_images") if is_conditional else constant)


@of("search")
def test_trials_have_a_pod_each_and_the_best_follows_them(spec):
    (loop,) = [task for name, task in steps(spec).items() if name.startswith("for-loop")]
    assert json.loads(loop["parameterIterator"]["items"]["raw"]) == ["0", "1", "2"]
    assert loop["iteratorPolicy"] == {"parallelismLimit": 2}
    assert loop["dependentTasks"] == ["convert-to-shards"]
    inner = spec["components"][loop["componentRef"]["name"]]
    assert set(inner["dag"]["tasks"]) == {"trial"}
    given = inner["dag"]["tasks"]["trial"]["inputs"]["parameters"]
    assert given["number"] == {"componentInputParameter": loop["parameterIterator"]["itemInput"]}
    assert given["trials"] == {"runtimeValue": {"constant": 3.0}}
    best = steps(spec)["best"]["inputs"]["parameters"]
    assert best["ended"]["taskOutputParameter"]["producerTask"] in steps(spec)
    for name in ("study", "space"):
        assert given[name] == best[name] == outside(name)


@of("bucket", "shared")
def test_the_train_step_has_the_fields_of_its_job(spec):
    inputs = tasks(spec)["train"]["inputs"]["parameters"]
    for name in ("launcher", "nodes", "nproc", "gpus", "image", "job", "gate", "warm_start", "output"):
        assert inputs[name] == outside(name)
    none = {"runtimeValue": {"constant": ""}}
    assert inputs["claim"] == (outside("claim") if spec["form"] == "shared" else none)
    declared = spec["components"]["comp-train"]["inputDefinitions"]["parameters"]
    assert declared["nodes"]["parameterType"] == "NUMBER_INTEGER"
    # Settings of the task in the UI, such as tolerations, reach the training's pods.
    passed = spec["components"]["comp-train"]["taskConfigPassthroughs"]
    fields = {item["field"]: item.get("applyToTask", False) for item in passed}
    assert fields["KUBERNETES_TOLERATIONS"] is False and fields["KUBERNETES_NODE_SELECTOR"] is False
    assert declared["task_config"]["parameterType"] == "TASK_CONFIG"


@of(*OPTIONS)
def test_every_step_has_image_title_resources_retries_and_no_cache(spec):
    executors, names = spec["deploymentSpec"]["executors"], (*STEPS[spec["form"]], "cleanup")
    assert set(executors) == {f"exec-{name}" for name in names}
    for name in names:
        task, container = tasks(spec)[name], executors[f"exec-{name}"]["container"]
        assert task["taskInfo"]["name"] == (STEP_TITLES | SEARCH_TITLES | CLEANUP_TITLE)[name]
        assert task["retryPolicy"]["maxRetryCount"] >= 1
        # Argo's deadline for a retried pod counts from the first try.
        assert int(task["retryPolicy"]["backoffMaxDuration"].removesuffix("s")) >= 30 * 24 * 3600
        assert not task.get("cachingOptions", {}).get("enableCache")
        assert container["image"] == COMPONENT_IMAGE
        resources = container["resources"]
        requests = (resources["resourceCpuRequest"], resources["resourceMemoryRequest"])
        if name in ("train", "cleanup"):
            assert requests == ("20m", "512Mi")
        else:
            assert "step_cpu" in requests[0] and "step_memory" in requests[1]
        # The step that starts a job waits; the job's pods have the GPUs.
        assert ("accelerator" in resources) == ((name, spec["form"]) == ("trial", "search_gpus"))
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    default = (parameters["step_cpu"]["defaultValue"], parameters["step_memory"]["defaultValue"])
    assert default == SMALL


def secrets_of(compiled, source):
    """Variables by key that each pod reads from the optional Secret that `source` names."""
    return {
        name: {pair["secretKey"]: pair["envVar"] for pair in secret["keyToEnv"]}
        for name, pod in pods(compiled).items()
        for secret in pod.get("secretAsEnv", [])
        if secret["optional"] is True and secret["secretNameParameter"] == source
    }


@of(*OPTIONS)
def test_pods_know_their_run_and_read_optional_secrets(compiled):
    own = {f"exec-{name}" for name in STEPS[compiled[0]["form"]]}
    assert set(pods(compiled)) == own | {"exec-cleanup"}
    path = "metadata.labels['pipeline/runid']"
    for pod in pods(compiled).values():
        assert pod["securityContext"] == {"runAsNonRoot": True}
        assert {"name": "KUBEDET_RUN_ID", "fieldPath": path} in pod["fieldPathAsEnv"]
    assert secrets_of(compiled, outside("credentials")) == dict.fromkeys(own, SECRET_KEYS)
    for name in STEPS[compiled[0]["form"]]:
        assert tasks(compiled[0])[name]["inputs"]["parameters"]["credentials"] == outside("credentials")
    notifying = own & {"exec-download", "exec-evaluate", "exec-export"}
    assert secrets_of(compiled, outside("notify")) == dict.fromkeys(notifying, notifications.SECRET_KEYS)
    # The clean-up is in the root graph, and must run even if the keys of the store are wrong.
    of_root = secrets_of(compiled, {"componentInputParameter": "notify"})
    assert of_root == {"exec-cleanup": notifications.SECRET_KEYS}
    assert len(pods(compiled)["exec-cleanup"]["secretAsEnv"]) == 1


@of(*OPTIONS)
def test_pods_mount_the_volume_and_the_signing_key(compiled):
    form = compiled[0]["form"]
    for name, pod in pods(compiled).items():
        if OPTIONS[form].volume and name != "exec-cleanup":
            (mount,) = pod["pvcMount"]
            assert (mount["mountPath"], mount["pvcNameParameter"]) == ("/data", outside("claim"))
        else:
            assert "pvcMount" not in pod
    keys = {name: pod["secretAsVolume"] for name, pod in pods(compiled).items() if "secretAsVolume" in pod}
    assert set(keys) == {"exec-export"} & set(pods(compiled))
    for (mount,) in keys.values():
        assert mount["mountPath"] == SIGNING_FOLDER and mount["optional"] is True
        assert mount["secretNameParameter"] == outside("signing")
    assert f"secretKey: {SIGNING_KEY}" not in yaml.safe_dump(compiled[1])


def test_the_steps_with_jobs_read_the_limits_of_jobs(compiled):
    limits = {name: pod["configMapAsEnv"] for name, pod in pods(compiled).items() if "configMapAsEnv" in pod}
    assert set(limits) == {"exec-download", "exec-convert-to-shards", "exec-train"}
    (config_map,) = limits["exec-train"]
    assert config_map["optional"] is True and all(item == [config_map] for item in limits.values())
    assert config_map["configMapNameParameter"]["runtimeValue"]["constant"] == jobs.CONFIG_MAP
    assert {pair["configMapKey"]: pair["envVar"] for pair in config_map["keyToEnv"]} == jobs.LIMITS


@of("search_gpus")
def test_a_trials_pod_has_the_gpus_that_its_processes_use(compiled):
    spec = compiled[0]
    of_pod = spec["deploymentSpec"]["executors"]["exec-trial"]["container"]["resources"]["accelerator"]
    assert (of_pod["resourceType"], of_pod["resourceCount"]) == ("nvidia.com/gpu", "4")
    assert tasks(spec)["trial"]["inputs"]["parameters"]["gpus"] == {"runtimeValue": {"constant": 4.0}}
    (mount,) = pods(compiled)["exec-trial"]["emptyDirMounts"]
    assert (mount["mountPath"], mount["medium"]) == ("/dev/shm", "Memory")


@of("shared")
def test_limits_of_a_run(compiled):
    config = compiled[1]["platforms"]["kubernetes"]["pipelineConfig"]
    ends = {f"resourceTtlOn{end}": 60 for end in ("Completion", "Success", "Failure")}
    assert config == ends | {"activeDeadlineSeconds": 3600}


@pytest.mark.slow
def test_the_image_can_be_another_registrys_and_no_secret_is_compiled(tmp_path):
    code = "from pathlib import Path; from pipelines.compiler import compile_pipeline; "
    code += f"compile_pipeline(Path({str(tmp_path / 'p.yaml')!r}))"
    image = "registry.example/team/kubedet:7"
    secrets = {"AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI", "MINIO_SECRET_KEY": "minio123"}
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"KUBEDET_IMAGE": image, "PATH": ""} | secrets
    )
    text = (tmp_path / "p.yaml").read_text()
    assert not [word for word in (*secrets.values(), str(tmp_path)) if word in text]
    (spec, _) = yaml.safe_load_all(text)
    containers = [executor["container"] for executor in spec["deploymentSpec"]["executors"].values()]
    assert {container["image"] for container in containers} == {image}
    steps_image = tasks(spec)["train"]["inputs"]["parameters"]["steps_image"]
    assert steps_image == {"runtimeValue": {"constant": image}}


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        compile_pipeline(tmp_path / "file" / "pipeline.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


KINDS = {
    "STRING": "string", "NUMBER_INTEGER": "number", "NUMBER_DOUBLE": "number", "BOOLEAN": "bool",
    "LIST": "list", "STRUCT": "struct", "TASK_FINAL_STATUS": "struct", "TASK_CONFIG": "struct",
}  # fmt: skip
"""Declared types, and the kind of value that has passed such an input."""

_CONSTANTS = {str: "string", bool: "bool", int: "number", float: "number", list: "list", dict: "struct"}

_PLACEHOLDER = re.compile(r"\{\{\$.*?\}\}")
_INPUT = re.compile(r"\{\{\$\.inputs\.parameters\['([^']+)'\]\}\}")


def takes(declared, kind):
    return declared == "STRING" or KINDS[declared] == kind


def refusals(spec, platform=None):
    """Every input that the driver would refuse, a line for each."""
    pods = (platform or {}).get("platforms", {}).get("kubernetes", {}).get("deploymentSpec", {})
    executors = pods.get("executors", {})
    problems = []
    for graph_name, graph in [("root", spec["root"]), *spec["components"].items()]:
        for name, task in graph.get("dag", {}).get("tasks", {}).items():
            component = spec["components"][task["componentRef"]["name"]]
            where = f"{graph_name}, {name}"
            problems += [f"{where}: {line}" for line in _inputs(spec, graph, task, component)]
            problems += [f"{where}: {line}" for line in _pasted(graph, task)]
            pod = executors.get(component.get("executorLabel", ""), {})
            here = _declared(graph)
            problems += [f"{where}: the graph has no input {one}" for one in _named(pod) if one not in here]
    return problems


def _pasted(graph, task):
    """What the launcher cannot paste into a value that it is to be pasted into.

    It replaces text in the step's command line, whose JSON is written by then: a text or a number comes to
    stand there as text, of a mapping or a list the quotes end the text around it. The run's names the driver
    puts in, where one is all of a value (backend/src/v2/component/launcher_v2.go, 2.17.0).
    """
    inputs = task.get("inputs", {}).get("parameters", {})
    declared = _declared(graph)
    for name, source in inputs.items():
        value = source.get("runtimeValue", {}).get("constant")
        for placeholder in _PLACEHOLDER.findall(json.dumps(value)):
            if placeholder == value:
                continue
            if not (input_ := _INPUT.fullmatch(placeholder)):
                yield f"{name}: nothing replaces {placeholder} within a value"
            elif input_[1] not in inputs:
                yield f"{name}: the step has no input {input_[1]}"
            else:
                kind = declared[inputs[input_[1]]["componentInputParameter"]]["parameterType"]
                if KINDS[kind] in ("struct", "list"):
                    yield f"{name}: {input_[1]} is a {KINDS[kind]}, which cannot be part of a value"


def _declared(component):
    return component.get("inputDefinitions", {}).get("parameters", {})


def _inputs(spec, graph, task, component):
    declared = _declared(component)
    bound = task.get("inputs", {}).get("parameters", {})
    items = task.get("parameterIterator", {}).get("itemInput")
    for name, definition in declared.items():
        kind = definition["parameterType"]
        if name == items or kind == "TASK_CONFIG":
            continue  # The loop's own item, and what the driver itself fills in.
        if name not in bound:
            if "defaultValue" not in definition and not definition.get("isOptional"):
                yield f"neither value nor default for {name}"
            continue
        source = _kind(spec, graph, bound[name])
        if source is None:
            yield f"the graph has no input for {name}: {bound[name]}"
        elif not takes(kind, source):
            yield f"{name}: type mismatch: expect {kind}, got {source}"
    here = _declared(graph)
    for name, source in bound.items():
        outer = source.get("componentInputParameter")
        if name not in declared and outer and outer not in here:
            yield f"the graph has no input {outer}, for {name}"


def _kind(spec, graph, source):
    """Kind of the value that comes from a source; None if there is none."""
    if "componentInputParameter" in source:
        definition = _declared(graph).get(source["componentInputParameter"])
        return definition and KINDS[definition["parameterType"]]
    if "runtimeValue" in source:
        return _CONSTANTS[type(source["runtimeValue"]["constant"])]
    if "taskFinalStatus" in source:
        return "struct"
    output = source["taskOutputParameter"]
    producer = graph["dag"]["tasks"][output["producerTask"]]
    if "parameterIterator" in producer:
        return "list"
    outputs = spec["components"][producer["componentRef"]["name"]]["outputDefinitions"]["parameters"]
    return KINDS[outputs[output["outputParameterKey"]]["parameterType"]]


def _named(pod):
    """Inputs of the graph from which a pod's Secrets and claims have their names."""
    sources = [item["secretNameParameter"] for item in pod.get("secretAsEnv", [])]
    sources += [item["secretNameParameter"] for item in pod.get("secretAsVolume", [])]
    sources += [item["pvcNameParameter"] for item in pod.get("pvcMount", [])]
    return [source["componentInputParameter"] for source in sources if "componentInputParameter" in source]
