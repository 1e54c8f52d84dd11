"""Reading what `runai` prints: JSON of several shapes, and tables."""

import json

import pytest

from components.launchers.backend import Phase
from components.launchers.runai.cli_output import workload, workloads
from trainer.errors import LaunchError

API = {
    "name": "train", "phase": "Pending", "phaseMessage": "no GPUs are free", "projectName": "team",
    "createdAt": "2026-11-22T09:00:00Z", "requestedPods": {"number": 3}, "runningPods": 1,
    "distributedFramework": "Pytorch", "labels": {"team": "x"},
    "pods": [
        {"name": "train-worker-0", "status": "ContainerCreating", "node": "gpu-2"},
        {"name": "train-master-0", "status": "Running", "nodeName": "gpu-1", "restarts": 2},
        {"name": "train-worker-1", "status": "Error", "exitCode": 3, "message": "it broke"},
    ],
}  # fmt: skip


def test_the_apis_fields():
    parsed = workload(json.dumps(API), "train")
    status = parsed.status
    assert (status.phase, status.message, status.nodes) == (Phase.PENDING, "no GPUs are free", 3)
    assert status.created == "2026-11-22T09:00:00Z"
    assert (parsed.framework, parsed.labels) == ("pytorch", {"team": "x"})
    pods = {pod.rank: (pod.name, pod.phase, pod.reason, pod.node) for pod in status.pods}
    assert pods == {
        0: ("train-master-0", "Running", "", "gpu-1"),
        1: ("train-worker-0", "Pending", "ContainerCreating", "gpu-2"),
        2: ("train-worker-1", "Failed", "Error", ""),
    }
    assert [(pod.exit_code, pod.restarts) for pod in status.pods] == [(None, 0), (None, 2), (3, 0)]


def test_sections_around_the_fields_and_labels_as_pairs():
    nested = {
        "General": {"Name": "train", "Status": "Completed", "Labels": ["team=x", "kubedet/spec-hash=0a"]},
        "Pods": [{"Pod": "train-0-0", "Status": "Completed"}],
    }
    parsed = workload(json.dumps([nested]), "train")
    assert (parsed.status.phase, parsed.status.reason) == (Phase.SUCCEEDED, "")
    assert parsed.labels == {"team": "x", "kubedet/spec-hash": "0a"}
    assert [(pod.name, pod.phase, pod.rank) for pod in parsed.status.pods] == [("train-0-0", "Succeeded", 0)]


@pytest.mark.parametrize(
    ("word", "phase"),
    [
        ("Creating", Phase.PENDING), ("Initializing", Phase.PENDING), ("Running", Phase.RUNNING),
        ("Degraded", Phase.RUNNING), ("Stopped", Phase.SUSPENDED), ("CrashLoopBackOff", Phase.RESTARTING),
        ("Completed", Phase.SUCCEEDED), ("Failed", Phase.FAILED), ("SomethingNew", Phase.PENDING),
    ],
)  # fmt: skip
def test_phases(word, phase):
    status = workload(json.dumps({"name": "a", "phase": word}), "a").status
    assert status.phase is phase
    assert status.reason == ("" if word.lower() in (str(phase), "completed") else word)


def test_nothing_is_no_workload():
    for text in ("", "null", "[]", "{}"):
        assert workload(text, "train") is None
        assert workloads(text) == []


DESCRIBED = """
Name:             train
Project:          team
Phase:            Running
Creation Time:    2026-11-22T09:00:00Z
Labels:           app=kubedet,kubedet/spec-hash=0123456789abcdef

Pods
 Pod              Status      Node    Started At   Completed At
 ───────────────────────────────────────────────────────────────
 train-master-0   Running     gpu-1   09:00
 train-worker-0   OOMKilled   gpu-2   09:00        09:05

Storage
 Name   Type   Status
 ────────────────────
 data   PVC    Bound

Events
 Type     Reason    Message
 Warning  Evicted   Phase: Failed
"""


def test_a_table_of_one_workload():
    parsed = workload(DESCRIBED, "train")
    assert (parsed.status.phase, parsed.status.created) == (Phase.RUNNING, "2026-11-22T09:00:00Z")
    assert parsed.labels == {"app": "kubedet", "kubedet/spec-hash": "0123456789abcdef"}
    pods = [(pod.name, pod.rank, pod.phase, pod.reason, pod.node) for pod in parsed.status.pods]
    assert pods == [
        ("train-master-0", 0, "Running", "", "gpu-1"),
        ("train-worker-0", 1, "Failed", "OOMKilled", "gpu-2"),
    ]


LISTED = """
 Workload   Type       Status     Project   Preemptible   Running/Req.Pods   GPU Alloc.
────────────────────────────────────────────────────────────────────────────────────────
 one        Training   Running    team      Yes                 1/1             8.00
 two        Training   Pending    team                          0/4
"""


def test_a_table_of_workloads():
    parsed = workloads(LISTED)
    pods = [(item.status.name, item.status.phase, item.running, item.status.nodes) for item in parsed]
    assert pods == [("one", Phase.RUNNING, 1, 1), ("two", Phase.PENDING, 0, 4)]


def test_a_list_as_the_api_gives_it():
    parsed = workloads(json.dumps({"next": 1, "workloads": [API, API | {"name": "b", "phase": "Failed"}]}))
    assert [(item.status.name, item.running) for item in parsed] == [("train", 1), ("b", 1)]
    assert parsed[1].status.phase is Phase.FAILED


def test_what_cannot_be_read_is_shown():
    with pytest.raises(LaunchError, match="describe train` cannot be read:\nsegmentation fault"):
        workload("segmentation fault", "train")
    with pytest.raises(LaunchError, match="list` cannot be read"):
        workloads("segmentation fault")
