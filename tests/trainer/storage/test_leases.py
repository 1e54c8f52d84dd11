"""Leases: one process at a time, and what becomes of those that die or sleep."""

import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from at_once import at_once

from trainer.base.errors import StorageError
from trainer.storage import leases

LAPSE = 0.6
PROGRAM = """
import sys, time
from trainer.storage import leases
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


@pytest.mark.slow
def test_of_many_one_at_a_time_holds_it(uri):
    assert most_at_a_time(uri) == [1] * 12


@pytest.mark.slow
@pytest.mark.parametrize("any_store", ["seaweedfs"], indirect=True)
def test_of_many_one_at_a_time_holds_it_in_a_store(any_store):
    assert most_at_a_time(f"{any_store}/lease") == [1] * 12


def most_at_a_time(uri):
    """Hold a lease twelve times, from four threads; return how many held it each time."""
    inside, most = [], []

    def work(number):
        for _ in range(3):
            with leases.hold(uri, f"thread {number}", patience=60, lapse=30):
                inside.append(number)
                most.append(len(inside))
                time.sleep(0.01)
                inside.remove(number)

    at_once(*(partial(work, number) for number in range(4)))
    return most


def test_a_living_holder_is_waited_for_and_named(uri, process):
    with (
        pytest.raises(leases.HeldError, match="is held by a process"),
        leases.hold(uri, "another", patience=3 * LAPSE, lapse=LAPSE),
    ):
        pass


def test_a_killed_holder_is_followed_after_a_while(uri, process):
    process.kill()
    process.wait()
    with leases.hold(uri, "another", patience=60, lapse=LAPSE) as lease:
        lease.check()


def test_whoever_only_looks_now_and_then_finds_a_killed_holder_too(uri, process):
    watch, looks = leases.Watch(), 0

    def look():
        with leases.hold(uri, "another", patience=0, lapse=LAPSE, watch=watch) as lease:
            lease.check()

    with pytest.raises(leases.HeldError):
        look()
    process.kill()
    process.wait()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            look()
            break
        except leases.HeldError:
            looks += 1
            time.sleep(LAPSE / 4)
    assert 2 <= looks < 60 / LAPSE


def test_a_holder_that_slept_does_not_go_on(uri):
    with leases.hold(uri, "first", patience=1, lapse=LAPSE) as first:
        first.check()
        first._ended.set()  # Its thread stands still, as that of a process that was stopped.
        with leases.hold(uri, "second", patience=60, lapse=LAPSE) as second:
            with pytest.raises(StorageError, match="not held by this process any more"):
                first.check()
            second.check()
    with leases.hold(uri, "third", patience=1, lapse=LAPSE) as third:
        third.check()


def test_a_stopped_process_is_followed_too(uri, process):
    os.kill(process.pid, signal.SIGSTOP)
    with leases.hold(uri, "another", patience=60, lapse=LAPSE) as lease:
        lease.check()
