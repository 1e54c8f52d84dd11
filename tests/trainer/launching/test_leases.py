"""Leases: one holder at a time, and what happens when a holder dies or sleeps."""

import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from at_once import at_once

from trainer.base.errors import StorageError
from trainer.launching import leases

EXPIRY_SECONDS = 0.6
PROGRAM = """
import sys, time
from trainer.launching import leases
with leases.hold(sys.argv[1], "a process", patience=60, lapse=0.6) as lease:
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def uri(tmp_path):
    return str(tmp_path / "lease")


@pytest.fixture
def process(uri):
    started = subprocess.Popen([sys.executable, "-c", PROGRAM, uri], stdout=subprocess.PIPE, text=True)
    assert started.stdout.readline() == "held\n"
    yield started
    started.kill()
    started.wait()
    started.stdout.close()


def test_one_of_many_holds_it_at_a_time(uri):
    inside, most = [], []

    def work(number):
        for _ in range(2):
            with leases.hold(uri, f"thread {number}", patience=60, lapse=10):
                inside.append(number)
                most.append(len(inside))
                time.sleep(0.01)
                inside.remove(number)

    at_once(*(partial(work, number) for number in range(3)))
    assert most == [1] * 6


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_living_holder_is_named_and_a_dead_one_replaced(uri, process, number):
    with (
        pytest.raises(leases.HeldError, match="is held by a process"),
        leases.hold(uri, "another", patience=2 * EXPIRY_SECONDS, lapse=EXPIRY_SECONDS),
    ):
        pass
    os.kill(process.pid, number)
    with leases.hold(uri, "another", patience=60, lapse=EXPIRY_SECONDS) as lease:
        lease.check()


def test_short_looks_find_a_dead_holder_too(uri, process):
    watch = leases.Watch()
    assert not watch.is_free(uri, EXPIRY_SECONDS)
    process.kill()
    process.wait()
    end = time.monotonic() + 60
    while not watch.is_free(uri, EXPIRY_SECONDS) and time.monotonic() < end:
        time.sleep(EXPIRY_SECONDS / 4)
    with leases.hold(uri, "another", patience=0, lapse=EXPIRY_SECONDS, watch=watch) as lease:
        lease.check()


def test_a_holder_that_slept_does_not_continue(uri):
    with leases.hold(uri, "first", patience=1, lapse=EXPIRY_SECONDS) as first:
        first.check()
        first._ended.set()  # Its thread stops, as that of a stopped process does.
        with leases.hold(uri, "second", patience=60, lapse=EXPIRY_SECONDS) as second:
            with pytest.raises(StorageError, match="lost the lease"):
                first.check()
            second.check()
    with leases.hold(uri, "third", patience=1, lapse=EXPIRY_SECONDS) as third:
        third.check()
