"""The compiled pipeline, in both its forms: what a cluster takes."""

import subprocess
import sys

import pytest
import yaml

from components.images import COMPONENT_IMAGE
from components.signing import FOLDER
from components.stores import SECRET_KEYS
from pipelines import OPTIONAL, SHARED, TITLES
from pipelines.compile import compile_pipeline
from pipelines.local import for_this_machine
from trainer.errors import StorageError

PARAMETERS = {
    "data_root", "source", "recipe", "overrides", "gate", "launcher", "nodes", "nproc", "gpus", "image",
    "job", "output", "credentials", "data_version", "partitions", "signing", "registry",
}  # fmt: skip
FORMS = pytest.mark.parametrize("compiled", ["bucket", "volume"], indirect=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def compiled(folder, request):
    """The pipeline's two documents: its graph, and what Kubernetes is to add to its pods."""
    form = getattr(request, "param", "bucket")
    path = folder / f"{form}.yaml"
    compile_pipeline(path, volume=form == "volume")
    return list(yaml.safe_load_all(path.read_text()))


@pytest.fixture(scope="module")
def spec(compiled):
    return compiled[0]


def graphs(spec):
    return [spec["root"], *spec["components"].values()]


def tasks(spec):
    found = [graph["dag"]["tasks"] for graph in graphs(spec) if "dag" in graph]
    return {name: task for of in found for name, task in of.items()}


def pods(compiled):
    return compiled[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]


def holders(spec, name):
    """Conditional tasks around a task, the innermost first."""
    holding = {
        inner: task
        for task in tasks(spec).values()
        for inner in spec["components"][task["componentRef"]["name"]].get("dag", {}).get("tasks", {})
        if "condition" in task.get("triggerPolicy", {})
    }
    names = {id(task): name for name, task in tasks(spec).items()}
    found = []
    while name in holding:
        found.append(holding[name])
        name = names[id(holding[name])]
    return found


def test_the_form_for_a_bucket_requires_a_data_root(spec):
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert set(parameters) == PARAMETERS
    assert [name for name, of in parameters.items() if not of.get("isOptional")] == ["data_root"]
    assert all(of["description"] for of in parameters.values())


@pytest.mark.parametrize("compiled", ["volume"], indirect=True)
def test_the_form_for_a_volume_requires_a_claim(spec):
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert set(parameters) == PARAMETERS | {"claim"}
    assert [name for name, of in parameters.items() if not of.get("isOptional")] == ["claim"]
    assert parameters["data_root"]["defaultValue"] == "/data/kubedet"


@FORMS
def test_every_step_has_image_title_resources_retries_and_no_cache(spec):
    executors = spec["deploymentSpec"]["executors"]
    found = tasks(spec)
    assert set(executors) == {f"exec-{name}" for name in (*TITLES, *SHARED, *OPTIONAL, "cleanup")}
    for name, title in (TITLES | SHARED | OPTIONAL | {"cleanup": "Clean up"}).items():
        assert found[name]["taskInfo"]["name"] == title
        assert found[name]["retryPolicy"]["maxRetryCount"] >= 1
        assert not found[name].get("cachingOptions", {}).get("enableCache")
        container = executors[f"exec-{name}"]["container"]
        assert container["image"] == COMPONENT_IMAGE
        resources = container["resources"]
        assert resources["resourceCpuRequest"] and resources["resourceMemoryRequest"]
        # The step that starts a PyTorchJob waits; its pods have the GPUs.
        assert "accelerator" not in resources


@FORMS
def test_every_step_reads_keys_from_the_secret_that_the_run_names(compiled):
    assert set(pods(compiled)) == {f"exec-{name}" for name in TITLES | SHARED | OPTIONAL}
    for pod in pods(compiled).values():
        (secret,) = pod["secretAsEnv"]
        assert secret["optional"] is True
        assert secret["secretNameParameter"] == {"componentInputParameter": "pipelinechannel--credentials"}
        assert {pair["secretKey"]: pair["envVar"] for pair in secret["keyToEnv"]} == SECRET_KEYS


@FORMS
def test_only_the_export_mounts_the_key_that_the_run_names(compiled):
    mounts = {name: pod["secretAsVolume"] for name, pod in pods(compiled).items() if "secretAsVolume" in pod}
    ((mount,),) = mounts.values()
    assert set(mounts) == {"exec-export"}
    assert mount["mountPath"] == FOLDER and mount["optional"] is True
    assert mount["secretNameParameter"] == {"componentInputParameter": "pipelinechannel--signing"}


def test_the_form_for_a_bucket_mounts_nothing(compiled):
    assert not any("pvcMount" in pod for pod in pods(compiled).values())


@pytest.mark.parametrize("compiled", ["volume"], indirect=True)
def test_the_form_for_a_volume_mounts_the_claim_in_every_step(compiled):
    for pod in pods(compiled).values():
        (mount,) = pod["pvcMount"]
        assert mount["mountPath"] == "/data"
        assert mount["pvcNameParameter"] == {"componentInputParameter": "pipelinechannel--claim"}
    given = tasks(compiled[0])["train"]["inputs"]["parameters"]["claim"]
    assert given == {"componentInputParameter": "pipelinechannel--claim"}


@FORMS
def test_names_of_secret_and_claim_reach_every_graph_that_holds_a_step(compiled):
    """A cluster looks for them among the inputs of the graph that a step is in, and no further."""
    for graph in graphs(compiled[0])[1:]:
        for task in graph.get("dag", {}).get("tasks", {}).values():
            pod = pods(compiled).get(task["componentRef"]["name"].replace("comp-", "exec-"), {})
            named = [secret["secretNameParameter"] for secret in pod.get("secretAsEnv", [])]
            named += [mount["pvcNameParameter"] for mount in pod.get("pvcMount", [])]
            named += [mount["secretNameParameter"] for mount in pod.get("secretAsVolume", [])]
            for name in named:
                assert name["componentInputParameter"] in graph["inputDefinitions"]["parameters"]


@FORMS
def test_a_clean_up_follows_however_the_steps_end(spec):
    ends = [
        (name, task)
        for name, task in spec["root"]["dag"]["tasks"].items()
        if task.get("triggerPolicy", {}).get("strategy") == "ALL_UPSTREAM_TASKS_COMPLETED"
    ]
    ((name, end),) = ends
    assert name == "cleanup" and len(spec["root"]["dag"]["tasks"]) == 2
    (steps,) = end["dependentTasks"]
    inner = spec["components"][spec["root"]["dag"]["tasks"][steps]["componentRef"]["name"]]["dag"]["tasks"]
    assert {"download", "shard", "train", "evaluate", "gate"} <= set(inner)
    # Both get the run's id, from which the job's name follows.
    run_id = {"runtimeValue": {"constant": "{{$.pipeline_job_uuid}}"}}
    assert end["inputs"]["parameters"]["run_id"] == run_id
    assert inner["train"]["inputs"]["parameters"]["run_id"] == run_id


def test_only_a_pass_exports(spec):
    (condition,) = [of["triggerPolicy"]["condition"] for of in holders(spec, "export")]
    assert "'pass'" in condition


def test_only_a_run_that_names_a_registry_registers_and_after_the_export(spec):
    inner, outer = holders(spec, "register")
    assert inner["triggerPolicy"]["condition"].endswith("['pipelinechannel--registry'] != ''")
    assert "'pass'" in outer["triggerPolicy"]["condition"]
    assert inner["dependentTasks"] == ["export"]
    given = tasks(spec)["register"]["inputs"]["parameters"]
    assert given["server"] == {"componentInputParameter": "pipelinechannel--registry"}
    assert given["run_id"] == {"runtimeValue": {"constant": "{{$.pipeline_job_uuid}}"}}


def test_no_secret_and_no_path_of_this_machine(folder, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    monkeypatch.setenv("MINIO_SECRET_KEY", "minio123")
    for volume in (False, True):
        compile_pipeline(folder / "secretive.yaml", volume=volume)
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
    given = tasks(spec)["train"]["inputs"]["parameters"]["default_image"]["runtimeValue"]
    assert given == {"constant": "registry.example/team/kubedet:7"}


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        compile_pipeline(tmp_path / "file" / "pipeline.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_local_runs_neither_retry_nor_clean_up_nor_share_the_work(spec):
    local = yaml.safe_load(for_this_machine(yaml.safe_dump(spec)))
    found = tasks(local)
    assert not any("retryPolicy" in task for task in found.values())
    loops = {name for name, task in tasks(spec).items() if "parameterIterator" in task}
    assert len(loops) == 2 and set(found) == set(tasks(spec)) - {"cleanup", *SHARED, *loops}
    for task in found.values():
        assert set(task.get("dependentTasks", [])) <= set(found)
    assert "parts" not in found["download"]["inputs"]["parameters"]
    assert "source" in found["download"]["inputs"]["parameters"]


def test_parts_are_shared_among_pods_and_put_together(spec):
    found = tasks(spec)
    plan = {"taskOutputParameter": {"outputParameterKey": "Output", "producerTask": "plan"}}
    for part, whole in (("fetch", "download"), ("write", "shard")):
        source = found[whole]["inputs"]["parameters"]["parts"]["taskOutputParameter"]
        loop = found[source["producerTask"]]
        assert loop["parameterIterator"]["items"]["inputParameter"] in loop["inputs"]["parameters"]
        assert plan in loop["inputs"]["parameters"].values()
        inner = spec["components"][loop["componentRef"]["name"]]["dag"]["tasks"]
        assert set(inner) == {part} and "iteratorPolicy" not in loop
