"""SIGTERM and SIGINT: the job is deleted, first of all and at any moment."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from fake_api import Fault
from fake_cluster import endless

from components.launchers.cluster import watch
from trainer.errors import Interrupted

MASTER = "train-master-0"


def gone(fake_cluster):
    return fake_cluster.job("train") is None


SCRIPT = """
import signal, sys, time
from components.launchers.cluster import watch
from components.launchers.cluster.pytorchjob import PyTorchJobBackend
from components.launchers.cluster.timings import Timings
from components.launchers.spec import JobSpec
from trainer.errors import KubedetError
job = JobSpec(command=("python",), name="train", image="i:1")
try:
    watch.run(PyTorchJobBackend.connect(timings=Timings(read=60, late=1.5)), job)
except KubedetError as error:
    print(f"error: {error}", flush=True)
    sys.exit(error.exit_code)
"""


@pytest.fixture
def launcher(fake_cluster):
    """A launcher in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], env=fake_cluster.environment, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_deletes_the_job_first(fake_cluster, launcher, number):
    fake_cluster.lives[MASTER] = endless
    assert "running" in launcher.stdout.readline()
    assert "hello" in launcher.stdout.readline()
    begun = time.monotonic()
    os.kill(launcher.pid, number)
    out = launcher.stdout.read()
    assert launcher.wait(10) == 143
    (deletion,) = fake_cluster.requests("DELETE")
    assert deletion.at - begun < 3.0
    assert gone(fake_cluster)
    assert f"deleted on {number.name}" in out and "run the same again" in out


def test_a_signal_is_heard_while_an_answer_is_waited_for(fake_cluster, launcher):
    """And a deletion that the server is too busy for is asked for again; a second signal changes nothing."""
    fake_cluster.lives[MASTER] = endless
    assert "running" in launcher.stdout.readline()
    fake_cluster.faults += [Fault("GET", "pytorchjobs", delay=30, times=9), Fault("DELETE", status=503)]
    until = time.monotonic() + 10
    while fake_cluster.faults[0].times == 9 and time.monotonic() < until:
        time.sleep(0.02)
    begun = time.monotonic()
    os.kill(launcher.pid, signal.SIGTERM)
    os.kill(launcher.pid, signal.SIGTERM)
    assert launcher.wait(10) == 143
    assert time.monotonic() - begun < 20
    assert gone(fake_cluster)


def test_a_signal_while_the_job_is_created_leaves_nothing(fake_cluster, launcher):
    fake_cluster.faults.append(Fault("POST", "pytorchjobs", delay=0.7))
    fake_cluster.lives[MASTER] = endless
    until = time.monotonic() + 20
    while not fake_cluster.requests("POST") and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(launcher.pid, signal.SIGTERM)
    assert launcher.wait(10) == 143
    time.sleep(0.3)
    assert gone(fake_cluster)


def test_a_deletion_that_fails_is_told(backend, job, fake_cluster):
    """Whoever reads it knows that GPUs are still held."""
    fake_cluster.lives[MASTER] = endless
    fake_cluster.denied.add(("delete", "pytorchjobs"))
    handed = signal.getsignal(signal.SIGTERM)
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM]).start()
    with pytest.raises(Interrupted, match=r"could not be deleted.*403") as error:
        watch.run(backend, job(), lambda line: None)
    assert "kubedet job stop train" in error.value.fix
    assert signal.getsignal(signal.SIGTERM) is handed
