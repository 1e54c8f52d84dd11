"""Jobs in a queue of Kueue: admitted, waiting, taken back, all pods or none, and queues that let nothing go.

They need the queue of controllers/queues.yaml, or another of 200m CPU that nobody else uses.
"""

import contextlib
import fcntl
import json
import os
import tempfile
import time
import uuid
from pathlib import Path

import pytest
import yaml

from tests.cluster.user import until

GROUP, VERSION = "kueue.x-k8s.io", "v1beta1"
SLEEP = "import time; print('up', flush=True); time.sleep(600)"
SECONDS = "import sys, time; print('up', flush=True); time.sleep(float(sys.argv[1]))"


@pytest.fixture
def queue(cluster):
    """Name of the LocalQueue, which one test at a time has to itself; skipped where there is none."""
    from kubernetes.client import ApiException

    name = os.environ.get("KUBEDET_QUEUE", "")
    if not name:
        pytest.skip("no queue is named: set KUBEDET_QUEUE")
    try:
        _local(cluster, name)
    except ApiException as error:
        if error.status != 404:
            raise
        pytest.skip(f"the namespace has no LocalQueue {name}")
    with (Path(tempfile.gettempdir()) / "kubedet-test-queue.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        until(lambda: not _admitted(cluster, name), "nothing else is in the queue")
        yield name


def _local(cluster, name):
    return cluster.custom.get_namespaced_custom_object(GROUP, VERSION, cluster.namespace, "localqueues", name)


def _admitted(cluster, name):
    status = _local(cluster, name).get("status") or {}
    return status.get("admittedWorkloads") or status.get("pendingWorkloads")


@pytest.fixture
def hold(cluster, queue):
    """Stops the queue, as its owner does, and takes back what it has admitted; released at the end."""
    of = _local(cluster, queue)["spec"]["clusterQueue"]

    def policy(value):
        body = {"spec": {"stopPolicy": value}}
        cluster.custom.patch_cluster_custom_object(GROUP, VERSION, "clusterqueues", of, body)

    @contextlib.contextmanager
    def hold():
        policy("HoldAndDrain")
        try:
            yield
        finally:
            policy("None")

    return hold


@pytest.fixture
def urgent(cluster):
    """Name of a class of Workloads that go before others."""
    name = f"kubedet-test-{uuid.uuid4().hex[:8]}"
    body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "WorkloadPriorityClass", "metadata": {"name": name}}
    plural = "workloadpriorityclasses"
    cluster.custom.create_cluster_custom_object(GROUP, VERSION, plural, {**body, "value": 1000})
    yield name
    cluster.custom.delete_cluster_custom_object(GROUP, VERSION, plural, name)


@pytest.fixture
def is_served(cluster):
    """Whether Kueue is set up for jobs of this kind, by its own configuration."""
    maps = cluster.core.list_namespaced_config_map("kueue-system").items
    texts = [
        text
        for item in maps
        if item.metadata.name.startswith("kueue-manager-config")
        for text in item.data.values()
    ]
    frameworks = [name for text in texts for name in yaml.safe_load(text)["integrations"]["frameworks"]]
    return f"{cluster.kind.group}/{cluster.kind.name}" in frameworks


@pytest.fixture
def served(cluster, queue, is_served):
    """Skips a test if Kueue does not queue jobs of this kind."""
    if not is_served:
        pytest.skip(f"Kueue does not queue {cluster.kind.title}s here: see KUEUE_JOBS")


@pytest.fixture
def queued(user, queue):
    """Writes the specification of a job in the queue; returns its path and name."""
    return lambda code, *words, **fields: user.python(
        code, *words, **{"kueue_queue": queue, "cpu_request": "80m", **fields}
    )


def workload(cluster, name):
    """The Workload of a job, or None."""
    uid = cluster.job(name)["metadata"]["uid"]
    workloads = cluster.custom.list_namespaced_custom_object(
        GROUP, VERSION, cluster.namespace, "workloads", label_selector=f"{GROUP}/job-uid={uid}"
    )["items"]
    return workloads[0] if workloads else None


def status(user, name):
    ran, code = user.runs("job", "status", name, "--json")
    assert code == 0, str(ran)
    return json.loads("\n".join(ran.lines))


@pytest.mark.usefixtures("served")
def test_a_job_is_admitted_and_ends_well(user, cluster, queued):
    path, name = queued("print('done', flush=True)")
    command, code = user.runs("job", "submit", "--spec", str(path), "--wait")
    assert code == 0 and command.heard("done"), str(command)
    held = {item["type"]: item["status"] for item in workload(cluster, name)["status"]["conditions"]}
    assert held["Admitted"] == "True"


@pytest.mark.usefixtures("served")
def test_jobs_that_wait_for_quota_say_why(user, cluster, queue, queued):
    """However long: they are not given up."""
    holder, first_name = queued(SLEEP, cpu_request="150m")
    assert user.runs("job", "submit", "--spec", str(holder))[1] == 0
    cluster.running(first_name, 1)
    second, second_name = queued(SECONDS, "1", start_timeout=5)
    waiting = user.starts("job", "submit", "--spec", str(second), "--wait")
    waiting.wait_for(f"in queue {queue}: ")
    time.sleep(10)  # Longer than start_timeout.
    job_status = status(user, second_name)
    assert (job_status["phase"], job_status["reason"], job_status["queue"]) == ("suspended", "Queued", queue)
    assert "insufficient unused quota for cpu" in job_status["message"]
    assert not cluster.pods(second_name)
    assert user.runs("job", "stop", first_name)[1] == 0
    assert waiting.end() == 0, str(waiting)


@pytest.mark.usefixtures("served")
def test_all_pods_of_a_job_start_or_none(user, cluster, queued):
    holder, holder_name = queued(SLEEP, cpu_request="100m")
    assert user.runs("job", "submit", "--spec", str(holder))[1] == 0
    cluster.running(holder_name, 1)
    path, name = queued(SLEEP, nodes=2)
    command = user.starts("job", "submit", "--spec", str(path), "--wait")
    command.wait_for("insufficient unused quota")
    end = time.monotonic() + 8
    while time.monotonic() < end:
        assert not cluster.pods(name)
        time.sleep(0.5)
    assert user.runs("job", "stop", holder_name)[1] == 0
    assert len(cluster.running(name, 2)) == 2


@pytest.mark.usefixtures("served")
def test_a_job_that_is_taken_back_resumes_and_that_is_no_restart(user, cluster, queued, hold):
    path, name = queued(SECONDS, "20", nodes=2, backoff=0)
    command = user.starts("job", "submit", "--spec", str(path), "--wait")
    command.wait_for("running")
    with hold():
        command.wait_for("taken back by Kueue (ClusterQueueStopped: ")
        until(lambda: not cluster.pods(name), "its pods are gone")
        assert status(user, name)["reason"] == "ClusterQueueStopped"
    assert command.end() == 0, str(command)
    phases = [line for line in command.lines if line.startswith(f"job {name}: running")]
    assert len(phases) >= 2, str(command)
    assert not [line for line in command.lines if "restarted" in line], str(command)


@pytest.mark.usefixtures("served")
def test_a_job_that_another_preempts_waits_and_resumes(user, cluster, queued, urgent):
    path, _ = queued(SECONDS, "60", cpu_request="150m", backoff=0)
    command = user.starts("job", "submit", "--spec", str(path), "--wait")
    command.wait_for("running")
    other, _ = queued(SECONDS, "5", cpu_request="150m", labels={f"{GROUP}/priority-class": urgent})
    preemptor, code = user.runs("job", "submit", "--spec", str(other), "--wait")
    assert code == 0, str(preemptor)
    command.wait_for("taken back by Kueue (Preempted: ")
    assert command.end() == 0, str(command)
    assert not [line for line in command.lines if "restarted" in line], str(command)


@pytest.mark.usefixtures("served")
def test_a_job_that_is_released_at_once_resumes_though_its_old_pods_still_end(user, queued, hold):
    """A rank is there twice then: the old pod that ignores SIGTERM, and the new one."""
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    path, _ = queued(stubborn + SECONDS, "25", backoff=0, grace_seconds=10.0)
    command = user.starts("job", "submit", "--spec", str(path), "--wait")
    command.wait_for("running")
    with hold():
        command.wait_for("taken back by Kueue")
    assert command.end() == 0, str(command)
    assert not [line for line in command.lines if "restarted" in line], str(command)


@pytest.mark.usefixtures("served")
def test_a_queue_that_does_not_exist_ends_the_job(user, cluster, queue, queued):
    path, name = queued("pass", kueue_queue="kubedet-none", start_timeout=10)
    command, code = user.runs("job", "submit", "--spec", str(path), "--wait")
    assert code == 1, str(command)
    assert "in queue kubedet-none: LocalQueue kubedet-none doesn't exist" in command.errors, str(command)
    assert cluster.job(name) is None


def test_a_job_that_no_controller_releases_ends(user, cluster, queue, queued, is_served):
    if is_served:
        pytest.skip(f"Kueue queues {cluster.kind.title}s here")
    path, name = queued("pass", start_timeout=20)
    command = user.starts("job", "submit", "--spec", str(path), "--wait")
    assert command.end(120) == 1, str(command)
    words = f"in queue {queue}: Kueue has no Workload for it"
    assert words in command.errors, str(command)
    assert "Kueue (API" in command.errors and "integrations.frameworks" in command.errors, str(command)
    assert cluster.job(name) is None
