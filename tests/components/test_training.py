"""What the train step asks a launcher to run, and what it finds afterwards."""

import json
import os
import subprocess
import sys

import pytest
from bundles import make_bundle
from small_index import index

from components.jobs import Request
from components.training import folder_of, prepare
from trainer import __main__
from trainer.base.errors import ConfigError, DamagedError, DataError, EvaluationError
from trainer.config import parsing
from trainer.export import published_models

RUN = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"


@pytest.fixture
def indexed(tmp_path):
    form = index(
        {"train": 100},
        categories=[{"id": 1, "name": "square"}],
        source="coco:/data/my cards/annotations/instances_train.json",
    )
    (tmp_path / "index.json").write_text(json.dumps(form))
    return str(tmp_path)


def test_prepare_writes_the_one_configuration(indexed, tmp_path):
    job = prepare(indexed, str(tmp_path), "debug", {"train.epochs": 3.0}, Request(own={"nproc": 2}))
    config = parsing.read(str(tmp_path / "config.json"))
    assert config.train.epochs == 3
    assert config.export.name == "my-cards"  # After the data, as nobody names it.
    assert job.nproc == 2 and str(tmp_path / "config.json") in job.command


def test_a_run_from_random_weights_is_prepared_without_torch(indexed, tmp_path):
    """Importing it takes seconds."""
    code = """
import sys
sys.modules |= dict.fromkeys(["torch", "torchvision"])
from components import jobs, starting_weights, training
starting_weights.secure("small", {}, sys.argv[1])
training.prepare(sys.argv[1], sys.argv[1], "small", {}, jobs.Request(own={"nproc": 1}))
"""
    away = os.environ | {"KUBEDET_TORCHVISION_URL": "http://127.0.0.1:1"}
    done = subprocess.run([sys.executable, "-c", code, indexed], env=away, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_configuration_that_was_changed_is_refused_and_written_anew(indexed, tmp_path):
    path = tmp_path / "config.json"
    for _ in range(2):
        prepare(indexed, str(tmp_path), "debug", {}, Request())
        text = path.read_text()
        assert parsing.read(str(path)).train.epochs != 9
        path.write_text(text.replace('"seed": 0', '"seed": 8'))
        with pytest.raises(DamagedError, match=r"config\.json is damaged: its sha256 is") as caught:
            parsing.read(str(path))
        assert "file_sha256" in caught.value.fix
    by_hand = json.loads(path.read_text())
    del by_hand["file_sha256"]
    path.write_text(json.dumps(by_hand))
    assert parsing.read(str(path)).train.seed == 8


def test_prepare_refuses_what_cannot_run(indexed, tmp_path):
    with pytest.raises(ConfigError, match="nproc"):
        prepare(indexed, str(tmp_path), "debug", {}, Request(own={"nproc": -1}))
    with pytest.raises(DataError, match="100 images, fewer than one step reads: 200 processes"):
        prepare(indexed, str(tmp_path), "debug", {}, Request(own={"nodes": 10, "nproc": 20}))
    with pytest.raises(ConfigError, match="no launcher 'slurm'"):
        prepare(indexed, str(tmp_path), "debug", {}, Request("slurm"))
    assert not (tmp_path / "config.json").exists()


def test_a_rule_on_a_class_that_there_is_not_is_refused_before_the_training(indexed, tmp_path):
    with pytest.raises(EvaluationError, match="fix: did you mean square"):
        prepare(indexed, str(tmp_path), "debug", {}, Request(), rules="coco/AP >= 0.1, AP[sqare] >= 0.3")
    with pytest.raises(EvaluationError, match="circle"):
        prepare(indexed, str(tmp_path), "debug", {"evaluation.gate": ["AP[circle] >= 0.3"]}, Request())
    assert not (tmp_path / "config.json").exists()
    prepare(indexed, str(tmp_path), "debug", {}, Request(), rules="AP[square] >= 0.3")


def test_other_classes_than_the_model_of_this_name_has_are_refused_before_the_training(tmp_path):
    shards = tmp_path / "shards" / "f00d"
    shards.mkdir(parents=True)
    classes = [{"id": 0, "name": "cat"}, {"id": 1, "name": "horse"}]
    form = index({"train": 100}, source="yolo:s3://bucket/pets.zip", categories=classes)
    (shards / "index.json").write_text(json.dumps(form))
    published_models.publish(make_bundle(tmp_path / "b"), str(tmp_path), "pets")
    with pytest.raises(
        ConfigError, match=r"pets v1.*dog <b> only in that version; horse only in this"
    ) as caught:
        prepare(str(shards), str(tmp_path / "run"), "debug", {}, Request())
    assert "--set export.name=NAME" in caught.value.fix
    assert not (tmp_path / "run").exists()
    for overrides in ({"export.name": "others"}, {"export.other_classes": True}):
        prepare(str(shards), str(tmp_path / "run"), "debug", overrides, Request())


def test_a_folder_that_the_pods_would_not_find_is_refused(indexed, tmp_path):
    request = Request("kubernetes", {"image": "registry/kubedet:1"}, claim="sets", run_id=RUN)
    with pytest.raises(ConfigError) as caught:
        prepare(indexed, str(tmp_path / "runs"), "debug", {}, request)
    assert f"data_root: {indexed}" in str(caught.value) and f"output: {tmp_path / 'runs'}" in str(
        caught.value
    )
    assert not (tmp_path / "config.json").exists()
    # The job may mount a volume of its own there.
    mounts = [{"claim": "scratch", "path": str(tmp_path)}]
    own = Request("kubernetes", {"image": "registry/kubedet:1"}, {"mounts": mounts}, run_id=RUN)
    assert prepare(indexed, str(tmp_path / "runs"), "debug", {}, own).mounts[0].claim == "scratch"


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, ["--heartbeat-timeout", "240"]),
        ({"launcher_timeout": 60}, ["--heartbeat-timeout", "60"]),
        ({"restart_policy": "OnFailure"}, ["--heartbeat-timeout", "240", "--heartbeat-exit", "0"]),
        ({"launcher_timeout": 0}, None),
    ],
    ids=str,
)
def test_a_job_in_pods_ends_without_its_launcher(indexed, tmp_path, fields, options):
    mounts = [{"claim": "scratch", "path": str(tmp_path)}]
    request = Request("kubernetes", {"image": "i:1"}, {"mounts": mounts, **fields}, run_id=RUN)
    command = list(prepare(indexed, str(tmp_path / "runs"), "debug", {}, request).command)
    launch, _, train = " ".join(command).partition(" -- ")
    assert train.startswith("train --config ")
    heartbeat = ["--heartbeat", str(tmp_path / "runs" / "launcher.json")]
    assert launch.split()[4:] == ([] if options is None else heartbeat + options)
    main = __main__._parser().parse_args(command[3:])
    assert main.arguments[0] == "train"


@pytest.mark.parametrize(
    ("recipe", "overrides", "minutes"),
    [("debug", {}, 2), ("debug", {"train.epochs": 9}, 0), ("dfine_small", {}, 0),
     ("dfine_small", {"train.minutes": 60.0}, 60)],
)  # fmt: skip
def test_a_job_in_pods_has_the_time_limit_of_debug_or_of_the_run(
    indexed, tmp_path, recipe, overrides, minutes
):
    mounts = [{"claim": "scratch", "path": str(tmp_path)}]
    request = Request("kubernetes", {"image": "i:1"}, {"mounts": mounts}, run_id=RUN)
    prepare(indexed, str(tmp_path / "run"), recipe, {"model.weights": "none", **overrides}, request)
    assert parsing.read(str(tmp_path / "run" / "config.json")).train.minutes == pytest.approx(minutes)


def test_a_run_has_a_folder_of_its_own(tmp_path):
    assert folder_of("", "s3://bucket/root", {}, "r1") == "s3://bucket/root/runs/r1"
    versioned = {"data_version": "20261121020000"}
    assert folder_of("", "s3://bucket/root", versioned, "r1") == "s3://bucket/root/runs/20261121020000-r1"
    assert folder_of("s3://other/x", "s3://bucket/root", versioned, "r1") == "s3://other/x"
    with pytest.raises(ConfigError, match="macro"):
        folder_of("s3://other/[[ScheduledTime]]", "s3://bucket/root", versioned, "r1")
