"""A training over two pods: it learns, survives the loss of a pod, and resumes where it was."""

import json
import signal

import pytest

from components.launchers.spec import training_command
from tests.cluster.user import User, until

CONFIG = {
    "loader.image_size": 96, "loader.workers": 1, "model.backbone_width": 8, "model.fpn_channels": 16,
    "model.head_depth": 1, "model.anchor_sizes": [8.0, 16.0, 32.0, 48.0, 64.0], "train.epochs": 12,
    "train.batch_size": 4, "train.log_every": 5, "train.validate_every": 1, "train.checkpoint_minutes": 0.0,
    "data.processes": 1,
}  # fmt: skip

PREPARE = """
import json, sys
from trainer import storage
from trainer.model import recipes
from trainer.config.parsing import to_json
from trainer.data.download import download
from trainer.data.shards import shard

root, values = sys.argv[1], json.loads(sys.argv[2])
config = recipes.load("debug", values)
storage.write_bytes(root + "/config.json", to_json(config).encode())
made = shard(download("sample:images=48,seed=3,size=96", root, config.data), root, config.data)
print("prepared " + made.uri)
"""


@pytest.fixture(scope="module")
def prepared(cluster, common, work, tmp_path_factory):
    """Make shards where the pods find them, in a pod; returns URIs of the configuration and the shards."""
    user = User(cluster, common, tmp_path_factory.mktemp("prepare"))
    path, _ = user.python(PREPARE, work, json.dumps(CONFIG))
    command, code = user.runs("job", "submit", "--spec", str(path), "--wait")
    user.leave()
    assert code == 0, str(command)
    shards = next(line for line in command.lines if "prepared " in line).rpartition("prepared ")[2]
    return f"{work}/config.json", shards


def train(user, prepared, output, **fields):
    config, shards = prepared
    arguments = ["train", "--config", config, "--shards", shards, "--output", output]
    return user.spec(list(training_command(arguments)), nodes=2, **fields)


def test_two_pods_train_to_the_end(user, prepared, work):
    path, _ = train(user, prepared, f"{work}/plain")
    command, code = user.runs("job", "submit", "--spec", str(path), "--wait", seconds=600)
    assert code == 0, str(command)
    assert command.heard("epoch 12:"), str(command)


def test_an_output_that_cannot_be_written_is_told_before_the_pods_meet(user, prepared):
    path, _ = train(user, prepared, "/nobody/may/write/here")
    command, code = user.runs("job", "submit", "--spec", str(path), "--wait")
    assert code == 2, str(command)
    assert "the results cannot be written to /nobody/may/write/here" in command.errors, str(command)
    assert "fs_group" in command.errors and "Traceback" not in str(command), str(command)


def test_a_worker_that_is_killed_comes_back_and_nothing_is_lost(user, cluster, prepared, work):
    path, name = train(user, prepared, f"{work}/killed")
    command = user.starts("job", "submit", "--spec", str(path), "--wait")
    command.wait_for("epoch 2:")
    cluster.delete_pod(cluster.pod(name, 1))
    assert command.end(600) == 0, str(command)
    assert any("resum" in line for line in command.lines), str(command)
    assert command.heard("epoch 12:"), str(command)


def test_a_run_that_was_stopped_goes_on(user, cluster, prepared, work):
    path, name = train(user, prepared, f"{work}/stopped")
    command = user.starts("job", "submit", "--spec", str(path), "--wait")
    command.wait_for("epoch 2:")
    command.signal(signal.SIGTERM)
    assert command.end() == 143, str(command)
    until(lambda: not cluster.pods(name), "the pods are gone")
    again, code = user.runs("job", "submit", "--spec", str(path), "--wait", seconds=600)
    assert code == 0, str(again)
    assert any("resum" in line for line in again.lines), str(again)
    assert not again.heard("epoch 1:"), str(again)


def test_an_elastic_job_goes_on_with_fewer_pods(user, cluster, prepared, work):
    elastic = {"min_nodes": 1, "max_nodes": 2, "max_restarts": 5}
    path, name = train(user, prepared, f"{work}/elastic", elastic=elastic)
    command = user.starts("job", "submit", "--spec", str(path), "--wait")
    command.wait_for("epoch 2:")
    cluster.delete_pod(cluster.pod(name, 1))
    assert command.end(600) == 0, str(command)
    assert command.heard("epoch 12:"), str(command)
