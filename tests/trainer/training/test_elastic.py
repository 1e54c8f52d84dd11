"""Elastic training: nodes go and come, and the run reads every image of an epoch once all the same."""

import itertools
import json
import signal
import stat
import sys
import time

import pytest

from trainer.config.parsing import to_json
from trainer.data.shard_index import ShardDataset
from trainer.training import checkpoint

TRACED = '''#!{python}
"""Runs the trainer as torchrun asks, and writes down which images every step of a rank has read."""
import json, os, sys, time
from trainer.training import loop
from trainer.__main__ import main
from trainer.training.step import TrainStep

begin, train_step, begun = loop._Run.__init__, TrainStep.__call__, []

def noted(run, *given):
    begin(run, *given)
    begun.append(run.resumed_from or 0)

def traced(self, batches, **asked):
    done = train_step(self, batches, **asked)
    ids = [image_id for batch in batches for image_id in batch.image_ids]
    world = self._state.world
    row = [self._state.step, begun[-1], world.size, world.rank, ids]
    with open("{trace}", "a") as file:
        file.write(json.dumps(row) + "\\n")
    time.sleep(0.05)
    return done

loop._Run.__init__, TrainStep.__call__ = noted, traced
if __name__ == "__main__":
    sys.exit(main(sys.argv[4:]))  # after -u -m trainer
'''
GLOBAL_BATCH = 5
"""Not a multiple of two: the shares of two processes differ."""


@pytest.fixture
def traced(tmp_path, monkeypatch):
    """Have torchrun's workers write down what they read; the file they write to."""
    trace, program = tmp_path / "trace.jsonl", tmp_path / "python"
    program.write_text(TRACED.format(python=sys.executable, trace=trace))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PYTHON_EXEC", str(program))
    return trace


def rows(trace):
    return [json.loads(line) for line in trace.read_text().splitlines()] if trace.exists() else []


def wait_until(trace, nodes, true, what):
    end = time.monotonic() + 240
    while not true(rows(trace)):
        assert time.monotonic() < end and any(each.process.poll() is None for each in nodes), (
            f"never {what}: " + "\n".join(each.output for each in nodes)
        )
        time.sleep(0.1)


def steps_on(size, count, after=0):
    """Whether `count` steps above `after` were made by that many processes."""
    return lambda rows_read: sum(row[2] == size and row[0] > after for row in rows_read) >= count * size


def read_order(rows_read, steps):
    """Image ids in the order in which the run that the checkpoints tell of has read them.

    Of a step that was made again after a loss, the last time counts.
    """
    order = []
    for step in range(1, steps + 1):
        times = [row for row in rows_read if row[0] == step]
        _, since, size, _, _ = times[-1]
        ranks = {rank: ids for _, begun, on, rank, ids in times if (begun, on) == (since, size)}
        assert sorted(ranks) == list(range(size)), f"step {step} is not whole"
        order.append([image_id for rank in sorted(ranks) for image_id in ranks[rank]])
    return order


@pytest.mark.slow
@pytest.mark.extra
def test_nodes_go_and_come_and_no_image_is_lost_or_repeated(shards, tiny, tmp_path, port, node, traced):
    config = tiny(
        train__epochs=500,
        train__global_batch=GLOBAL_BATCH,
        train__batch_size=2,
        train__checkpoint_steps=3,
        train__validate_every=100,
    )
    path, output = tmp_path / "config.json", tmp_path / "run"
    path.write_text(to_json(config))
    command = ["train", "--config", str(path), "--shards", shards, "--output", str(output)]
    elastic = {
        "nnodes": "1:2",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": f"127.0.0.1:{port}",
        "max_restarts": 5,
        "rdzv_conf": "is_host=0,last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=5",
    }

    first = {**elastic, "rdzv_conf": elastic["rdzv_conf"].replace("is_host=0", "is_host=1")}
    host, other = node(command, **first), node(command, **elastic)
    wait_until(traced, [host, other], steps_on(2, 4), "trained on two")
    other.kill()
    wait_until(traced, [host], steps_on(1, 4), "went on alone")
    alone = max(row[0] for row in rows(traced))
    back = node(command, **elastic)
    wait_until(traced, [host, back], steps_on(2, 4, after=alone), "went on with the node that came back")
    for each in (host, back):
        each.process.send_signal(signal.SIGTERM)
    assert [each.wait() for each in (host, back)] == [143, 143], host.output
    assert "Traceback" not in host.output + back.output
    assert f"{GLOBAL_BATCH} images per step on 1 processes" in host.output
    assert "rank 0 lost another process" in host.output and "(4 more restarts)" in host.output
    assert "elastic/agent" not in host.output, "torchrun's own log"

    saved = checkpoint.read_latest(str(output / "checkpoints"))
    assert saved["samples"] == saved["step"] * GLOBAL_BATCH
    order = read_order(rows(traced), saved["step"])
    assert {len(ids) for ids in order} == {GLOBAL_BATCH}
    everything = sorted(ShardDataset(shards, "train").image_ids.tolist())
    stream = list(itertools.chain(*order))
    epochs = [stream[first : first + len(everything)] for first in range(0, len(stream), len(everything))]
    assert len(epochs) > 1
    for epoch in epochs[:-1]:
        assert sorted(epoch) == everything
    assert len(set(epochs[-1])) == len(epochs[-1])


@pytest.mark.slow
def test_a_mistake_of_the_user_is_not_tried_again(shards, tiny, tmp_path, node):
    (tmp_path / "config.json").write_text(to_json(tiny(train__global_batch=100)))
    command = ["train", "--config", str(tmp_path / "config.json"), "--shards", shards]
    alone = node(
        [*command, "--output", str(tmp_path / "run")],
        nnodes="1:2",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=50,
        rdzv_conf="last_call_timeout=1",
    )
    assert alone.wait() == 2
    assert "fewer than one step reads: train.global_batch = 100" in alone.output
    assert list((tmp_path / "run").iterdir()) == []
