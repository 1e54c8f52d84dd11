"""Temporary folders go with their process, however it ends, and no sooner."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainer import storage
from trainer.base.temporary_folders import PREFIX, TemporaryFolder, temporary_folder

ROOT = Path(__file__).parents[3]
HOLD = """
import sys, time
from trainer.base.temporary_folders import temporary_folder
with temporary_folder() as folder:
    (folder / "file").write_text("x")
    print(folder, flush=True)
    time.sleep(600)
"""
WRITE = """
import sys, time
from trainer import storage
with storage.new_file(sys.argv[1]) as path:
    path.write_text("a part")
    print(path, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder of the system's for temporary ones, for this process and those that it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def started(code, *arguments):
    """Start a process; returns it with the path that it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, env=environment
    )
    return process, Path(process.stdout.readline().strip())


def killed(process):
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


def ours(place):
    return sorted(path for path in place.iterdir() if path.name.startswith(PREFIX))


def test_it_is_gone_when_the_block_ends_or_nobody_has_it(place):
    with temporary_folder() as folder:
        (folder / "a").mkdir()
        assert len(ours(place)) == 1 and list(folder.iterdir())
    kept = TemporaryFolder()
    assert ours(place)
    del kept
    assert ours(place) == []


def test_the_next_run_removes_what_a_kill_left_and_nothing_of_who_lives(place):
    dead, left = started(HOLD)
    alive, held = started(HOLD)
    try:
        killed(dead)
        assert (left / "file").exists()
        with temporary_folder() as own:
            assert not left.exists()
            assert (held / "file").exists() and own.exists()
    finally:
        killed(alive)


def test_other_folders_stay(place):
    for name in (f"{PREFIX}1", "kubedet-cache-0", "torchelastic_x"):
        (place / name).mkdir()
    TemporaryFolder().close()
    assert len(list(place.iterdir())) == 3


def test_folders_of_another_machine_or_container_stay(place):
    """Process ids are of a container: on a shared volume, that of a live process may be unknown here."""
    dead, left = started(HOLD)
    killed(dead)
    elsewhere = place / re.sub("-[0-9a-f]{8}-", "-0123abcd-", left.name)
    left.rename(elsewhere)
    half = place / f".best.pt.{dead.pid}-0123abcd-00000000.tmp"
    half.write_text("a part")
    TemporaryFolder().close()
    storage.remove_stale(str(place))
    assert ours(place) == [elsewhere] and half.exists()


def test_a_child_that_was_forked_does_not_take_it_along(place):
    folder = TemporaryFolder()
    if not (child := os.fork()):
        folder.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert folder.path.exists()
    folder.close()
    assert ours(place) == []


def test_the_next_writer_removes_the_half_file_of_one_that_was_killed(place):
    target = place / "model" / "MODEL_CARD.md"
    dead, left = started(WRITE, str(target))
    alive, held = started(WRITE, str(target))
    try:
        killed(dead)
        assert left.name.startswith(".MODEL_CARD.md.") and left.name.endswith(".tmp") and left.exists()
        storage.remove_stale(str(place))
        assert not left.exists() and held.exists()
    finally:
        killed(alive)
