"""Positions and reasons of jobs in Kueue's queues, as written by Kueue v0.19.2."""

import pytest
from fake_kueue import PREEMPTED, QUOTA, give_kueue
from fake_pod import endless
from kinds import both

from components.launchers.backend import Phase
from components.launchers.cluster.kueue import release


@pytest.fixture
def kueue(fake_cluster):
    return give_kueue(fake_cluster)


@pytest.fixture
def waiting(backend, job, kueue):
    """A job that waits in the queue `gpus`; tells how it is."""
    backend.submit(job(kueue_queue="gpus"))
    return lambda: backend.status("train")


def asked(fake_cluster):
    return [seen.path for seen in fake_cluster.requests(path="kueue.x-k8s.io")]


def test_a_job_that_waits_for_quota_reports_position_and_reason(waiting, kueue):
    kueue.waits("train", QUOTA)
    kueue.ahead("pytorchjob-a-1", "pytorchjob-b-2")
    status = waiting()
    assert (status.phase, status.reason) == (Phase.SUSPENDED, "Queued")
    assert status.message == f"position 3 in queue gpus: {QUOTA}"
    kueue.leave("pytorchjob-a-1")
    assert waiting().message.startswith("position 2 in queue gpus: ")


def test_a_job_that_never_fits_is_told_so(waiting, kueue):
    kueue.waits("train", "insufficient quota: request (300m) > maximum capacity (200m)")
    assert "capacity (200m); it never fits unless it asks for less" in waiting().message


@pytest.mark.parametrize(
    ("message", "reason", "word"),
    [
        ("LocalQueue gpus doesn't exist", "Inadmissible", "QueueMissing"),
        ("LocalQueue gpus doesn't exist", "Misconfigured", "QueueMissing"),
        ("ClusterQueue gpus-of-all is inactive", "Inadmissible", "Inadmissible"),
        ("ClusterQueue gpus-of-all is inactive", "Suspended", "Inadmissible"),
        (QUOTA, "WaitingForQuota", "Queued"),
    ],
)
def test_what_holds_a_job_back_is_one_word(waiting, kueue, message, reason, word):
    """Kueue has other reasons where its gate UnadmittedWorkloadsExplicitStatus is on."""
    kueue.waits("train", message, reason)
    status = waiting()
    assert (status.reason, status.message.partition(": ")[2]) == (word, message)


@both
def test_an_evicted_job_reports_reason_and_position(fake_cluster, waiting, kueue, master):
    fake_cluster.lives[master] = endless
    kueue.admit("train")
    assert waiting().reason != "Queued"
    kueue.evict("train")
    status = waiting()
    assert (status.phase, status.reason) == (Phase.SUSPENDED, "Preempted")
    taken = PREEMPTED.partition("; preemptor")[0]
    assert status.message == f"taken back by Kueue (Preempted: {taken}), position 1 in queue gpus"
    kueue.waits("train", QUOTA)
    assert waiting().message == f"taken back by Kueue (Preempted: {taken}), position 1 in queue gpus: {QUOTA}"


def test_an_older_kueue_is_asked_in_its_own_version(fake_cluster, backend, job):
    kueue = give_kueue(fake_cluster, versions=("v1beta1",))
    backend.submit(job(kueue_queue="gpus"))
    kueue.waits("train", QUOTA)
    assert backend.status("train").message == f"position 1 in queue gpus: {QUOTA}"
    seen = len(asked(fake_cluster))
    assert backend.status("train").reason == "Queued"
    assert not any("v1beta2" in path for path in asked(fake_cluster)[seen:])  # Once is enough.
    assert str(release(backend.cluster)) == "Kueue (API kueue.x-k8s.io/v1beta1)"


def test_a_workload_without_the_jobs_label_is_found_by_its_owner(fake_cluster, backend, job, kueue):
    kueue.labels = False
    backend.submit(job(kueue_queue="gpus"))
    assert backend.status("train").reason == "Queued"


def test_the_reason_is_reported_if_positions_may_not_be_read(fake_cluster, waiting, kueue):
    fake_cluster.denied.add(("get", "localqueues/pendingworkloads"))
    kueue.waits("train", QUOTA)
    assert waiting().message == f"in queue gpus: {QUOTA}"
    waiting()
    assert len([path for path in asked(fake_cluster) if "pendingworkloads" in path]) == 1


def test_without_the_right_to_see_workloads_the_right_is_named(fake_cluster, waiting):
    fake_cluster.denied.add(("list", "workloads"))
    status = waiting()
    assert (status.phase, status.reason) == (Phase.SUSPENDED, "QueueUnknown")
    assert 'apiGroups ["kueue.x-k8s.io"], resources ["workloads"], verbs ["list"]' in status.message


def test_a_list_reads_each_queue_once(fake_cluster, backend, job, kueue):
    kueue.queue("cpus")
    for name, queue in (("a", "gpus"), ("b", "gpus"), ("c", "cpus")):
        backend.submit(job(name=name, kueue_queue=queue))
    statuses = {status.name: status for status in backend.list_jobs()}
    assert {name: status.reason for name, status in statuses.items()} == dict.fromkeys("abc", "Queued")
    assert statuses["b"].message == "position 2 in queue gpus"
    assert len(asked(fake_cluster)) == 3
