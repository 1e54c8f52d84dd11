"""Reasons of jobs in Kueue's queues, as written by Kueue v0.19.2."""

import itertools
import re
from dataclasses import replace
from functools import partial

import pytest
from cluster.fixtures import connect_backend
from cluster.kueue import BOTH, PREEMPTED, QUOTA, Kueue
from cluster.pods import endless, fine
from kinds import both

from components.launchers.backend import JobStatus, Phase, PodStatus
from components.launchers.cluster.kinds import KINDS
from components.launchers.cluster.kueue import find_installed, framework_name
from components.launchers.cluster.pods import PodHistory
from trainer.base.errors import LaunchError


@pytest.fixture
def kueue(simulated):
    return Kueue(simulated)


@pytest.fixture
def waiting(backend, job, kueue):
    """A job that waits in the queue `gpus`; tells how it is."""
    backend.submit(job(kueue_queue="gpus"))
    return lambda: backend.status("train")


def asked(simulated):
    return [seen.path for seen in simulated.requests(path="kueue.x-k8s.io")]


def test_a_job_that_waits_for_quota_reports_why(waiting, kueue):
    kueue.set_waiting("train", QUOTA)
    status = waiting()
    assert (status.phase, status.reason) == (Phase.SUSPENDED, "Queued")
    assert status.message == f"in queue gpus: {QUOTA}"


def test_a_job_that_never_fits_is_told_so(waiting, kueue):
    kueue.set_waiting("train", "insufficient quota: request (300m) > maximum capacity (200m)")
    assert "capacity (200m); it never fits unless it requests less" in waiting().message


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
    kueue.set_waiting("train", message, reason)
    status = waiting()
    assert (status.reason, status.message.partition(": ")[2]) == (word, message)


@both
def test_an_evicted_job_reports_its_reason(simulated, waiting, kueue, first):
    simulated.lives[first] = endless
    kueue.admit("train")
    assert waiting().reason != "Queued"
    kueue.evict("train")
    status = waiting()
    assert (status.phase, status.reason) == (Phase.SUSPENDED, "Preempted")
    taken = PREEMPTED.partition("; preemptor")[0]
    assert status.message == f"taken back by Kueue (Preempted: {taken}), in queue gpus"
    kueue.set_waiting("train", QUOTA)
    assert waiting().message == f"taken back by Kueue (Preempted: {taken}), in queue gpus: {QUOTA}"


def test_an_older_kueue_is_asked_in_its_own_version(simulated, backend, job):
    kueue = Kueue(simulated, versions=("v1beta1",))
    backend.submit(job(kueue_queue="gpus"))
    kueue.set_waiting("train", QUOTA)
    assert backend.status("train").message == f"in queue gpus: {QUOTA}"
    seen = len(asked(simulated))
    assert backend.status("train").reason == "Queued"
    assert not any("v1beta2" in path for path in asked(simulated)[seen:])  # Once is enough.
    assert str(find_installed(backend.cluster)) == "Kueue (API kueue.x-k8s.io/v1beta1)"


def test_a_workload_without_the_jobs_label_is_found_by_its_owner(simulated, backend, job, kueue):
    kueue.labels = False
    backend.submit(job(kueue_queue="gpus"))
    assert backend.status("train").reason == "Queued"


def test_without_the_right_to_see_workloads_the_right_is_named(simulated, waiting):
    simulated.denied.add(("list", "workloads"))
    status = waiting()
    assert (status.phase, status.reason) == (Phase.SUSPENDED, "QueueUnknown")
    assert 'apiGroups ["kueue.x-k8s.io"], resources ["workloads"], verbs ["list"]' in status.message


def test_a_list_reads_workloads_once(simulated, backend, job, kueue):
    for name, queue in (("a", "gpus"), ("b", "cpus")):
        backend.submit(job(name=name, kueue_queue=queue))
    statuses = {status.name: status for status in backend.list_jobs()}
    assert {name: status.reason for name, status in statuses.items()} == dict.fromkeys("ab", "Queued")
    assert statuses["b"].message == "in queue cpus"
    assert len(asked(simulated)) == 1


@pytest.fixture
def quick(simulated, kind, timings):
    """The backend, which waits only half a second for Kueue."""
    return connect_backend(simulated, [kind], replace(timings, unserved=0.5))


@pytest.fixture
def meanwhile(run, simulated):
    """Do something, one step after the other, as soon as the run has said what each step waits for."""

    def begin(*steps):
        def walk():
            start = 0
            for words, act in steps:
                while not any(words in line for line in run.lines[start:]):
                    simulated.clock.sleep(0.01)
                start = len(run.lines)
                act()

        simulated.clock.start(walk)

    return begin


def job_lines(lines):
    return [line for line in lines if line.startswith("job ")]


def test_a_suspended_job_waits_for_its_queue_however_long(run, quick, simulated, meanwhile):
    kueue = Kueue(simulated)

    def quota():
        kueue.set_waiting("train", QUOTA)
        simulated.later(2.0, kueue.admit, "train")

    meanwhile(("in queue gpus", quota))
    lines = job_lines(run(quick, kueue_queue="gpus", start_timeout=1))
    assert lines[:2] == [
        "job train: suspended, in queue gpus",
        f"job train: suspended, in queue gpus: {QUOTA}",
    ]
    assert "job train: succeeded" in lines
    assert sum("suspended" in line and "no output for" not in line for line in lines) == 2, lines


@both
def test_a_job_that_no_controller_releases_is_given_up(run, quick, simulated, kind):
    ours, (other,) = framework_name(kind), [name for name in BOTH if name != framework_name(kind)]
    Kueue(simulated, serves=[other])
    with pytest.raises(LaunchError) as error:
        run(quick, kueue_queue="gpus", start_timeout=600)
    assert re.match(
        r"the job train was given up after \d+ s in queue gpus: Kueue has no Workload", error.value.message
    )
    assert "Kueue (API kueue.x-k8s.io/v1beta2)" in error.value.message
    assert f"name {ours} in integrations.frameworks" in error.value.fix
    assert f"use a {other.split('/')[1]}" in error.value.fix and "omit kueue_queue" in error.value.fix
    assert simulated.job("train") is None


def test_so_is_one_where_there_is_no_kueue(run, quick, simulated):
    with pytest.raises(LaunchError, match="no Kueue is installed: the cluster does not know its Workloads"):
        run(quick, kueue_queue="gpus", start_timeout=600)
    assert simulated.job("train") is None


@pytest.mark.parametrize(
    ("spoil", "message", "fix"),
    [
        (
            lambda kueue: kueue.set_waiting("train", "LocalQueue gpus doesn't exist", "Inadmissible"),
            "in queue gpus: LocalQueue gpus doesn't exist",
            "set kueue_queue to a LocalQueue",
        ),
        (
            lambda kueue: kueue.workload("train")["spec"].update(active=False),
            "in queue gpus: its Workload is not active",
            "kubectl describe workload",
        ),
        (
            lambda kueue: kueue.set_condition("train", "Admitted", "True", "Admitted", ""),
            "in queue gpus: admitted, but not started yet",
            "run the same command again",
        ),
    ],
    ids=["no queue", "deactivated", "admitted and never released"],
)
def test_one_that_its_queue_never_lets_go_is_given_up(run, quick, simulated, meanwhile, spoil, message, fix):
    kueue = Kueue(simulated)
    meanwhile(("in queue gpus", lambda: spoil(kueue)))
    with pytest.raises(LaunchError, match=r"the job train was given up after \d+ s") as error:
        run(quick, kueue_queue="gpus", start_timeout=1)
    assert message in error.value.message and fix in error.value.fix
    assert simulated.job("train") is None


def test_a_job_that_somebody_suspends_himself_waits_for_him(run, quick, simulated, meanwhile):
    def release():
        simulated.clock.sleep(1.5)
        job = simulated.job("train")
        simulated.suspend(job, False)

    meanwhile(("suspended", release))
    lines = run(quick, suspend=True, start_timeout=1)
    assert "job train: suspended by its queue or by a user" in lines
    assert "job train: succeeded" in lines


@both
def test_a_job_that_is_taken_back_resumes_and_that_counts_as_no_restart(
    run, quick, simulated, meanwhile, first
):
    kueue = Kueue(simulated)
    simulated.lives[first] = [endless, endless, endless, fine]
    simulated.termination_seconds = 0.3
    again = ("taken back by Kueue (Preempted: ", lambda: kueue.admit("train"))
    runs = ("running", lambda: kueue.evict("train"))
    meanwhile(("in queue", lambda: kueue.admit("train")), runs, again, runs, again, runs, again)
    lines = run(quick, kueue_queue="gpus", backoff=0, start_timeout=5)
    phases = [line.split()[2].strip(",:") for line in job_lines(lines)]
    once = ["suspended", "pending", "running"]
    kept = [phase for phase, _ in itertools.groupby(phases)]
    assert kept[-1] == "succeeded"
    assert [phase for phase in kept if phase in ("suspended", "running")][:6] == ["suspended", "running"] * 3
    assert set(kept) <= {*once, "succeeded"}
    assert not [line for line in lines if "restarted" in line]


@pytest.mark.parametrize("title", [kind.title for kind in KINDS.values()])
def test_pods_that_end_slowly_when_their_job_is_taken_back_are_no_restarts(cluster, title):
    """A TrainJob's pods have other names each time: old ones and new ones are there side by side."""
    count = PodHistory(cluster).with_restarts
    of = partial(JobStatus, "train", kind=title, queue="gpus")
    first, second, third = (PodStatus(f"train-{uid}", "Running", 0, uid=uid) for uid in "123")
    count(of(Phase.RUNNING, pods=(first,)))
    count(of(Phase.SUSPENDED, pods=(first,)))
    both = count(of(Phase.PENDING, pods=(first, second)))
    assert (both.phase, [item.restarts for item in both.pods]) == (Phase.PENDING, [0, 0])
    lost = count(of(Phase.PENDING, pods=(third,)))
    assert (lost.phase, lost.pods[0].restarts) == (Phase.RESTARTING, 1)
