"""Why a run failed, from the API, the pods and the logs; test_pods.py tests the pods."""

import pytest
import run_pods

from pipelines import Access
from pipelines.kubeflow import Server
from pipelines.wait import Pods, raise_failure
from trainer.base.errors import LaunchError


def failed(*names, nodes=()):
    tasks = [{"display_name": name, "state": "FAILED"} for name in names]
    children = [{"pod_name": f"kubedet-abcde-{node}"} for node in nodes]
    if children:
        tasks.append({"display_name": "executor", "state": "FAILED", "child_tasks": children})
    return tasks


@pytest.fixture
def judged(kfp_server):
    """Returns the error for a run that failed, as the API describes it."""

    def judge_(tasks, **further):
        kfp_server.runs = [{"run_id": "r", "display_name": "try"}]
        kfp_server.states = [("FAILED", tasks, further)]
        server = Server(Access.find())
        with pytest.raises(LaunchError) as caught:
            raise_failure(server, server.run("r"), Pods("r", ""), 0)
        return caught.value

    return judge_


def test_an_error_of_the_api_comes_first(judged, fake_cluster):
    run_pods.put(
        fake_cluster, "r", "train(0).executor(0)", main={"terminated": {"exitCode": 1, "message": "p"}}
    )
    error = judged([{"display_name": "train", "state": "FAILED", "error": {"message": "said"}}])
    assert error.message == "the run try failed\n  Train: said"


def test_a_driver_that_fails_is_named_with_its_cause(judged, fake_cluster):
    log = "F1122 09:47:35.7 17 main.go:127] KFP driver: driver.Container(x) failed: no such Secret\nError: x"
    run_pods.put(fake_cluster, "r", "train-driver(0)", main={"terminated": {"exitCode": 1}}, log=log)
    error = judged(failed("train-driver", "train-driver(0)", "exit-handler-1", "root"))
    assert error.message == "the run try failed\n  Train (its driver): no such Secret"
    assert "kubectl -n kubeflow logs -l pipeline/runid=r" in error.fix


def test_several_steps_have_their_own_remedies(judged, fake_cluster):
    for name in ("train", "evaluate"):
        ended = {"terminated": {"exitCode": 1, "message": f"{name} broke\nbadly\n  fix: mend {name}"}}
        run_pods.put(fake_cluster, "r", f"{name}(0).executor(0)", main=ended)
    error = judged(failed("train", "evaluate"))
    assert "\n  Train: train broke\n    badly\n    fix: mend train" in error.message
    assert "\n  Evaluate and decide: evaluate broke" in error.message and error.fix == "see the steps above"


@pytest.mark.parametrize("template", ["retry-system-container-impl", "system-container-impl"])
def test_the_log_that_is_shown_is_read_where_no_cluster_is_reached(judged, kfp_server, template):
    kfp_server.logs[f"kubedet-abcde-{template}-77"] = "working\nerror: no disk\n  fix: free some\n"
    error = judged(failed("train", nodes=[77]))
    assert str(error) == "the run try failed\n  Train: no disk\n  fix: free some"


def test_without_a_cause_the_log_is_named(judged, kfp_server):
    error = judged(failed("train-driver", "evaluate"))
    assert error.message == "the run try failed\n  Train (its driver): failed\n  Evaluate and decide: failed"
    assert "look at the log of Train (its driver) and Evaluate and decide: in the UI at http" in error.fix
    assert f"{kfp_server.url}/#/runs/details/r" in error.fix


def test_the_run_itself_may_say_why(judged):
    error = judged([], error={"message": "the workflow is too big"})
    assert "  run: the workflow is too big" in error.message
    assert "look at the log of the step that failed" in judged([]).fix
