"""The compiled pipeline on a real Kubeflow Pipelines: as people start it, and what it survives."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cluster.runs import JOB, MINUTES, steps_environment
from tests.cluster.user import KUBEDET, until


@pytest.fixture
def file(tmp_path):
    """The compiled pipeline."""
    volume = ["--volume"] if os.environ.get("KUBEDET_PVC") else []
    compiling = [*KUBEDET, "cluster", "compile", *volume, "-o", str(tmp_path / "pipeline.yaml")]
    subprocess.run(compiling, check=True, env=steps_environment())
    return tmp_path / "pipeline.yaml"


@pytest.mark.parametrize("verb", ["create", "submit"])
def test_kfp_run_create_and_its_alias(runs, file, verb):
    """As README writes it: the file is compiled, and kfp's own command line starts it."""
    named = [
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in runs.parameters().items()
    ]
    kfp_command = [str(Path(sys.executable).with_name("kfp")), "--endpoint", runs.host, "--output", "json"]
    done = subprocess.run(
        [*kfp_command, "run", verb, "-e", "kubedet-tests", "-r", verb, "-f", str(file), *named],
        check=True,
        capture_output=True,
        text=True,
    )
    # Before the run's there is the experiment's id.
    run_id = json.loads(done.stdout[done.stdout.index("{") :])["run_id"]
    assert runs.client().wait_for_run_completion(run_id, timeout=MINUTES).state == "SUCCEEDED"


def test_kubedet_submit_waits_for_the_end_of_a_run_of_fourteen_pods(runs):
    command = runs.submit()
    assert command.end(MINUTES) == 0, str(command)
    task_pods = runs.pods(runs.id_of(command))
    assert len(task_pods) == 14, sorted(task_pods)
    for title in ("Download", "Convert to shards", "Train", "Evaluate and decide", "Export", "Clean up"):
        assert command.heard(f"{title}: succeeded"), str(command)


def test_three_data_workers_prepare_the_data_of_a_training_on_two_nodes(runs):
    command = runs.submit(data_workers=3, nodes=2, source="sample:images=48,seed=4,size=96")
    run_id = runs.id_of(command)
    assert command.end(MINUTES) == 0, str(command)
    assert len(runs.pods(run_id)) == 14
    for step in ("download", "convert-to-shards"):
        assert "waiting for 3 nodes" in runs.log(run_id, step)


@pytest.mark.parametrize("step", ["download", "shard"])
def test_a_data_worker_whose_pod_is_deleted_is_replaced(runs, cluster, step):
    source = f"sample:images=2400,seed={len(step)},size=256"
    workers = {"data_workers": 3, "step_cpu": "100m", "step_memory": "512Mi"}  # They start together or wait.
    command = runs.submit("--until", "shards", source=source, alone=True, **workers)
    job = runs.trains(runs.id_of(command), step)
    pods = until(lambda: len(pods := cluster.pods(job)) == 3 and pods, "three pods")
    uids = {pod.metadata.uid for pod in pods}
    cluster.delete_pod(pods[-1].metadata.name)
    until(lambda: {pod.metadata.uid for pod in cluster.pods(job)} - uids, "a pod in its place")
    assert command.end(MINUTES) == 0, str(command)


def test_a_recurring_run_finds_its_data_and_compares_with_the_first_ones_model(runs, user):
    name = f"kubedet-test-{os.getpid()}-{runs.cluster.kind.name}"
    parameters = {"source": "sample:images=48,seed=5,size=96", "gate": "coco/AP >= baseline - 1.0"}
    command = runs.submit("--cron", "* * * * *", "--name", name, verb="schedule create", **parameters)
    assert command.end() == 0, str(command)
    schedule_id = re.search(r"recurringrun/details/([0-9a-f-]{36})", str(command))[1]
    try:
        first, second = until(lambda: runs.ended(schedule_id, 2), "two runs", 2 * MINUTES)
    finally:
        gone, code = user.runs("schedule", "delete", "--host", runs.host, "--name", name)
    assert (first.state, second.state, code) == ("SUCCEEDED", "SUCCEEDED", 0), str(gone)
    log = runs.log(second.run_id, "convert-to-shards")
    assert "shards of" in log and "there already" in log
    assert "baseline" in runs.log(second.run_id, "evaluate")


def test_a_run_that_is_terminated_leaves_no_job_and_is_told_as_stopped(runs, cluster):
    command = runs.submit(epochs=400)
    run_id = runs.id_of(command)
    job = runs.trains(run_id)
    runs.client().terminate_run(run_id)
    until(lambda: cluster.job(job) is None, "the job is gone", 120)
    until(lambda: not cluster.pods(job), "its pods are gone", 120)
    assert command.end(MINUTES) == 1, str(command)
    assert "was stopped" in command.errors and "failed" not in command.errors, str(command)
    # Argo ends a Workflow that is stopped before its last step.
    until(lambda: "outcome: stopped" in runs.log(run_id, "cleanup"), "the outcome is told", 120)


def test_a_train_step_whose_pod_is_deleted_leaves_its_job_to_the_next_attempt(runs, cluster):
    command = runs.submit(epochs=60)
    run_id = runs.id_of(command)
    job = runs.trains(run_id)
    uid = cluster.job(job)["metadata"]["uid"]
    cluster.delete_pod(runs.pod(run_id, "train"))
    assert command.end(MINUTES) == 0, str(command)
    assert cluster.job(job)["metadata"]["uid"] == uid
    assert f"{cluster.kind.title} {job} exists: adopting it" in runs.log(run_id, "train")


@pytest.mark.parametrize("process", ["work", "main"])
def test_a_launcher_that_is_killed_is_started_again_and_adopts_its_job(runs, cluster, process):
    """Killing the work restarts it in its pod; killing the main process restarts the pod."""
    command = runs.submit(epochs=60)
    run_id = runs.id_of(command)
    job = runs.trains(run_id)
    uid = cluster.job(job)["metadata"]["uid"]
    assert "killed" in runs.kill(runs.pod(run_id, "train"), process)
    assert command.end(MINUTES) == 0, str(command)
    assert cluster.job(job)["metadata"]["uid"] == uid
    assert f"{cluster.kind.title} {job} exists: adopting it" in runs.log(run_id, "train")


@pytest.mark.parametrize("elastic", [None, {"min_nodes": 1, "max_nodes": 2}], ids=["fixed", "elastic"])
def test_a_job_whose_launcher_does_not_come_back_saves_its_state_and_ends(runs, cluster, elastic):
    """Nothing deletes it: neither the launcher nor the clean-up nor the run's Workflow."""
    job = {**JOB, "launcher_timeout": 60, **({"elastic": elastic} if elastic else {})}
    command = runs.submit(epochs=4000, job=job, nodes=2 if elastic else 1)
    run_id = runs.id_of(command)
    name = runs.trains(run_id)
    until(lambda: "steps/s" in log_of(cluster, name), "the training trains")
    with cordoned(cluster):
        cluster.delete_pod(runs.pod(run_id, "train"))
        until(
            lambda: not [pod for pod in cluster.pods(name) if pod.status.phase == "Running"], "its pods end"
        )
        assert cluster.job(name) is not None
    # And it goes on when the launcher is back.
    until(lambda: "resumed at step" in log_of(cluster, name), "the training goes on")
    runs.client().terminate_run(run_id)


def log_of(cluster, name):
    """What the pods of a job have printed."""
    from kubernetes.client import ApiException

    text = ""
    for pod in cluster.pods(name):
        with contextlib.suppress(ApiException):
            text += cluster.core.read_namespaced_pod_log(pod.metadata.name, cluster.namespace)
    return text


@contextlib.contextmanager
def cordoned(cluster):
    """Keep new pods off every node."""
    names = [node.metadata.name for node in cluster.core.list_node().items]

    def mark(value):
        for name in names:
            cluster.core.patch_node(name, {"spec": {"unschedulable": value}})

    mark(True)
    try:
        yield
    finally:
        mark(False)


def test_a_gate_that_holds_back_skips_the_export_and_the_run_succeeds(runs):
    command = runs.submit(gate="coco/AP >= 1.0")
    run_id = runs.id_of(command)
    assert command.end(MINUTES) == 0, str(command)
    assert not any(".export(" in node and "executor" in node for node in runs.pods(run_id))


def test_a_step_that_fails_is_told_with_its_own_words_and_remedy(runs):
    command = runs.submit(source=f"coco:{runs.work}/no-such-set")
    assert command.end(MINUTES) == 1, str(command)
    assert "no-such-set" in command.errors and "fix:" in command.errors, str(command)
    # And in the container's end, where Kubernetes and Kubeflow's workflow show it.
    pods = runs.pods(runs.id_of(command)).values()
    ends = [item.state.terminated for pod in pods for item in pod.status.container_statuses or []]
    assert any("no-such-set" in (end.message or "") for end in ends if end)


def test_data_alone(runs):
    command = runs.submit("--until", "shards", source="sample:images=24,seed=6,size=96", alone=True)
    run_id = runs.id_of(command)
    assert command.end(MINUTES) == 0, str(command)
    assert len(runs.pods(run_id)) == 8


def test_where_the_train_task_is_told_to_run_reaches_the_pods_that_train(runs, file, cluster):
    """As somebody does who builds a pipeline of our components, with kfp-kubernetes."""
    spec, platform = yaml.safe_load_all(file.read_text())
    pod = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]["exec-train"]
    pod["nodeSelector"] = {"labels": {"kubernetes.io/os": "linux"}}
    pod["tolerations"] = [{"key": "kubedet-test", "operator": "Exists", "effect": "NoSchedule"}]
    file.write_text(yaml.safe_dump_all([spec, platform]))
    run_id = (
        runs.client()
        .create_run_from_pipeline_package(
            str(file), arguments=runs.parameters(epochs=400), enable_caching=False
        )
        .run_id
    )
    (pod,) = cluster.pods(runs.trains(run_id))
    runs.client().terminate_run(run_id)
    assert pod.spec.node_selector == {"kubernetes.io/os": "linux"}
    assert "kubedet-test" in [item.key for item in pod.spec.tolerations]


def test_a_deadline_ends_a_run_and_its_job(runs, cluster):
    # Long enough that a busy node's data are ready and the job is there before it.
    command = runs.submit("--deadline", "240", epochs=4000)
    job = runs.trains(runs.id_of(command))
    assert command.end(MINUTES) == 1, str(command)
    assert "deadline" in command.errors, str(command)
    until(lambda: cluster.job(job) is None, "the job is gone", 120)
