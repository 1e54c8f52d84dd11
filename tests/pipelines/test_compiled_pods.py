"""What the compiled pipeline gives the pods of its steps: images, resources, secrets, mounts."""

import subprocess
import sys

import pytest
import yaml
from compiled_forms import FORMS, MAIN, STEPS, asked_of_the_launcher, of, pods, tasks

from components import job_limits
from components.environment import SECRET_KEYS, SIGNING_FOLDER, SIGNING_KEY
from components.images import COMPONENT_IMAGE
from operations import notifications, openlineage
from pipelines import ASSIST, CLEANUP, SEARCH, TITLES
from pipelines.compile import compile_pipeline
from pipelines.sizes import SIZES


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
    expected = {"exec-prepare", "exec-evaluate", "exec-export", "exec-cleanup"} & set(pods(compiled))
    assert told == dict.fromkeys(expected, notifications.SECRET_KEYS)
    # The clean-up must run where the keys of the store are wrong.
    assert len(pods(compiled)["exec-cleanup"]["secretAsEnv"]) == 1


@of(*FORMS)
def test_steps_that_tell_of_their_lineage_have_the_address_from_a_secret_that_need_not_exist(compiled):
    told = {}
    for name, pod in pods(compiled).items():
        for secret in pod.get("secretAsEnv", []):
            if secret["secretNameParameter"] == {"runtimeValue": {"constant": openlineage.SECRET}}:
                assert secret["optional"] is True
                told[name] = {pair["secretKey"]: pair["envVar"] for pair in secret["keyToEnv"]}
    expected = {f"exec-{name}" for name in openlineage.STEPS} & set(pods(compiled))
    assert len(expected) >= 1 and told == dict.fromkeys(expected, openlineage.SECRET_KEYS)


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
    assert mount["mountPath"] == SIGNING_FOLDER and mount["optional"] is True
    assert mount["secretNameParameter"] == {"componentInputParameter": "pipelinechannel--signing"}
    variables = [
        pair
        for pod in pods(compiled).values()
        for use in pod.get("secretAsEnv", [])
        for pair in use["keyToEnv"]
    ]
    assert variables and SIGNING_KEY not in {pair["secretKey"] for pair in variables}


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


@of("search_gpus")
def test_a_trials_pod_has_the_gpus_that_its_processes_use(compiled):
    spec = compiled[0]
    of_pod = spec["deploymentSpec"]["executors"]["exec-trial"]["container"]["resources"]["accelerator"]
    assert (of_pod["resourceType"], of_pod["resourceCount"]) == ("nvidia.com/gpu", "4")
    assert tasks(spec)["trial"]["inputs"]["parameters"]["gpus"] == {"runtimeValue": {"constant": 4.0}}
    (mount,) = pods(compiled)["exec-trial"]["emptyDirMounts"]
    assert (mount["mountPath"], mount["medium"]) == ("/dev/shm", "Memory")


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


@pytest.mark.slow
def test_no_secret_and_no_path_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    monkeypatch.setenv("MINIO_SECRET_KEY", "minio123")
    for form in FORMS.values():
        compile_pipeline(tmp_path / "secretive.yaml", form)
        text = (tmp_path / "secretive.yaml").read_text()
        for word in ("wJalrXUtnFEMI", "minio123", sys.prefix):
            assert word not in text
    # The names of variables and of keys in a Secret stand beside each other, and nowhere else.
    (first, _) = yaml.safe_load_all(text)
    assert not [name for name in (*SECRET_KEYS, *SECRET_KEYS.values()) if name in yaml.safe_dump(first)]


@pytest.mark.slow
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


@of(*FORMS)
def test_every_step_has_image_title_resources_retries_and_no_cache(spec):
    executors = spec["deploymentSpec"]["executors"]
    all_tasks = tasks(spec)
    assert set(executors) == {f"exec-{name}" for name in (*STEPS[spec["form"]], "cleanup")}
    for name in (*STEPS[spec["form"]], "cleanup"):
        assert all_tasks[name]["taskInfo"]["name"] == (TITLES | ASSIST | SEARCH | CLEANUP)[name]
        assert all_tasks[name]["retryPolicy"]["maxRetryCount"] >= 1
        assert not all_tasks[name].get("cachingOptions", {}).get("enableCache")
        container = executors[f"exec-{name}"]["container"]
        assert container["image"] == COMPONENT_IMAGE
        resources = container["resources"]
        assert resources["resourceCpuRequest"] and resources["resourceMemoryRequest"]
        # The step that starts a PyTorchJob waits; its pods have the GPUs.
        assert ("accelerator" in resources) == ((name, spec["form"]) == ("trial", "search_gpus"))


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
