"""Public reports about Kubeflow: each situation, and what kubedet answers."""

import pytest
import yaml
from cluster.fixtures import connect_backend
from cluster.pods import endless, fine
from kinds import both, plain, pod_name

from components.launchers.cluster import watch
from components.launchers.cluster.kinds import KINDS
from components.launchers.spec import JobSpec
from pipelines.compiler import compile_pipeline
from pipelines.pipeline_run import CompileOptions
from trainer.base.errors import LaunchError


@pytest.fixture
def kind(request, simulated):
    """The kind of jobs that the cluster knows: PyTorchJobs, unless the test is for `both`."""
    kind = KINDS[getattr(request, "param", "pytorchjob")]
    simulated.installed = {kind.plural}
    return kind


@pytest.fixture
def backend(kind, simulated):
    return connect_backend(simulated, [kind])


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """The graph of the compiled pipeline."""
    path = tmp_path_factory.mktemp("compiled") / "pipeline.yaml"
    compile_pipeline(path, CompileOptions())
    return next(yaml.safe_load_all(path.read_text()))


def tasks(graph):
    """Every task that runs a pod of ours, by name."""
    dags = [part["dag"]["tasks"] for part in (graph["root"], *graph["components"].values()) if "dag" in part]
    every = {name: task for dag in dags for name, task in dag.items()}
    pods = {name for name, part in graph["components"].items() if "executorLabel" in part}
    return {name: task for name, task in every.items() if task["componentRef"]["name"] in pods}


def job(**fields):
    return JobSpec(command=("python", "-m", "trainer"), name="train", image="i:1", **fields)


@pytest.mark.slow
def test_sdk_182_a_log_that_is_followed_waits_for_its_pod(kubedet, served_cluster, kind):
    """Following the log of a job whose pod was pending returned at once, with nothing."""

    def late(pod):
        pod.sleep(1.0)
        fine(pod)

    served_cluster.lives[pod_name(kind, 0, job="a")] = late
    kubedet("job", "submit", "--name", "a", "--image", "i:1", "--", "true")
    assert kubedet("job", "logs", "--follow", "a")[1] == "{0}: hello from {0}\n".format(
        pod_name(kind, 0, job="a")
    )


def test_sdk_435_sdk_682_lines_come_while_the_job_runs(backend, simulated, kind, capsys):
    """Logs came as one list when the job had ended, or were printed besides; here line by line, once."""
    lines = []

    def life(pod):
        pod.run()
        pod.say("first")
        pod.until(lambda: lines)
        pod.say("last")
        pod.exit(0)

    simulated.lives[pod_name(kind, 0)] = life
    backend.submit(job())
    for line in backend.logs("train"):
        lines.append(line.text)
        simulated.notify()
    assert lines == ["first", "last"] and capsys.readouterr().out == ""
    (pod,) = backend.status("train").pods
    assert list(backend.pod_lines("train", pod, follow=False, tail=1)) == ["last"]


@both
def test_pipelines_8051_a_job_of_which_no_pod_is_made(backend, simulated, kind):
    """The launcher of a job waited forever, although no controller made its pods; here it ends."""
    simulated.asleep = {kind.plural}
    simulated.event("train", "FailedCreate", "exceeded quota: gpus", kind=kind.title)
    with pytest.raises(LaunchError) as caught:
        watch.run(backend, job(start_timeout=1), lambda line: None)
    assert "exceeded quota: gpus" in caught.value.message


@both
def test_trainer_2000_all_nodes_start_again_together(backend, simulated, kind):
    """After the loss of a node the others waited for it in vain; here all come again."""

    def lost_its_peer(pod):
        pod.run()
        pod.exit(143)

    def resumed(pod):
        pod.run()
        pod.say("resumed")
        pod.exit(0)

    lines = []
    simulated.lives |= {
        pod_name(kind, 0): [lost_its_peer, resumed],
        pod_name(kind, 1): [lambda pod: pod.evict(), fine],
    }
    watch.run(backend, job(nodes=2), lambda line: lines.append(plain(line)))
    assert f"[{pod_name(kind, 0)}] resumed" in lines and "job train: succeeded" in lines


def test_pipelines_4333_a_step_whose_pod_is_deleted(graph, backend, simulated, kind):
    """A deleted pod was not retried; here each step is, and the launcher's next try takes up the same job."""
    assert all(task["retryPolicy"]["maxRetryCount"] >= 1 for task in tasks(graph).values())
    simulated.lives[pod_name(kind, 0)] = endless
    backend.submit(job())
    first = simulated.job("train")["metadata"]["uid"]
    backend.submit(job())
    assert simulated.job("train")["metadata"]["uid"] == first


def test_pipelines_7939_nothing_is_taken_from_the_cache(graph):
    """A cached step counted as done after its results had been deleted; here no step is cached by KFP."""
    assert tasks(graph) and not any(
        task.get("cachingOptions", {}).get("enableCache") for task in tasks(graph).values()
    )


def test_pipelines_9893_pods_that_train_have_shared_memory(tmp_path, backend, simulated, kind):
    """Data loaders and processes of a node died of a bus error in the 64 MB that a container has."""
    simulated.lives[pod_name(kind, 0)] = endless
    backend.submit(job())
    pod = simulated.pod(pod_name(kind, 0)).body["spec"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]
    (volume,) = [volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm"]
    assert volume == {"medium": "Memory", "sizeLimit": "8Gi"}
    compile_pipeline(tmp_path / "pipeline.yaml", CompileOptions(trials=2, gpus=2))
    _, platform = yaml.safe_load_all((tmp_path / "pipeline.yaml").read_text())
    executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    (mount,) = executors["exec-trial"]["emptyDirMounts"]
    assert (mount["mountPath"], mount["medium"]) == ("/dev/shm", "Memory")


def test_pipelines_11667_no_parameter_is_without_a_value(graph):
    """Tasks failed that were given an optional parameter with the default None."""
    parameters = graph["root"]["inputDefinitions"]["parameters"].items()
    optional = {name: part.get("defaultValue") for name, part in parameters if part.get("isOptional")}
    assert len(optional) > 10 and None not in optional.values()


def test_pipelines_11607_options_of_the_command_line_have_the_types_of_the_parameters(kubedet, kfp_server):
    """kfp's own command sent numbers, booleans and lists as text, which the API refuses."""
    words = ["--nodes", 2, "--set", "train.epochs=3", "--set", "loader.sizes=[96,128]"]
    code, _, err = kubedet("submit", "--data-root", "s3://bucket/root", *words)
    assert code == 0, err
    sent = kfp_server.runs[0]["runtime_config"]["parameters"]
    assert sent["nodes"] == 2 and isinstance(sent["nodes"], int)
    assert sent["overrides"] == {"train.epochs": 3, "loader.sizes": [96, 128]}
