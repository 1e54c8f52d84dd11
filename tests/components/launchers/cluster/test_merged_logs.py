"""The lines of several pods in one stream."""

from dataclasses import replace

import pytest
from fake_api import Fault

from components.launchers.cluster.logs import MergedLogs

LOG = "/train-master-0/log"
NUMBERED = [f"line {number}" for number in range(40)]


@pytest.fixture
def start(fake_cluster):
    """Let a pod print lines and end well; returns it."""

    def begin(lines, name="train"):
        def life(pod):
            pod.run()
            pod.say(*lines)
            pod.exit(0)

        fake_cluster.lives[f"{name}-master-0"] = life
        template = {"spec": {"containers": [{"name": "pytorch", "image": "i"}]}}
        replicas = {"Master": {"replicas": 1, "restartPolicy": "Never", "template": template}}
        fake_cluster.create_job(
            "default", {"metadata": {"name": name}, "spec": {"pytorchReplicaSpecs": replicas}}
        )
        return fake_cluster.pod(f"{name}-master-0")

    return begin


def test_lines_of_pods_come_with_their_names(start, cluster):
    pods = [start(["a", "b"]), start(["c"], name="other")]
    with MergedLogs(cluster) as feed:
        for pod in [*pods, *pods]:  # A pod is followed once.
            feed.follow(pod.name, pod.uid)
        lines = sorted((line.pod, line.text) for line in feed.rest(5.0))
    assert lines == [("other-master-0", "c"), ("train-master-0", "a"), ("train-master-0", "b")]


def test_a_log_that_stays_unreadable_is_given_up_and_told(start, fake_cluster, cluster, caplog):
    fake_cluster.faults.append(Fault("GET", LOG, times=10**6, status=500))
    cluster.timings = replace(cluster.timings, drain=1.0)
    pod = start(NUMBERED)
    with MergedLogs(cluster) as feed:
        feed.follow(pod.name, pod.uid)
        assert list(feed.rest(30.0)) == []
    assert "the end of the log of pod train-master-0 cannot be read" in caplog.text


def test_a_missing_permission_is_told(start, fake_cluster, cluster, caplog):
    fake_cluster.denied.add(("get", "pods/log"))
    pod = start(NUMBERED)
    with MergedLogs(cluster) as feed:
        feed.follow(pod.name, pod.uid)
        assert list(feed.rest(5.0)) == []
    assert 'resources ["pods/log"], verbs ["get"]' in caplog.text


def test_a_flood_of_lines_does_not_hide_the_time(start, cluster):
    pod = start(NUMBERED * 100)
    with MergedLogs(cluster) as feed:
        feed.follow(pod.name, pod.uid)
        some = list(feed.lines(0.01))
        rest = list(feed.rest(5.0))
    assert [line.text for line in some + rest] == NUMBERED * 100
    assert rest
