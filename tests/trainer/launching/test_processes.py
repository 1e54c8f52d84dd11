"""Training on two processes: equal to one, stopped cleanly, killed without loss, refused clearly."""

import os
import signal
import subprocess
import sys

import pytest
from finished_runs import final_weights, losses
from patience import until
from two_processes import assert_two_equal_one

from trainer.config.parsing import to_json
from trainer.trackers.training_log import read_rows

pytestmark = pytest.mark.slow


AUGMENTED = {
    "loader__sizes": [96, 128], "loader__mosaic": 0.5, "loader__mixup": 0.3, "loader__plain_epochs": 1,
    "loader__sampling": "class_balanced", "train__patience": 5, "train__lr_batch": 10,
}  # fmt: skip


def test_two_processes_equal_one_on_the_same_global_batch(shards, tiny, tmp_path):
    """Of each five images one process has two, in passes of 1 and 1, the other three, of 1 and 2."""
    # At a thirtieth of the rate: at a tenth, on some processors, rounding turns the sign of a gradient.
    config = tiny(
        **AUGMENTED,
        train__precision="fp32",
        model__norm="group",
        train__ema_decay=0.9,
        train__lr=1e-4,
        train__global_batch=5,
        train__batch_size=2,
    )
    assert_two_equal_one(config, shards, tmp_path, steps=10, weights=0.05, near=1e-4)


def test_two_processes_agree_on_the_last_step_of_a_time_limit(node, training):
    arguments, output = training
    started = node(arguments(train__epochs=5000, train__minutes=0.1), "--nproc", "2")
    assert started.wait() == 0, started.output
    rows = read_rows(output)
    last = rows[-1]["step"]
    assert 2 <= last < 1000 and rows[-1]["kind"] == "val"


def reach(step, output, node):
    """Wait until a training has made that many steps, or has ended."""
    until(lambda: len(losses(output)) >= step or node.process.poll() is not None, 240)


def test_sigterm_saves_and_says_run_me_again(node, training):
    arguments, output = training
    started = node(arguments(train__epochs=30), "--nproc", "2")
    reach(3, output, started)
    started.process.send_signal(signal.SIGTERM)
    assert started.wait() == 143, started.output
    assert "Traceback" not in started.output
    assert final_weights(output)["step"] >= 3


def test_a_killed_worker_ends_the_run_with_a_message_and_loses_nothing_saved(node, training):
    arguments, output = training
    started = node(arguments(train__epochs=30), "--nproc", "2")
    reach(4, output, started)
    children = subprocess.run(
        ["pgrep", "-P", str(started.process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    assert started.wait() == 137, started.output
    assert "was killed (SIGKILL)" in started.output and "batch_size" in started.output
    assert final_weights(output)["step"] >= 2


LATE = """
import os, sys, time
from trainer import storage
from trainer.__main__ import main
write = storage.write_json
def late(uri, value):
    if uri.endswith("result.json"):
        time.sleep(3)
    write(uri, value)
storage.write_json = late
code = main(sys.argv[1:])
sys.exit(code or (0 if os.path.exists(sys.argv[-1] + "/result.json") else 9))
"""
"""A training in which the last of all is written late, and which ends with 9 where that is not there."""


def test_no_process_ends_before_the_first_has_written_all(shards, tiny, tmp_path, port):
    """Where the first end decides for a job, what the others have yet to write would be lost."""
    path, output = tmp_path / "config.json", tmp_path / "run"
    path.write_text(to_json(tiny(train__batch_size=2, train__epochs=1)))
    command = ["train", "--config", str(path), "--shards", shards, "--output", str(output)]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    first, other = (
        subprocess.Popen(
            [sys.executable, "-c", LATE, *command],
            env={**os.environ, **place, "RANK": rank, "LOCAL_RANK": "0"},
        )
        for rank in ("0", "1")
    )
    try:
        assert (other.wait(240), first.wait(240)) == (0, 0)
    finally:
        for each in (first, other):
            each.kill()
