"""The clean-up: what it removes, and what it says of steps that failed."""

import pytest
from cluster.api import Fault

from components import environment, run_end
from components.jobs import job_name

RUN = "0b9c8d7e-1111-2222-3333-444455556666"


@pytest.fixture
def add(served_cluster, monkeypatch):
    """Add the pod of a step, in a cluster that the clean-up seems to run in."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    usual = {"image": "i", "imageID": "i", "ready": False, "restartCount": 0}

    def pod(name, *, phase="Failed", code=2, message="", reason="Error", status=None, run=RUN, node=""):
        notes = {"workflows.argoproj.io/node-name": node} if node else {}
        state = {"terminated": {"exitCode": code, "reason": reason, "message": message,
                                "finishedAt": f"2026-11-22T10:00:0{code % 10}Z"}}  # fmt: skip
        containers = [{"name": "wait", "state": {}, **usual}, {"name": "main", "state": state, **usual}]
        return served_cluster.add(
            "pods",
            "default",
            {
                "metadata": {"name": name, "labels": {environment.RUN_LABEL: run}, "annotations": notes},
                "spec": {"containers": []},
                "status": {"phase": phase, "containerStatuses": containers, **(status or {})},
            },
        )

    return pod


def written(tmp_path, state, launcher="local"):
    path = tmp_path / "outcome.md"
    outcome = run_end.clean_up(launcher, RUN, state, str(path))
    return outcome, path.read_text()


def test_what_failed_is_told_in_the_order_of_its_end(add, tmp_path, caplog):
    where = "kubedet-x.root(0).exit-handler-1(0).train(0).executor(0)"
    add("late", code=3, message="the training failed\n  fix: raise memory_limit and batch_size", node=where)
    add("early", code=1, message="")
    add("well", phase="Succeeded", code=0, reason="Completed")
    add("another-run", message="not ours", run="other")
    outcome, text = written(tmp_path, "FAILED")
    failure = "the training failed\n  fix: raise memory_limit and batch_size"
    assert outcome == {"state": "failed", "reason": f"train: {failure}"}
    assert text == (
        "# Outcome: failed\n\n**early** failed:\n\n```\nno message (exit code 1)\n```\n"
        f"\n**train** failed:\n\n```\n{failure}\n```\n"
    )
    assert "train failed: the training failed" in caplog.text


def test_memory_and_eviction_are_named(add, tmp_path):
    add("big", code=137, reason="OOMKilled")
    add("moved", code=143, status={"reason": "Evicted", "message": "the node was low on memory"})
    _, text = written(tmp_path, "FAILED")
    assert "**big** failed:\n\n```\nOOMKilled: no message (exit code 137)\n" in text
    assert "Evicted: the node was low on memory" in text


@pytest.mark.parametrize("state", ["COMPLETE", "SUCCEEDED"])
def test_a_run_that_went_well_is_not_searched(add, tmp_path, state):
    add("retried", message="a try before the one that went well")
    outcome, text = written(tmp_path, state)
    assert outcome == {"state": "succeeded"} and "retried" not in text


def test_pods_that_cannot_be_read_do_not_keep_it_from_its_work(add, served_cluster, tmp_path, caplog):
    served_cluster.faults.append(Fault("GET", "/pods", status=403))
    outcome, text = written(tmp_path, "FAILED")
    assert outcome["state"] == "failed" and "The reason is unknown" in text
    assert "cannot be read" in caplog.text


LONG_AGO, LATER = "2026-11-22T10:00:00Z", "2126-11-22T10:00:00Z"
HELD_BACK = {"name": "score", "phase": "Succeeded", "code": 0, "message": "held back\ncoco/AP 0.1 < 0.5"}
NOTHING_NEW = HELD_BACK | {"message": "nothing new\nsince pets v1: 0 added"}
PASSED = HELD_BACK | {"message": "passed\ncoco/AP 0.6 >= 0.5"}
BROKEN = {"name": "score", "code": 1, "message": "no such split"}


@pytest.mark.parametrize(
    ("state", "steps", "spec", "began", "outcome", "reason", "notices"),
    [
        ("RUNNING", [HELD_BACK], {}, LONG_AGO, "held back", "coco/AP 0.1 < 0.5", 0),
        ("FAILED", [HELD_BACK], {"activeDeadlineSeconds": 0}, LONG_AGO, "held back", "coco/AP", 0),
        ("RUNNING", [NOTHING_NEW], {}, LONG_AGO, "nothing new", "since pets v1", 0),
        ("COMPLETE", [PASSED], {}, LONG_AGO, "passed", "coco/AP 0.6 >= 0.5", 0),
        ("FAILED", [BROKEN], {}, LONG_AGO, "failed", "no such split", 1),
        ("RUNNING", [BROKEN], {}, LONG_AGO, "failed", "no such split", 1),
        ("FAILED", [HELD_BACK | {"phase": "Failed", "code": 1}], {}, LONG_AGO, "failed", "score", 1),
        ("FAILED", [BROKEN], {"activeDeadlineSeconds": 0}, LONG_AGO, "stopped", "by a user during train", 1),
        ("RUNNING", [], {"shutdown": "Terminate"}, LONG_AGO, "stopped", "by a user during train", 1),
        ("RUNNING", [], {"activeDeadlineSeconds": 60}, LONG_AGO, "failed", "of 60 s during train", 1),
        ("FAILED", [BROKEN], {"activeDeadlineSeconds": 60}, LATER, "failed", "train", 1),
    ],
)  # fmt: skip
def test_the_outcome_follows_from_what_the_steps_recorded(
    add, served_cluster, tmp_path, monkeypatch, state, steps, spec, began, outcome, reason, notices
):
    sent = []
    monkeypatch.setattr(run_end.hooks, "on_step_end", lambda end: sent.append(end.outcome))
    monkeypatch.setenv("KFP_POD_NAME", "clean-up")
    owner = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "run-x", "uid": "u"}
    served_cluster.add(
        "pods",
        "default",
        {
            "metadata": {"name": "clean-up", "ownerReferences": [owner]},
            "spec": {"containers": [{"name": "main", "image": "i"}]},
            "status": {},
        },
    )
    served_cluster.add(
        "workflows", "default", {"metadata": {"name": "run-x"}, "spec": spec, "status": {"startedAt": began}}
    )
    for step in steps:
        add(**step)
    if spec:
        add("train", code=143)  # The end of the run stopped it, or it was evicted.
    told, text = written(tmp_path, state)
    assert told["state"] == outcome and reason in told["reason"] and f"# Outcome: {outcome}" in text
    assert ("no such split" in text) == (BROKEN in steps)
    assert ("**train** failed" in text) == (began == LATER)
    assert [item.event for item in sent] == [outcome] * notices


def test_a_job_that_is_left_is_removed(add, tmp_path, monkeypatch):
    removed = []
    monkeypatch.setattr(run_end.jobs, "delete_unfinished", lambda *given: removed.append(given))
    written(tmp_path, "FAILED", launcher="kubernetes")
    written(tmp_path, "FAILED", launcher="")
    assert removed == [("kubernetes", RUN)] and job_name(RUN).startswith("kubedet-0b9c8d7e")
