"""Processes that end with the one that started them, killed without a word."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.base.die_with_parent import LAUNCHER

WATCHING = (
    "from trainer.base import die_with_parent; die_with_parent.die_with_launcher(); print('on', flush=True); "
)
POOL = (
    "import time; from trainer.base.worker_pool import run; "
    "list(run(time.sleep, [300.0] * 2, 2, processes=True))"
)


@pytest.fixture
def start():
    """Starts a program in Python, with words after it; what still runs at the end is killed."""
    started = []

    def run(code, *words, **environment):
        env = {**os.environ, **environment}
        process = subprocess.Popen([sys.executable, "-c", code, *words], env=env, stdout=subprocess.PIPE)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_it_ends_with_its_launcher_whatever_it_does(start):
    launcher = start("import time; time.sleep(300)")
    worker = start(WATCHING + "import time; time.sleep(300)", **{LAUNCHER: str(launcher.pid)})
    assert worker.stdout.readline() == b"on\n" and worker.poll() is None
    launcher.kill()
    launcher.wait()
    assert worker.wait(timeout=60) == 143


def test_it_does_not_begin_without_its_launcher(start):
    gone = start("pass")
    gone.wait()
    assert start(WATCHING, **{LAUNCHER: str(gone.pid)}).communicate(timeout=60)[0] == b""


def test_workers_of_a_pool_end_with_it_in_the_midst_of_their_work(start):
    parent = start(POOL)
    workers = wait_for(lambda: [pid for pid in children(parent.pid) if "spawn_main" in words_of(pid)], 2)
    parent.kill()
    parent.wait()
    assert wait_for(lambda: [pid for pid in workers if words_of(pid)], 0, seconds=60) == []


def wait_for(find, count, seconds=240):
    """Return what `find` finds once it is that many, or after a while what there is."""
    end = time.monotonic() + seconds
    while len(pids := find()) != count and time.monotonic() < end:
        time.sleep(0.05)
    return pids


def children(pid):
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def words_of(pid):
    """The command line of a process; "" of one that has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""
