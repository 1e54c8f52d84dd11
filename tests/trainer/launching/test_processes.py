"""Training on two processes: equal to one, stopped cleanly, killed without loss, refused clearly."""

import os
import signal
import subprocess
import sys
import time

import pytest
from finished_runs import final_weights, losses

from trainer.config.parsing import to_json
from trainer.training.loop import train

pytestmark = pytest.mark.usefixtures("forked_processes")

FP32 = {"train__precision": "fp32"}


def launch(config, shards, output):
    os.makedirs(output, exist_ok=True)
    path = os.path.join(output, "config.json")
    with open(path, "w") as file:
        file.write(to_json(config))
    command = [sys.executable, "-m", "trainer", "launch", "--nproc", "2", "--", "train"]
    command += ["--config", path, "--shards", shards, "--output", output]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


AUGMENTED = {
    "loader__sizes": [96, 128], "loader__mosaic": 0.5, "loader__mixup": 0.3, "loader__plain_epochs": 1,
    "loader__sampling": "class_balanced", "train__patience": 5, "train__lr_batch": 10,
    "train__find_batch_size": True,
}  # fmt: skip


@pytest.mark.slow
def test_two_processes_equal_one_on_the_same_global_batch(shards, tiny, tmp_path):
    """Of each five images one process has two, in passes of 1 and 1, the other three, of 1 and 2."""
    # At a thirtieth of the rate: at a tenth, on some processors, rounding turns the sign of a gradient.
    common = {
        **FP32, "model__norm": "group", "train__ema_decay": 0.9, "train__global_batch": 5, "train__lr": 1e-4,
        **AUGMENTED,
    }  # fmt: skip
    two = launch(tiny(**common, train__batch_size=2), shards, str(tmp_path / "two"))
    train(tiny(**common, train__batch_size=5), shards, str(tmp_path / "one"))
    output = two.communicate(timeout=240)[0]
    assert two.returncode == 0, output
    one, other = losses(str(tmp_path / "one")), losses(str(tmp_path / "two"))
    assert len(one) == len(other) == 10
    for step in one:
        assert other[step] == pytest.approx(one[step], rel=1e-4), step
    single, double = (final_weights(str(tmp_path / name)) for name in ("one", "two"))
    for name, value in single["model"].items():
        scale = value.float().abs().max().clamp(min=1e-3)
        assert (value - double["model"][name]).float().abs().max() / scale < 0.05, name


def wait_for_step(output, step, process):
    for _ in range(4800):
        if len(losses(output)) >= step or process.poll() is not None:
            return
        time.sleep(0.05)


@pytest.mark.slow
def test_sigterm_saves_and_says_run_me_again(shards, tiny, tmp_path):
    config = tiny(train__epochs=30)
    process = launch(config, shards, str(tmp_path))
    wait_for_step(str(tmp_path), 3, process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 143, output
    assert "Traceback" not in output
    assert final_weights(str(tmp_path))["step"] >= 3


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_with_a_message_and_loses_nothing_saved(shards, tiny, tmp_path):
    config = tiny(train__epochs=30, train__checkpoint_steps=2)
    process = launch(config, shards, str(tmp_path))
    wait_for_step(str(tmp_path), 4, process)
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 137, output
    assert "was killed (SIGKILL)" in output and "batch_size" in output
    assert final_weights(str(tmp_path))["step"] >= 2


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


@pytest.mark.slow
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
