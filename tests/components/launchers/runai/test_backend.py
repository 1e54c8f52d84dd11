"""The life of a job behind Run:ai's command line, against a program of its name."""

import os
import signal
import threading
import time

import pytest
from patience import until

from components.launchers.backend import Phase
from components.launchers.render.labels import LABEL_MANAGED, LABEL_SPEC
from components.launchers.runai import watch
from components.launchers.runai.backend import RunaiBackend
from components.launchers.runai.cli import Cli
from trainer.errors import ConfigError, Interrupted, LaunchError


def test_one_node_is_standard_and_several_are_pytorch(backend, job, runai):
    backend.submit(job())
    backend.submit(job(name="wide", nodes=3, gpus=8))
    assert runai.verbs() == ["standard submit", "pytorch submit"]
    assert runai.workload("train")["command"] == ["sh", "-c", "echo 'a b'; $(x)"]
    call = next(call for call in runai.calls if call[2:4] == ["submit", "wide"])
    assert call[call.index("--project") + 1] == "team"
    assert call[call.index("--workers") + 1] == "2"
    assert call[call.index("--gpu-devices-request") + 1] == "8"
    status = backend.status("wide")
    assert (status.phase, status.nodes) == (Phase.RUNNING, 3)
    assert [pod.name for pod in status.pods] == ["wide-master-0", "wide-worker-0", "wide-worker-1"]


def test_a_new_process_finds_the_kind_by_itself(backend, job, runai):
    backend.submit(job())
    backend.submit(job(name="wide", nodes=2))
    fresh = RunaiBackend(Cli("team"), backend.timings)
    assert [fresh.status(name).nodes for name in ("train", "wide")] == [1, 2]
    assert fresh.status("none").phase is Phase.GONE
    assert [line.text for line in fresh.logs("train", follow=False)] == ["hello from train-0-0"]
    fresh.stop("train")
    assert runai.verbs()[-1] == "standard delete"


def test_the_same_job_is_taken_up_another_replaced(backend, job, runai):
    backend.submit(job())
    backend.submit(job())
    assert runai.verbs() == ["standard submit"]
    backend.submit(job(env={"A": "b"}))
    assert runai.verbs() == ["standard submit", "standard delete", "standard submit"]
    runai.change("train", phase="Failed")
    backend.submit(job(env={"A": "b"}))
    assert runai.verbs()[3:] == ["standard delete", "standard submit"]
    labels = runai.workload("train")["labels"]
    assert labels[LABEL_MANAGED] == "kubedet" and len(labels[LABEL_SPEC]) == 16


def test_what_others_made_is_left_alone(backend, job, runai):
    runai.change("train", labels={"app": "x"})
    for act in (lambda: backend.submit(job()), lambda: backend.stop("train")):
        with pytest.raises(LaunchError, match="not made by kubedet"):
            act()
    runai.set_modes("silent labels")
    with pytest.raises(LaunchError, match="does not tell whose it is") as error:
        backend.submit(job())
    assert "kubedet job stop --backend runai train" in error.value.fix
    backend.stop("train")  # Named by its operator, it is meant.
    assert runai.verbs() == ["standard delete"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"elastic": {"max_nodes": 2}}, "no elastic"),
        ({"namespace": "x"}, "its project's namespace"),
        ({"image": ""}, "no container image"),
        ({"runai_queue": "other"}, "runai_queue is other, and the project is team"),
    ],
)
def test_what_runai_cannot_do_is_refused_before_it_is_called(backend, job, runai, fields, said):
    with pytest.raises(ConfigError, match=said):
        backend.submit(job(**fields))
    assert runai.calls == []


def test_a_version_with_tables_alone(backend, job, runai):
    runai.set_modes("tables")
    backend.submit(job(nodes=2))
    backend.submit(job(nodes=2))  # Its labels are read from the table.
    assert runai.verbs() == ["pytorch submit"]
    status = backend.status("train")
    assert [(pod.rank, pod.phase) for pod in status.pods] == [(0, "Running"), (1, "Running")]
    (listed,) = backend.list_jobs()
    assert (listed.status.name, listed.status.phase, listed.running) == ("train", Phase.RUNNING, 2)


def test_list_has_both_kinds_the_newest_first(backend, job, runai):
    backend.submit(job())
    backend.submit(job(name="wide", nodes=2))
    runai.change("wide", createdAt="2026-11-22T10:00:00Z", phase="Pending", runningPods=0)
    output = [(item.status.name, item.status.phase, item.running) for item in backend.list_jobs()]
    assert output == [("wide", Phase.PENDING, 0), ("train", Phase.RUNNING, 1)]


def test_logs_begin_when_the_job_runs_and_go_on_where_a_stream_broke(backend, job, runai):
    backend.submit(job())
    lines = [f"2026-11-22T09:00:00.{i:03}Z step {i}" for i in range(20)]
    runai.change("train", phase="Pending", phases=["Pending", "Pending", "Running"],
                 lines={"train-0-0": lines}, broken_after=7)  # fmt: skip
    threading.Timer(1.5, lambda: runai.change("train", phase="Completed")).start()
    output = [line.text for line in backend.logs("train")]
    assert output == [f"step {i}" for i in range(20)]
    assert "--since-time" in runai.calls[-1]


def test_logs_of_another_pod_and_of_none(backend, job, runai):
    backend.submit(job(nodes=2))
    (line,) = backend.logs("train", follow=False, pod="train-worker-0")
    assert (line.pod, line.text) == ("train-worker-0", "hello from train-worker-0")
    runai.change("train", phase="Pending")
    with pytest.raises(LaunchError, match="pod is not ready"):
        list(backend.logs("train", follow=False))


def test_a_command_in_a_pod(backend, job, runai, capfd):
    backend.submit(job(nodes=2))
    command = ["sh", "-c", 'echo "$1"; exit 5', "x", "a b"]
    assert backend.execute("train", command, pod="train-worker-0") == 5
    assert capfd.readouterr().out == "a b\n"
    arguments = ["training", "pytorch", "exec", "train", "--pod", "train-worker-0", "--project", "team", "--"]
    assert runai.calls[-1] == [*arguments, *command]


def test_not_logged_in(backend, job, runai):
    runai.set_modes("stranger")
    with pytest.raises(ConfigError, match="not logged in") as error:
        backend.status("train")
    assert "runai login" in error.value.fix


def test_watched_to_a_good_end(backend, job, runai):
    output = []

    def end():
        until(lambda: {"[train-0-0] hello from train-0-0", "job train: running"} <= set(output))
        runai.change("train", phase="Completed")

    threading.Thread(target=end, daemon=True).start()
    watch.run(backend, job(), output.append)
    assert "[train-0-0] hello from train-0-0" in output
    assert "job train: running" in output
    assert output[-1] == "job train: succeeded"
    assert runai.verbs() == ["standard submit"]  # It stays, with its log, for its ttl.


def test_watched_to_a_bad_end(backend, job, runai):
    pods = [
        {"name": "train-master-0", "status": "Running"},
        {"name": "train-worker-0", "status": "Error", "exitCode": 3},
    ]
    lines = {
        "train-worker-0": [
            "2026-11-22T09:00:00Z error: the loss is nan",
            "2026-11-22T09:00:00Z   fix: lower it",
        ]
    }
    backend.submit(job(nodes=2))
    threading.Timer(0.4, lambda: runai.change("train", phase="Failed", pods=pods, lines=lines)).start()
    with pytest.raises(LaunchError) as error:
        watch.run(backend, job(nodes=2), lambda text: None)
    assert str(error.value) == (
        "pod train-worker-0 (rank 1) failed with exit code 3: the loss is nan\n  fix: lower it"
    )
    assert error.value.exit_code == 3


@pytest.mark.slow
def test_a_job_that_does_not_start_is_deleted(backend, job, runai):
    backend.submit(job(start_timeout=1))
    runai.change("train", phase="Pending", phaseMessage="no GPUs")
    with pytest.raises(LaunchError, match="does not run after 1 s: no GPUs"):
        watch.run(backend, job(start_timeout=1), lambda text: None)
    assert runai.verbs() == ["standard submit", "standard delete"]


def test_a_deadline_deletes_the_job(backend, job, runai):
    with pytest.raises(LaunchError, match="stopped at its deadline of 1 s"):
        watch.run(backend, job(deadline=1), lambda text: None)
    assert runai.verbs() == ["standard submit", "standard delete"]


def test_asked_to_end_it_deletes_the_job(backend, job, runai):
    output = []

    def end():
        while not any("hello" in line for line in output):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()
    with pytest.raises(Interrupted, match="the training was stopped"):
        watch.run(backend, job(), output.append)
    assert runai.verbs() == ["standard submit", "standard delete"]
    assert output[-1] == "job train: deleted on SIGTERM"
