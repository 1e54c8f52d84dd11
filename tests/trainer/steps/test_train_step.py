"""The step `train`: what is decided and refused before a training is launched, and its result."""

import json
import os
import subprocess
import sys

import pytest
from bundles import make_bundle

from trainer import storage
from trainer.base.errors import ConfigError, DamagedError, DataError, EvaluationError, LaunchError
from trainer.config import parsing
from trainer.export import published_models
from trainer.steps import records, train

RESULT = {"metrics": {"coco/AP": 0.5}, "steps": 3}


def run(shards, tmp_path, processes=(2, 2), **options):
    """Run the step with a training that only writes its result."""
    output = str(tmp_path / "run")
    launch = lambda: storage.write_json(train.result_uri(output), RESULT)  # noqa: E731
    return train.train(shards, output, launch, processes=processes, **options)


def test_it_writes_one_configuration_and_a_record(shards_manifest, tmp_path):
    shards = shards_manifest(overrides={"train.epochs": 3.0})
    model = run(shards, tmp_path, run_id="id-1", image="registry/kubedet:1")
    config = parsing.read(model.config)
    assert config.train.epochs == 3
    assert config.export.name == "my-cards"  # The name of the data, because none is configured.
    assert model.metrics == RESULT["metrics"]
    (record,) = records.RunRecord.read_all(shards.data_root)
    assert (record.run, record.run_id, record.code["image"]) == ("run", "id-1", "registry/kubedet:1")


def test_a_run_from_random_weights_is_configured_without_torch(shards_manifest, tmp_path):
    """Importing it takes seconds."""
    code = """
import sys
sys.modules |= dict.fromkeys(["torch", "torchvision"])
from trainer.steps import manifests, starting_weights, train
starting_weights.fetch_and_check("small", {}, sys.argv[1])
shards = manifests.read(sys.argv[1], manifests.Shards)
train.check_and_complete(train.configure(shards, "/nonexistent"), shards, "", (1, 1))
"""
    (tmp_path / "shards.json").write_text(shards_manifest("small").model_dump_json())
    away = os.environ | {"KUBEDET_TORCHVISION_URL": "http://127.0.0.1:1"}
    command = [sys.executable, "-c", code, tmp_path / "shards.json"]
    done = subprocess.run(command, env=away, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_configuration_that_was_changed_is_refused_and_written_again(shards_manifest, tmp_path):
    path = tmp_path / "run" / "config.json"
    for _ in range(2):
        run(shards_manifest(), tmp_path)
        path.write_text(path.read_text().replace('"seed": 0', '"seed": 8'))
        with pytest.raises(DamagedError) as caught:
            parsing.read(str(path))
        assert "file_sha256" in caught.value.fix
    by_hand = json.loads(path.read_text())
    del by_hand["file_sha256"]
    path.write_text(json.dumps(by_hand))
    assert parsing.read(str(path)).train.seed == 8


def test_mistakes_are_refused_before_the_training(shards_manifest, tmp_path):
    with pytest.raises(DataError, match="100 images, fewer than one step reads: 200 processes"):
        run(shards_manifest(), tmp_path, (200, 200))
    with pytest.raises(EvaluationError, match="fix: did you mean square"):
        run(shards_manifest(), tmp_path, rules="coco/AP >= 0.1, AP[sqare] >= 0.3")
    with pytest.raises(EvaluationError, match="circle"):
        run(shards_manifest(overrides={"evaluation.gate": ["AP[circle] >= 0.3"]}), tmp_path)
    assert not (tmp_path / "run").exists()
    run(shards_manifest(), tmp_path, rules="AP[square] >= 0.3")


def test_other_classes_than_those_of_the_current_model_are_refused(shards_manifest, tmp_path):
    root = shards_manifest().data_root
    published_models.publish(make_bundle(tmp_path / "b", name="my-cards"), root, "my-cards")
    with pytest.raises(ConfigError) as caught:
        run(shards_manifest(), tmp_path)
    assert "--set export.name=NAME" in caught.value.fix and not (tmp_path / "run").exists()
    for overrides in ({"export.name": "others"}, {"export.other_classes": True}):
        run(shards_manifest(overrides=overrides), tmp_path)


def test_an_elastic_job_keeps_its_global_batch(shards_manifest, tmp_path):
    model = run(shards_manifest(overrides={"train.batch_size": 4}), tmp_path, (2, 6))
    assert parsing.read(model.config).train.global_batch == 8


@pytest.mark.parametrize(
    ("recipe", "overrides", "minutes"),
    [
        ("debug", {}, 2.0),
        ("debug", {"train.epochs": 9}, 0),
        ("dfine_small", {}, 0),
        ("dfine_small", {"train.minutes": 60.0}, 60),
    ],
)
def test_a_training_in_pods_has_the_time_limit_of_debug_or_of_the_run(
    shards_manifest, tmp_path, recipe, overrides, minutes
):
    shards = shards_manifest(recipe, {"model.weights": "none", **overrides})
    model = run(shards, tmp_path, in_pods=True)
    assert parsing.read(model.config).train.minutes == pytest.approx(minutes)


def test_a_training_without_a_result_is_an_error(shards_manifest, tmp_path):
    with pytest.raises(LaunchError, match="ended without a result"):
        train.train(shards_manifest(), str(tmp_path / "run"), lambda: None, processes=(1, 1))


def test_each_run_has_a_folder(shards_manifest):
    shards = shards_manifest().model_copy(update={"data_root": "s3://bucket/root"})
    assert train.run_folder("", shards, "r1") == "s3://bucket/root/runs/r1"
    assert train.run_folder("s3://other/x", shards, "r1") == "s3://other/x"
    with pytest.raises(ConfigError, match="macro"):
        train.run_folder("s3://other/[[ScheduledTime]]", shards, "r1")
