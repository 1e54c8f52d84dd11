"""Manifests are read as they were written, and strictly."""

import math

import pytest

from trainer.base.errors import DataError
from trainer.steps.manifests import Scores, Shards, TrainedModel, read, write


def test_a_manifest_is_read_as_it_was_written(shards_manifest, tmp_path):
    shards = shards_manifest(overrides={"data.classes": ["square"], "train.epochs": 3})
    write(tmp_path / "shards.json", shards)
    assert read(tmp_path / "shards.json", Shards) == shards


def test_a_metric_that_is_not_a_number_is_read_back(tmp_path):
    metrics = {"coco/AP": 0.3, "coco/APs": math.nan}
    model = TrainedModel(data_root="d", output="d/runs/a", shards="d/shards/b", metrics=metrics)
    write(tmp_path / "model.json", model)
    assert math.isnan(read(tmp_path / "model.json", TrainedModel).metrics["coco/APs"])


@pytest.mark.parametrize("change", ['"kind":"scores"', '"fingerprint":7', '"more":1,"fingerprint":"f00d"'])
def test_other_content_is_refused(shards_manifest, tmp_path, change):
    text = shards_manifest().model_dump_json()
    key = change.partition(":")[0]
    old = '"kind":"shards"' if key == '"kind"' else '"fingerprint":"f00d"'
    (tmp_path / "shards.json").write_text(text.replace(old, change))
    with pytest.raises(DataError) as caught:
        read(tmp_path / "shards.json", Shards)
    assert str(tmp_path / "shards.json") in caught.value.message and caught.value.fix
    with pytest.raises(DataError):
        read(tmp_path / "shards.json", TrainedModel)


def test_metrics_without_a_value_are_not_shown():
    scores = Scores(
        data_root="d",
        evaluation="e",
        model="pets",
        metrics={"coco/AP": 0.3, "coco/APs": -1.0},
        passed=True,
        reason="",
        rules=[],
    )
    assert scores.defined_metrics == {"coco/AP": 0.3}
