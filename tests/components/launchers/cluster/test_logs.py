"""Logs of pods: every line once through broken streams; several logs merged; progress."""

from dataclasses import replace

import pytest
from cluster.api import Fault
from cluster.pods import endless
from event_lines import progress

from components.launchers.cluster.logs import MergedLogs, PodLog
from trainer.launching import job_status
from trainer.launching.job_status import LOSS, SPEED

LOG = "/train-worker-0/log"
SECOND = 10**9


@pytest.fixture
def start(simulated, cluster):
    """Give the first pod of a job a life; returns it and its PodLog."""

    def begin(life, name="train", **options):
        simulated.lives[f"{name}-worker-0"] = life
        template = {"spec": {"containers": [{"name": "pytorch", "image": "i"}]}}
        replicas = {"Worker": {"replicas": 1, "restartPolicy": "Never", "template": template}}
        simulated.create_job(
            "default", {"metadata": {"name": name}, "spec": {"pytorchReplicaSpecs": replicas}}
        )
        pod = simulated.pod(f"{name}-worker-0")
        return pod, PodLog(cluster, pod.name, pod.uid, **options)

    return begin


def talker(lines, pause=0.0, **options):
    def life(pod):
        pod.run()
        for line in lines:
            pod.say(line, **options)
            pod.sleep(pause)
        pod.exit(0)

    return life


TILE_ID_STEP = [f"line {number} ✓" for number in range(40)]


@pytest.mark.parametrize("where", [0, 30, 45, 1000])
@pytest.mark.parametrize("how", ["cut", "end"])
def test_a_stream_that_breaks_anywhere_loses_and_repeats_nothing(start, simulated, how, where):
    faults = [Fault("GET", LOG, **{how: where}) for _ in range(3)]
    simulated.faults += faults

    def life(pod):
        pod.run()
        for line in TILE_ID_STEP:
            pod.say(line)
            pod.sleep(0.005)
        while any(fault.times for fault in faults):  # An empty log of a pod that has ended is a whole one.
            pod.sleep(0.01)
        pod.exit(0)

    _, log = start(life)
    assert list(log.lines()) == TILE_ID_STEP


def test_a_stream_that_stalls_is_reopened(start, simulated):
    simulated.faults.append(Fault("GET", LOG, cut=100, stall=120))
    _, log = start(talker(TILE_ID_STEP, pause=0.005))
    begun = simulated.clock.monotonic()
    assert list(log.lines()) == TILE_ID_STEP
    assert simulated.clock.monotonic() - begun < 60


@pytest.mark.parametrize("fault", [{"status": 503}, {"drop": True}], ids=str)
def test_a_refused_stream_is_asked_for_again(start, simulated, fault):
    simulated.faults.append(Fault("GET", LOG, times=3, **fault))
    _, log = start(talker(TILE_ID_STEP))
    assert list(log.lines()) == TILE_ID_STEP


def test_equal_lines_of_one_moment_are_counted(start, simulated):
    simulated.faults += [Fault("GET", LOG, cut=80), Fault("GET", LOG, cut=150)]
    lines = ["same"] * 7 + ["other"] + ["same"] * 3
    _, log = start(talker(lines, at=1_700_000_000 * SECOND))
    assert list(log.lines()) == lines


def test_lines_out_of_order_are_kept(start, simulated):
    simulated.faults += [Fault("GET", LOG, end=60), Fault("GET", LOG, cut=130)]
    at = [5.0, 4.9, 5.1, 5.05, 7.0, 6.9, 9.0]

    def life(pod):
        pod.run()
        for seconds in at:
            pod.say(str(seconds), at=int((1_700_000_000 + seconds) * SECOND))
        pod.exit(0)

    _, log = start(life)
    assert list(log.lines()) == [str(seconds) for seconds in at]


def test_a_rotated_log_is_read_on(start, simulated):
    """The node begins a new file: the stream ends, and the old lines are there no more."""
    rotated = []

    def life(pod):
        pod.run()
        pod.say("a", "b")
        pod.until(lambda: rotated)
        pod.rotate()
        pod.say("c", "d")
        pod.exit(0)

    simulated.faults.append(Fault("GET", LOG, end=2 * 33))
    _, log = start(life)
    lines = log.lines()
    assert [next(lines), next(lines)] == ["a", "b"]
    rotated.append(True)
    simulated.notify()
    assert list(lines) == ["c", "d"]


@pytest.mark.parametrize("cut", [-1, 70])
def test_a_restarted_containers_last_words_come_before_the_new_ones(start, simulated, cut):
    if cut >= 0:
        simulated.faults.append(Fault("GET", f"{LOG}?container=pytorch&timestamps=true&follow", cut=cut))

    def life(pod):
        pod.run()
        pod.say(*"abcde")
        simulated.clock.until(
            lambda: simulated.requests("GET", LOG)
        )  # Otherwise only the next container's log is read.
        pod.sleep(0.1)
        pod.say("last words")
        pod.restart(137)
        pod.say(*"fgh")
        pod.sleep(0.1)
        pod.exit(0)

    _, log = start(life)
    assert list(log.lines()) == [*"abcde", "last words", *"fgh"]


def test_the_last_words_are_asked_for_again(start, simulated):
    simulated.faults += [Fault("GET", "previous=true", status=500), Fault("GET", "previous=true", cut=40)]

    def life(pod):
        pod.run()
        pod.say("a", "b")
        pod.restart(137)
        pod.say("c")
        pod.exit(0)

    _, log = start(life)
    simulated.clock.sleep(1)
    assert list(log.lines()) == ["a", "b", "c"]


def test_a_last_line_without_an_end_is_read(start, simulated):
    def life(pod):
        pod.run()
        pod.say("a")
        pod.say("progress 100 %", end=b"")
        pod.exit(0)

    _, log = start(life)
    assert list(log.lines()) == ["a", "progress 100 %"]


def test_bytes_that_are_no_text_do_no_harm(start):
    _, log = start(talker([b"\xff\xfe", b"", b"windows\r"]))
    assert list(log.lines()) == ["\ufffd\ufffd", "", "windows"]


def test_a_pod_that_is_deleted_or_never_ran_ends_its_log(start, simulated):
    pod, log = start(lambda pod: pod.evict())
    assert list(log.lines()) == []
    simulated.delete_pod(pod)
    assert list(log.lines()) == []


def test_only_the_last_lines_are_asked_for(start, simulated):
    pod, log = start(talker(TILE_ID_STEP), tail=3)
    simulated.clock.until(lambda: pod.ended)
    assert list(log.lines()) == TILE_ID_STEP[-3:]


def test_what_is_there_now_is_read_without_waiting(start, simulated):
    def life(pod):
        pod.run()
        pod.say("a")
        pod.say("half", end=b"")
        pod.sleep(60)

    pod, log = start(life)
    simulated.clock.until(lambda: len(pod.containers[-1]) == 2)
    assert list(log.lines(follow=False)) == ["a", "half"]


def test_lines_of_pods_come_with_their_names(start, cluster):
    pods = [start(talker(["a", "b"]))[0], start(talker(["c"]), name="other")[0]]
    with MergedLogs(cluster) as feed:
        for pod in [*pods, *pods]:  # A pod is followed once.
            feed.follow(pod.name, pod.uid)
        lines = sorted((line.pod, line.text) for line in feed.drain(5.0))
    assert lines == [("other-worker-0", "c"), ("train-worker-0", "a"), ("train-worker-0", "b")]


def test_a_log_that_stays_unreadable_is_given_up_and_reported(start, simulated, cluster, caplog):
    simulated.faults.append(Fault("GET", LOG, times=10**6, status=500))
    cluster.timings = replace(cluster.timings, drain=1.0)
    pod, _ = start(talker(TILE_ID_STEP))
    with MergedLogs(cluster) as feed:
        feed.follow(pod.name, pod.uid)
        assert list(feed.drain(30.0)) == []
    assert "the end of the log of pod train-worker-0 cannot be read" in caplog.text


FIRST = "train-worker-0"


@pytest.fixture
def running(backend, job, simulated):
    simulated.lives[FIRST] = endless
    backend.submit(job())
    simulated.clock.until(lambda: backend.status("train").phase == "running")
    return backend.status("train"), simulated.pod(FIRST)


def test_the_log_of_rank_0_reports(backend, running):
    status, pod = running
    assert backend.with_progress(status).progress is None
    pod.say(progress(430, 1000, eta=285.0, metrics={LOSS: 0.532, SPEED: 41.0}), "something else")
    assert backend.with_progress(status).progress == job_status.TrainingProgress(
        43, 285, {LOSS: 0.532, SPEED: 41.0}
    )
