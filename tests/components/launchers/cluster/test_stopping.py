"""SIGTERM and SIGINT delete the job first, at any moment; the end of the run does so without a signal."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster.api import Fault
from cluster.clock import Process
from cluster.fixtures import QUICK, connect_backend
from cluster.pods import endless
from kinds import both
from patience import until

from components.launchers.cluster import watch
from trainer.base.errors import Interrupted

WORKFLOW = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "run-x", "uid": "u-1"}


class Launcher(Process):
    """A process that runs a job; `error` is how it ended."""

    def __init__(self, simulated, kind, spec, timings=QUICK):
        self.lines, self.error, self._simulated = [], None, simulated
        backend = connect_backend(simulated, [kind], timings)

        def work():
            with pytest.raises(Interrupted) as caught:
                watch.run(backend, spec, self.lines.append)
            self.error = caught.value

        super().__init__(simulated.clock, work)

    def wait_for(self, text):
        self._simulated.clock.until(lambda: any(text in line for line in self.lines))

    def wait(self):
        self._simulated.clock.until(lambda: self.ended)
        return self.error


@pytest.fixture
def start(simulated, kind, job, first):
    def start():
        simulated.lives[first] = endless
        return Launcher(simulated, kind, job())

    return start


@pytest.fixture
def running(start):
    """A launcher whose job runs."""
    launcher = start()
    launcher.wait_for("hello")
    return launcher


@both
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_deletes_the_job_first(simulated, running, number):
    sent = len(simulated.seen)
    running.signal(number)
    error = running.wait()
    assert simulated.seen[sent].method == "DELETE" and simulated.job() is None
    assert error.exit_code == 143 and "run the same command again" in error.fix
    assert f"deleted on {number.name}" in running.lines[-1]
    assert signal.getsignal(signal.SIGTERM) not in (None, watch.run)


def test_a_signal_is_heard_while_an_answer_is_waited_for(simulated, running, kind):
    """And a deletion that the server is too busy for is repeated; a second signal changes nothing."""
    faults = [Fault("GET", kind.plural, delay=120, times=9), Fault("DELETE", status=503)]
    simulated.faults += faults
    simulated.clock.until(lambda: faults[0].times < 9)
    running.signal(signal.SIGTERM)
    running.signal(signal.SIGTERM)
    running.wait()
    assert simulated.job() is None


def test_a_signal_while_the_job_is_created_leaves_nothing(simulated, start, kind):
    simulated.faults.append(Fault("POST", kind.plural, delay=0.7))
    launcher = start()
    simulated.clock.until(lambda: simulated.faults[0].times == 0)
    launcher.signal(signal.SIGTERM)
    launcher.wait()
    simulated.clock.sleep(1)
    assert simulated.job() is None


def test_a_deletion_that_fails_is_reported(running, simulated, kind):
    """The user learns that GPUs are still held."""
    simulated.denied.add(("delete", kind.plural))
    running.signal(signal.SIGTERM)
    error = running.wait()
    assert "403" in error.message and "kubedet job stop -n default train" in error.fix


def test_a_steps_pod_that_is_evicted_leaves_the_job_to_the_next_attempt(simulated, start, monkeypatch):
    monkeypatch.setenv("KFP_POD_NAME", "step-pod")
    put_step(simulated)
    launcher = start()
    launcher.wait_for("hello")
    launcher.signal(signal.SIGTERM)
    assert "the run and its job train continue" in launcher.wait().message
    uid = simulated.job()["metadata"]["uid"]
    start().wait_for("hello")
    assert simulated.job()["metadata"]["uid"] == uid and not simulated.requests("DELETE")


def test_the_loser_of_a_name_leaves_the_winners_job_alone(simulated, running, kind):
    """Its own job was deleted and another created between two looks."""
    simulated.faults.append(Fault("GET", kind.plural, delay=30, times=99))
    simulated.clock.until(lambda: simulated.faults[0].times < 99)
    body = simulated.job()
    other = {**body, "metadata": {**body["metadata"], "labels": {"kubedet/spec-hash": "other"}}}
    simulated.delete_job()
    simulated.create_job("default", other)
    running.signal(signal.SIGTERM)
    running.wait()
    assert simulated.requests("DELETE") and simulated.job()


def put_step(cluster):
    """Add the pod of a step, and its Workflow, which is returned."""
    spec = {"containers": [{"name": "main", "image": "component:1"}]}
    metadata = {"name": "step-pod", "ownerReferences": [WORKFLOW]}
    cluster.add("pods", "default", {"metadata": metadata, "spec": spec, "status": {}})
    return cluster.add("workflows", "default", {"metadata": {"name": "run-x"}, "spec": {}})


SCRIPT = """
from components.launchers.cluster import watch
from components.launchers.cluster.backend import ClusterBackend
from components.launchers.spec import JobSpec
watch.run(ClusterBackend.connect(), JobSpec(command=("python",), name="train", image="i:1"))
"""


@pytest.fixture
def step(served_cluster):
    return put_step(served_cluster)


@pytest.fixture
def process(served_cluster, step):
    """The launcher in a real process, which starts a guard process."""
    served_cluster.lives["train-worker-0"] = endless
    command = [sys.executable, "-c", SCRIPT]
    environment = {**served_cluster.environment, "KFP_POD_NAME": "step-pod"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.fixture
def guard(process, served_cluster):
    """The id of the guard process, once the job runs."""
    assert "running" in process.stdout.readline()
    until(lambda: served_cluster.requests("GET", "workflows?watch=true"))
    return int(subprocess.check_output(["pgrep", "-P", str(process.pid), "-f", "termination"]))


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
def test_the_end_of_the_run_deletes_the_job_without_a_signal(served_cluster, step, guard, change):
    assert not served_cluster.requests("DELETE")
    step |= change
    served_cluster.changed("MODIFIED", step, "workflows")
    until(lambda: served_cluster.job() is None)


@pytest.mark.slow
def test_the_end_of_the_run_deletes_the_job_although_its_launcher_hangs(served_cluster, step, process, guard):
    """A busy node kills the launcher right after SIGTERM; and watching Workflows may be forbidden."""
    served_cluster.denied.add(("watch", "workflows"))
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(guard, signal.SIGTERM)
    # Only the pod ends, by the Workflow; Argo starts the step again if the pod is gone.
    until(lambda: served_cluster.requests("DELETE", "pods/step-pod"))
    assert not served_cluster.requests("DELETE", "jobs")
    step["spec"]["activeDeadlineSeconds"] = 0
    os.kill(guard, signal.SIGTERM)
    until(lambda: served_cluster.job() is None)


@pytest.mark.slow
def test_a_pod_that_is_being_deleted_is_removed_before_argo_sees_it_fail(served_cluster, guard):
    until(lambda: served_cluster.requests("GET", "pods?watch=true&fieldSelector"))
    pod = served_cluster.objects["pods", "default", "step-pod"]
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    served_cluster.changed("MODIFIED", pod, "pods")
    until(lambda: served_cluster.requests("DELETE", "pods/step-pod"))
    assert not served_cluster.requests("DELETE", "jobs")


@pytest.mark.slow
def test_the_process_that_waits_for_the_end_of_the_run_ends_with_its_launcher(served_cluster, process, guard):
    process.kill()
    until(lambda: not is_running(guard))
    assert not served_cluster.requests("DELETE")
