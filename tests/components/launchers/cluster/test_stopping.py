"""SIGTERM and SIGINT delete the job first, at any moment."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_api import Fault
from fake_cluster import gone
from fake_pod import endless
from patience import until

SCRIPT = """
import os, signal, sys, time
from components.launchers.cluster import watch
from components.launchers.cluster.backend import ClusterBackend
from components.launchers.cluster.kinds import KINDS
from components.launchers.backend import Timings
from components.launchers.spec import JobSpec
from trainer.base.errors import KubedetError
job = JobSpec(command=("python",), name="train", image="i:1")
handed = signal.getsignal(signal.SIGTERM)
try:
    backend = ClusterBackend.connect(timings=Timings(read=60, late=1.5), kinds=[KINDS[os.environ["KIND"]]])
    watch.run(backend, job)
except KubedetError as error:
    print(f"error: {error}", flush=True)
    assert signal.getsignal(signal.SIGTERM) is handed
    sys.exit(error.exit_code)
"""


@pytest.fixture
def surroundings(kind):
    return {"KIND": kind.name}


@pytest.fixture
def launcher(fake_cluster, surroundings):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env={**fake_cluster.environment, **surroundings},
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
def running(fake_cluster, launcher, first):
    """The launcher, once its job runs, which ends only when a test ends it."""
    fake_cluster.lives[first] = endless
    assert "running" in launcher.stdout.readline()
    return launcher


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "number"),
    [("pytorchjob", signal.SIGTERM), ("trainjob", signal.SIGTERM), ("pytorchjob", signal.SIGINT)],
    indirect=["kind"],
    ids=["SIGTERM", "SIGTERM of a TrainJob", "SIGINT"],
)
def test_a_signal_deletes_the_job_first(fake_cluster, running, number):
    assert "hello" in running.stdout.readline()
    begun = time.monotonic()
    os.kill(running.pid, number)
    out = running.stdout.read()
    assert running.wait(60) == 143
    (deletion,) = fake_cluster.requests("DELETE")
    assert deletion.at - begun < 10.0
    assert gone(fake_cluster)
    assert f"deleted on {number.name}" in out and "run the same command again" in out


@pytest.mark.slow
def test_a_signal_is_heard_while_an_answer_is_waited_for(fake_cluster, running, kind):
    """And a deletion that the server is too busy for is asked for again; a second signal changes nothing."""
    fake_cluster.faults += [Fault("GET", kind.plural, delay=120, times=9), Fault("DELETE", status=503)]
    until(lambda: fake_cluster.faults[0].times < 9)
    begun = time.monotonic()
    os.kill(running.pid, signal.SIGTERM)
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait(60) == 143
    assert time.monotonic() - begun < 60
    assert gone(fake_cluster)


@pytest.mark.slow
def test_a_signal_while_the_job_is_created_leaves_nothing(fake_cluster, launcher, first, kind):
    fake_cluster.faults.append(Fault("POST", kind.plural, delay=0.7))
    fake_cluster.lives[first] = endless
    until(lambda: fake_cluster.requests("POST"))
    os.kill(launcher.pid, signal.SIGTERM)
    assert launcher.wait(60) == 143
    time.sleep(0.3)
    assert gone(fake_cluster)


def test_a_deletion_that_fails_is_reported(launcher, fake_cluster, first, kind):
    """Whoever reads it knows that GPUs are still held."""
    fake_cluster.lives[first] = endless
    fake_cluster.denied.add(("delete", kind.plural))
    while "hello" not in (line := launcher.stdout.readline()):
        assert line, "the launcher ended"
    launcher.terminate()
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 143
    assert re.search(r"could not be deleted.*403", output) and "kubedet job stop -n default train" in output


@pytest.fixture
def step(fake_cluster, surroundings):
    """The launcher runs in a step's pod of a Workflow, which is returned."""
    surroundings["KFP_POD_NAME"] = "step-pod"
    owner = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "run-x", "uid": "u-1"}
    containers = [{"name": "main", "image": "component:1"}]
    metadata = {"name": "step-pod", "ownerReferences": [owner]}
    body = {"metadata": metadata, "spec": {"containers": containers}, "status": {}}
    fake_cluster.add("pods", "default", body)
    return fake_cluster.add("workflows", "default", {"metadata": {"name": "run-x"}, "spec": {}})


@pytest.mark.slow
def test_a_steps_pod_that_is_evicted_leaves_the_job_to_the_next_attempt(
    fake_cluster, step, running, surroundings
):
    assert "hello" in running.stdout.readline()
    os.kill(running.pid, signal.SIGTERM)
    out = running.stdout.read()
    assert running.wait(60) == 143
    assert not fake_cluster.requests("DELETE", "jobs") and not gone(fake_cluster)
    assert "the run goes on: so does the job train" in out
    uid = fake_cluster.job("train")["metadata"]["uid"]
    attempt = SCRIPT.replace("watch.run(", "ClusterBackend.connect().submit(job); print(")
    env = {**fake_cluster.environment, **surroundings}
    subprocess.run([sys.executable, "-c", attempt], env=env, check=True, timeout=60)
    assert fake_cluster.job("train")["metadata"]["uid"] == uid and not fake_cluster.requests("DELETE")


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


ENDINGS = [
    {"spec": {"activeDeadlineSeconds": 0}},
    {"spec": {"activeDeadlineSeconds": 60}, "status": {"startedAt": "2026-01-01T00:00:00Z"}},
]


@pytest.mark.slow
@pytest.mark.parametrize("change", ENDINGS, ids=str)
def test_the_end_of_the_run_deletes_the_job_without_a_signal(fake_cluster, step, running, change):
    until(lambda: fake_cluster.requests("GET", "workflows?watch=true"))
    assert not fake_cluster.requests("DELETE")
    step |= change
    fake_cluster.changed("MODIFIED", step, "workflows")
    until(lambda: gone(fake_cluster))


@pytest.mark.slow
def test_the_end_of_the_run_deletes_the_job_although_its_launcher_hangs(fake_cluster, step, launcher, first):
    """A busy node kills the launcher right after SIGTERM; and watching Workflows may be forbidden."""
    fake_cluster.denied.add(("watch", "workflows"))
    fake_cluster.lives[first] = endless
    assert "running" in launcher.stdout.readline()
    until(lambda: fake_cluster.requests("GET", "workflows?watch=true"))
    guard = int(subprocess.check_output(["pgrep", "-P", str(launcher.pid), "-f", "termination"]))
    os.kill(launcher.pid, signal.SIGSTOP)
    os.kill(guard, signal.SIGTERM)
    # Only the pod ends, as far as the Workflow says; Argo starts the step again if the pod is gone.
    until(lambda: fake_cluster.requests("DELETE", "pods/step-pod"))
    assert not fake_cluster.requests("DELETE", "jobs")
    step["spec"]["activeDeadlineSeconds"] = 0
    os.kill(guard, signal.SIGTERM)
    until(lambda: gone(fake_cluster))


@pytest.mark.slow
def test_a_pod_that_is_being_deleted_is_removed_before_argo_sees_it_fail(fake_cluster, step, running):
    until(lambda: fake_cluster.requests("GET", "pods?watch=true&fieldSelector"))
    pod = fake_cluster.objects["pods", "default", "step-pod"]
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    fake_cluster.changed("MODIFIED", pod)
    until(lambda: fake_cluster.requests("DELETE", "pods/step-pod"))
    assert not fake_cluster.requests("DELETE", "jobs")


@pytest.mark.slow
def test_the_process_that_waits_for_the_end_of_the_run_ends_with_its_launcher(fake_cluster, step, running):
    guard = int(subprocess.check_output(["pgrep", "-P", str(running.pid), "-f", "termination"]))
    running.kill()
    until(lambda: not is_running(guard))
    assert not fake_cluster.requests("DELETE")


@pytest.mark.slow
def test_the_loser_of_a_name_leaves_the_winners_job_alone(fake_cluster, running, kind):
    """Its own was deleted and another put in its place between two looks."""
    assert "hello" in running.stdout.readline()
    fake_cluster.faults.append(Fault("GET", kind.plural, delay=30, times=99))
    until(lambda: fake_cluster.faults[0].times < 99)
    body = fake_cluster.job("train")
    fake_cluster.trainer.collection_seconds = 60
    other = {**body, "metadata": {**body["metadata"], "labels": {"kubedet/spec-hash": "other"}}}
    fake_cluster.delete_job("default", "train")
    fake_cluster.create_job("default", other)
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait(60) == 143
    assert fake_cluster.requests("DELETE") and not gone(fake_cluster)
