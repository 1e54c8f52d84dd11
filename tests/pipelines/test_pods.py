"""Reasons for waiting and failures, read from the pods of a run in a fake cluster."""

import pytest
import run_pods

from components import jobs
from pipelines.wait import Pods, step_of

RUN = "11111111-2222-3333-4444-555555555555"


@pytest.fixture
def cluster(fake_cluster):
    """A fake cluster, and a function that puts a pod of the run there."""
    fake_cluster.put = lambda node, **state: run_pods.put(fake_cluster, RUN, node, **state)
    return fake_cluster


def seen(namespace=""):
    return Pods(RUN, namespace)


def ended(code=1, reason="Error", message=""):
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


@pytest.mark.parametrize(
    ("node", "step"),
    [
        ("k(0).root(0).exit-handler-1(0).train(0).executor(0)", "Train"),
        ("k.root.exit-handler-1.train.executor", "Train"),
        ("k(0).root(0).exit-handler-1(0).train-driver(1)", "Train (its driver)"),
        ("k(0).for-loop-1(0).iteration-iterations(1:1)(0).iteration-item(0).train(0).executor(0)", "Train"),
        ("k(0).root(0).for-loop-4(0).iteration-driver(0)", "iteration (its driver)"),
        ("k(0).root-driver(0)", "root (its driver)"),
        ("k(0).root(0).other(0).executor(0)", "other"),
    ],
)  # fmt: skip
def test_the_step_of_a_pod(node, step):
    assert step_of(node) == step


@pytest.mark.parametrize(
    ("log", "text", "fix"),
    [
        ("working\nerror: no disk\n  fix: free some\n", "no disk", "free some"),
        ("a\nb\nc\nd\ne\nTraceback\nValueError: x\nI1122 09:47:35.7 17 launcher.go:1] uploaded\n",
         "c\nd\ne\nTraceback\nValueError: x", ""),
    ],
)  # fmt: skip
def test_the_log_is_read_if_the_container_left_no_message(cluster, log, text, fix):
    cluster.put("train(0).executor(0)", main=ended(), log=log)
    (cause,) = seen().failed()
    assert (cause.step, cause.text, cause.fix) == ("Train", text, fix)


def test_a_pod_with_a_forbidden_log_is_named(cluster):
    name = cluster.put("train(0).executor(0)", main=ended(7), log="error: hidden")
    cluster.denied.add(("get", "pods/log"))
    (cause,) = seen().failed()
    assert cause.text == f"main ended with exit code 7; see `kubectl -n kubeflow logs {name} -c main`"


def test_the_last_attempt_counts(cluster):
    cluster.put("train(0).executor(0)", reason="Evicted", message="low")
    assert len(list(seen().failed())) == 1
    cluster.put("train(0).executor(1)", phase="Succeeded", main=ended(0, "Completed"))
    assert list(seen().failed()) == []


@pytest.mark.parametrize(
    ("state", "reason", "text"),
    [
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                             "message": '0/1 nodes are available: persistentvolumeclaim "no" not found.'}]},
            "Unschedulable",
            '0/1 nodes are available: persistentvolumeclaim "no" not found.',
        ),
        (
            {"main": {"waiting": {"reason": "ErrImagePull", "message": "not\nfound"}}},
            "ImagePullBackOff",
            "not found",
        ),
        (
            {"main": {"waiting": {"reason": "CreateContainerError", "message": 'secret "s" not found'}}},
            "CreateContainerError",
            'secret "s" not found',
        ),
    ],
)  # fmt: skip
def test_reasons_of_pending_pods(cluster, state, reason, text):
    cluster.put("train(0).executor(0)", phase="Pending", **state)
    cluster.put("prepare(0).executor(0)", phase="Running", main={"running": {}})
    assert list(seen().waiting()) == [("Train", reason, text)]


def test_the_pods_of_the_training_are_looked_at_too(cluster):
    run_pods.put(cluster, RUN, "train(0).executor(0)", phase="Running", main={"running": {}})
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}
    name = run_pods.put(cluster, "", "", phase="Pending", conditions=[unscheduled])
    labels = cluster.objects["pods", "kubeflow", name]["metadata"]["labels"]
    labels["app.kubernetes.io/instance"] = jobs.name_of(RUN)
    assert list(seen().waiting()) == [(f"Train: pod {name}", "Unschedulable", "no GPU")]


def test_events_explain_a_volume_that_cannot_be_mounted(cluster):
    starting = {"waiting": {"reason": "PodInitializing"}}
    name = cluster.put("train(0).executor(0)", phase="Pending", main=starting)
    assert list(seen().waiting()) == []
    cluster.event(name, "FailedMount", 'secret "no" not found', namespace="kubeflow", count=3)
    assert list(seen().waiting()) == [("Train", "FailedMount", 'secret "no" not found')]


@pytest.mark.parametrize(("namespace", "expected"), [("", "kubeflow"), ("", "default"), ("team", "team")])
def test_the_namespace_is_found(cluster, namespace, expected):
    cluster.put("train(0).executor(0)", main=ended(message="x"), namespace=expected)
    assert len(list(seen(namespace).failed())) == 1
    assert seen(namespace).namespace() == expected
