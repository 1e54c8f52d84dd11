"""Processes that end with the one that started them, killed without a word."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.base.parent_watch import LAUNCHER
from trainer.config.parsing import to_json
from trainer.trackers.training_log import read_rows

pytestmark = pytest.mark.usefixtures("forked_processes")

WATCHING = (
    "from trainer.base import parent_watch; parent_watch.end_with_launcher(); print('on', flush=True); "
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


def test_without_a_launcher_it_goes_on(start):
    worker = start(f"import os; os.environ.pop('{LAUNCHER}', 0); " + WATCHING)
    assert worker.communicate(timeout=60)[0] == b"on\n" and worker.returncode == 0


def test_workers_of_a_pool_end_with_it_in_the_midst_of_their_work(start):
    parent = start(POOL)
    workers = wait_for(lambda: [pid for pid in children(parent.pid) if "spawn_main" in words_of(pid)], 2)
    time.sleep(0.5)  # They are busy or about to be: either way nobody tells them.
    parent.kill()
    parent.wait()
    assert wait_for(lambda: [pid for pid in workers if words_of(pid)], 0, seconds=60) == []


@pytest.mark.slow
def test_workers_end_with_a_launcher_that_is_killed(shards, tiny, tmp_path):
    output, config = str(tmp_path / "run"), tmp_path / "config.json"
    config.write_text(to_json(tiny(train__batch_size=2, train__epochs=500)))
    command = [sys.executable, "-m", "trainer", "launch", "--nproc", "1", "--", "train"]
    command += ["--config", str(config), "--shards", shards, "--output", output]
    launcher = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        assert wait_for(lambda: read_rows(output)[:1], 1) and len(named(output)) == 2
    finally:
        launcher.kill()
        launcher.wait()
    assert wait_for(lambda: named(output), 0, seconds=60) == []


def wait_for(find, count, seconds=240):
    """Return what `find` finds once it is that many, or after a while what there is."""
    end = time.monotonic() + seconds
    while len(pids := find()) != count and time.monotonic() < end:
        time.sleep(0.05)
    return pids


def named(word):
    """Processes that were started with a word."""
    ids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in ids if word in words_of(pid)]


def children(pid):
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def words_of(pid):
    """The command line of a process; "" of one that has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""
