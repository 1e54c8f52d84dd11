"""Jobs of Run:ai, against a program of its name."""

import os
import signal
import threading
from itertools import pairwise

import pytest
from cluster.runai import RunaiProgram
from event_lines import failed
from patience import until

from components.launchers.backend import Phase, Timings
from components.launchers.cluster import watch
from components.launchers.kubernetes_names import LABEL_MANAGED, LABEL_SPEC
from components.launchers.runai import RunaiBackend
from components.launchers.spec import build_spec
from trainer.base.errors import ConfigError, Interrupted, LaunchError

HASTY = Timings(poll=0.05, removal=2, submit=20, replaced=0.1)


@pytest.fixture
def runai(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return RunaiProgram(tmp_path)


@pytest.fixture
def backend(runai):
    return RunaiBackend("team", HASTY)


def job(**fields):
    return build_spec(
        {"command": ["sh", "-c", "echo 'a b'; $(x)"], "name": "train", "image": "image:1"} | fields
    )


def test_one_node_is_a_standard_training_and_several_a_pytorch_one(backend, runai):
    backend.submit(job())
    backend.submit(job(name="wide", nodes=3, gpus=8))
    assert runai.verbs() == ["standard submit", "pytorch submit"]
    assert runai.workload("train")["command"] == ["sh", "-c", "echo 'a b'; $(x)"]
    call = next(call for call in runai.calls if call[2:4] == ["submit", "wide"])
    for pair in [("--project", "team"), ("--workers", "2"), ("--gpu-devices-request", "8")]:
        assert pair in list(pairwise(call))
    fresh = RunaiBackend("team", HASTY)  # Another process looks for the kind.
    assert [pod.name for pod in fresh.status("wide").pods] == [
        "wide-master-0",
        "wide-worker-0",
        "wide-worker-1",
    ]
    assert [fresh.status(name).nodes for name in ("train", "wide")] == [1, 3]


def test_the_same_job_is_adopted_and_another_or_a_failed_one_replaced(backend, runai):
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


def test_workloads_of_others_are_not_touched(backend, runai):
    runai.change("train", labels={"app": "x"})
    for act in (lambda: backend.submit(job()), lambda: backend.stop("train")):
        with pytest.raises(LaunchError, match="train was not created by kubedet"):
            act()
    runai.set_modes("no labels")
    with pytest.raises(LaunchError, match="train was not created by kubedet"):
        backend.submit(job())
    backend.stop("train")  # The user named it.
    assert runai.verbs() == ["standard delete"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"elastic": {"max_nodes": 2}}, "not support elastic"), ({"namespace": "x"}, "not accept --namespace")],
)
def test_jobs_that_runai_cannot_run_are_refused_before_it_is_called(backend, runai, fields, said):
    with pytest.raises(ConfigError, match=said):
        backend.submit(job(**fields))
    assert runai.calls == []


def test_each_line_comes_once_from_the_start_to_the_end_of_a_job(backend, runai):
    backend.submit(job())
    lines = [f"2026-11-22T09:00:00.{i:03}Z step {i}" for i in range(20)]
    runai.change(
        "train", phase="Pending", phases=["Pending", "Running", "Running"], lines={"train-0-0": lines[:7]}
    )
    runai.change_later("train", after=4, lines={"train-0-0": lines})
    runai.change_later("train", after=7, phase="Completed")
    assert [line.text for line in backend.logs("train")] == [f"step {i}" for i in range(20)]
    assert "--since-time" in runai.calls[-1]


@pytest.mark.parametrize(
    ("said", "kind", "fix"),
    [
        ("Error: you are not logged in", ConfigError, "runai login"),
        ("token has expired", ConfigError, "runai login"),
        ('Error: unknown command "training" for "runai"', ConfigError, "--target runai-submit-dist"),
        ("Error: project x was not found", ConfigError, "runai project list"),
        ("Error: quota exceeded", LaunchError, "follow the message"),
    ],
)
def test_refusals_of_the_program(backend, runai, said, kind, fix):
    (runai.folder / "said").write_text(said)
    (runai.folder / "runai").write_text(f"#!/bin/sh\ncat {runai.folder}/said >&2; exit 1\n")
    with pytest.raises((ConfigError, LaunchError)) as error:
        backend.submit(job(env={"KEY": "secret"}))
    assert type(error.value) is kind
    assert fix in error.value.fix
    assert said in error.value.message
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "said",
    [
        "Error: workload train was not found in project team",
        "Project team: the workload train does not exist",
    ],
)
def test_a_workload_that_does_not_exist(backend, runai, said):
    (runai.folder / "runai").write_text(f"#!/bin/sh\necho '{said}' >&2; exit 1\n")
    assert backend.status("train").phase is Phase.GONE


def test_a_program_that_does_not_answer_or_prints_something_else(backend, runai):
    backend.timings = Timings(submit=0.2)
    script = '#!/bin/sh\n[ "$3" = describe ] && echo "workload not found" >&2 && exit 1\nexec sleep 30\n'
    (runai.folder / "runai").write_text(script)
    with pytest.raises(LaunchError, match=r"does not answer within 0\.2 s"):
        backend.submit(job())
    for said in ("segmentation fault", '{"pods": [1]}', '{"requestedPods": {}}'):
        (runai.folder / "runai").write_text(f"#!/bin/sh\necho '{said}'\n")
        with pytest.raises(LaunchError, match="cannot read runai"):
            backend.status("train")


@pytest.mark.parametrize(
    ("word", "phase"),
    [
        ("Creating", Phase.PENDING), ("Running", Phase.RUNNING), ("Stopped", Phase.SUSPENDED),
        ("CrashLoopBackOff", Phase.RESTARTING), ("Completed", Phase.SUCCEEDED), ("Failed", Phase.FAILED),
        ("SomethingNew", Phase.PENDING),
    ],
)  # fmt: skip
def test_phases(backend, runai, word, phase):
    runai.change("train", phase=word)
    status = backend.status("train")
    assert status.phase is phase
    assert status.reason == ("" if word.lower() in (str(phase), "completed") else word)


def test_a_failed_job_is_reported_with_the_pod_that_caused_it(backend, runai):
    pods = [
        {"name": "train-master-0", "status": "Running"},
        {"name": "train-worker-0", "status": "Error", "exitCode": 3},
    ]
    times = "2026-11-22T09:00:00Z"
    lines = {"train-worker-0": [times + " " + failed("the loss is nan\n  fix: lower it")]}
    backend.submit(job(nodes=2))
    runai.change_later("train", after=2, phase="Failed", pods=pods, lines=lines)
    with pytest.raises(LaunchError) as error:
        watch.run(backend, job(nodes=2), lambda text: None)
    assert str(error.value) == (
        "pod train-worker-0 (rank 1) failed with exit code 3: the loss is nan\n  fix: lower it"
    )
    assert error.value.exit_code == 3


def test_a_stop_signal_deletes_the_job(backend, runai):
    output = []

    def end():
        until(lambda: any("hello" in line for line in output))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()
    with pytest.raises(Interrupted, match="the training was stopped"):
        watch.run(backend, job(), output.append)
    assert runai.verbs() == ["standard submit", "standard delete"]
