"""A training writes nowhere but to its output, /tmp and /dev/shm: so is the root of its pods read-only."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config.parsing import to_json

ROOT = Path(__file__).parents[3]
CAGE = """mount --bind / / || exit 77
mount --bind "$1" /mnt && mount -o remount,bind,ro / && mount -t tmpfs tmpfs /tmp || exit 9
if touch "$2/written" 2>/dev/null; then exit 9; fi
shift 2
cd /tmp && exec "$@"
"""


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.skipif(not shutil.which("unshare") or os.getuid() != 0, reason="mounts nothing: needs root")
def test_a_training_needs_no_root_that_it_can_write(tiny, shards, tmp_path):
    shutil.copytree(shards, tmp_path / "shards")
    (tmp_path / "config.json").write_text(to_json(tiny(train__epochs=1)))
    cage = ["unshare", "--mount", "sh", "-c", CAGE, "sh", str(tmp_path), str(ROOT)]
    command = [sys.executable, "-B", "-m", "trainer", "launch", "--nproc", "2", "--", "train", "--config",
               "/mnt/config.json", "--shards", "/mnt/shards", "--output", "/mnt/run"]  # fmt: skip
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TMP"))}
    environment = {**kept, "HOME": "/tmp", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*cage, *command], env=environment, capture_output=True, text=True, check=False, timeout=500
    )
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("mounts nothing")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Read-only file system" not in done.stdout + done.stderr
    assert list((tmp_path / "run").rglob("best.pt"))
