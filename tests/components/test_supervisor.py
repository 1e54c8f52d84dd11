"""Work in a process of its own: what is tried again, what is not, and how it ends."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components import steps
from components.steps import ProcessCrashed, ProcessKilled, RetryPolicy
from trainer.base.errors import ConfigError, Interrupted, StorageError

QUICK = RetryPolicy(tries=4, first_wait=0.01, longest_wait=0.02)


class Work:
    """Does something else at each try, and notes each in a file: every try has a process of its own."""

    def __init__(self, folder, *tries):
        self.notes, self.tries = Path(folder) / "tries", tries
        self.notes.write_text("")

    def __call__(self):
        with self.notes.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return self.tries[min(self.count, len(self.tries)) - 1]()

    @property
    def count(self):
        return len(self.notes.read_text().splitlines())


def away():
    raise StorageError("cannot read s3://bucket/x: the server is silent", fix="check it", transient=True)


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def bug():
    raise ZeroDivisionError("a bug")


def made():
    return {"images": 3}


@pytest.mark.parametrize("first", [away, killed])
def test_what_passes_is_tried_again_in_another_process(tmp_path, first):
    work = Work(tmp_path, first, first, made)
    assert steps.supervise("download", work, QUICK) == {"images": 3}
    pids = work.notes.read_text().split()
    assert len(set(pids)) == 3 and str(os.getpid()) not in pids


def test_a_bug_is_tried_again_only_where_the_work_goes_on_elsewhere(tmp_path, capfd):
    work = Work(tmp_path, bug, made)
    with pytest.raises(ProcessCrashed, match="ZeroDivisionError: a bug"):
        steps.supervise("download", work, QUICK)
    assert work.count == 1
    assert "Traceback" in capfd.readouterr().err
    work = Work(tmp_path, bug, made)
    assert steps.supervise("train", work, QUICK, adopts=True) == {"images": 3}


@pytest.mark.parametrize(("last", "error"), [(away, StorageError), (killed, ProcessKilled)])
def test_tries_come_to_an_end_with_what_the_last_one_said(tmp_path, last, error, caplog):
    work = Work(tmp_path, last)
    with caplog.at_level(logging.WARNING), pytest.raises(error) as caught:
        steps.supervise("download", work, QUICK)
    assert work.count == QUICK.tries
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3 and "trying again in 0 s (4 of 4)" in messages[-1]
    assert "step_memory" in caught.value.fix or error is StorageError


@pytest.mark.parametrize(
    ("env", "tries"),
    [({}, 1), ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, 5), ({steps.TRIES_VARIABLE: "3"}, 3)],
)
def test_a_cluster_has_patience(monkeypatch, env, tries):
    for name in ("KUBERNETES_SERVICE_HOST", steps.TRIES_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert RetryPolicy.from_environment().tries == tries


@pytest.mark.parametrize("text", ["0", "many", "-1", "1.5"])
def test_a_number_of_tries_that_is_none(monkeypatch, text):
    monkeypatch.setenv(steps.TRIES_VARIABLE, text)
    with pytest.raises(ConfigError, match=steps.TRIES_VARIABLE):
        RetryPolicy.from_environment()


WAITS = """
import signal, sys, time
from components import steps
from trainer.base.errors import Interrupted, StorageError

def saves(number, frame):
    print("saved", flush=True)
    raise Interrupted("the training was stopped", fix="run the same again")

def work():
    if sys.argv[1] == "handles":
        signal.signal(signal.SIGTERM, saves)
    if sys.argv[1] == "passes":
        raise StorageError("the store is away", transient=True)
    print("working", flush=True)
    time.sleep(60)

try:
    steps.supervise("train", work, steps.RetryPolicy(tries=5, first_wait=60.0), adopts=True)
except Interrupted as error:
    print(f"interrupted: {error.message}", flush=True)
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("handles", ["working", "saved", "interrupted: the training was stopped"]),
        ("passes", ["interrupted: the step train was stopped"]),
    ],
)
def test_a_request_to_end_reaches_the_work_and_nothing_is_tried_after_it(kind, said):
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS, kind], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    # It works, or waits for its next try.
    (process.stderr if kind == "passes" else process.stdout).readline()
    time.sleep(0.3)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == Interrupted.exit_code
    assert time.monotonic() - began < 50
    assert out.splitlines() == said[0 if kind == "passes" else 1 :]


ORPHANED = """
import os, signal, sys, time
from components import steps

def work():
    print("working", flush=True)
    time.sleep(60)

steps.supervise("train", work, steps.RetryPolicy(tries=5), on_orphaned=lambda: print("orphaned", flush=True))
"""


def test_the_work_of_a_killed_process_says_so_and_ends():
    """Kubeflow's launcher waits for all that holds its pipe: it saw the kill when the training was over."""
    with subprocess.Popen([sys.executable, "-c", ORPHANED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "working\n"
        process.kill()
        assert process.stdout.read() == "orphaned\n"
