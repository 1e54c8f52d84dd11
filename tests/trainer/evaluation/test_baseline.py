"""The baseline of a comparison: the last model that passed, a named one, or none."""

import json

import pytest

from trainer.base.errors import EvaluationError
from trainer.evaluation.evaluate import Baseline, find_baseline
from trainer.model import recipes


@pytest.fixture
def root(tmp_path):
    """A data root with an evaluation and a pointer to it."""
    folder = tmp_path / "runs" / "first" / "evaluation"
    folder.mkdir(parents=True)
    uri = str(folder / "predictions.parquet")
    (folder / "predictions.parquet").touch()
    summary = {"fingerprint": "f", "split": "test", "predictions": uri, "checkpoint": "first/best.pt"}
    (folder / "metrics.json").write_text(json.dumps(summary))
    write_pointer(tmp_path, evaluation=str(folder))
    return tmp_path


def write_pointer(root, **changes):
    """What trainer/export/published_models.py writes."""
    place = root / "models" / "detector" / "current"
    place.parent.mkdir(parents=True, exist_ok=True)
    checkpoint = root / "runs" / "first" / "best.pt"
    record = {
        "kind": "current model", "form": 1, "name": "detector", "version": "3", "model": "",
        "metrics": {}, "digest": "", "classes": [],
        "checkpoint": str(checkpoint), "evaluation": "", "fingerprint": "f", "history": [],
    }  # fmt: skip
    place.write_text(json.dumps(record | changes))


def find(root, **overrides):
    overrides = {f"evaluation.{key}": value for key, value in overrides.items()} | {"export.name": "detector"}
    return find_baseline(recipes.load("debug", overrides), str(root / "shards" / "abc"))


def test_the_last_that_passed(root):
    published = find(root)
    assert published.name == "detector 3"
    assert published.summary.predictions == str(root / "runs/first/evaluation/predictions.parquet")


def test_none_before_the_first_and_where_none_is_wanted(root, tmp_path):
    assert find(root, baseline="none") is None
    assert find(tmp_path / "elsewhere") is None


def test_an_evaluation_that_is_gone_leaves_the_model(root):
    write_pointer(root, evaluation=str(root / "deleted"))
    published = find(root)
    assert published.model == str(root / "models" / "detector" / "3")
    assert published.summary is None
    (root / "runs" / "first" / "best.pt").touch()
    assert find(root).model == str(root / "runs" / "first" / "best.pt")


@pytest.mark.parametrize("named", ["runs/moved", "runs/moved/evaluation"])
def test_a_copied_run_or_evaluation_by_uri_has_its_predictions_with_it(root, named):
    (root / "runs" / "first").rename(root / "runs" / "moved")
    found = find(root, baseline=str(root / named))
    assert found.summary.predictions == str(root / "runs/moved/evaluation/predictions.parquet")


def test_a_model_by_uri(root):
    assert find(root, baseline="s3://bucket/best.pt") == Baseline(*["s3://bucket/best.pt"] * 2)


def test_other_folders_are_refused_as_baselines(root):
    with pytest.raises(EvaluationError, match="neither an evaluation nor a model"):
        find(root, baseline=str(root / "runs"))
    for text in ("{}", "[]", '{"fingerprint": 1, "split": "", "predictions": null, "checkpoint": []}'):
        (root / "runs" / "first" / "evaluation" / "metrics.json").write_text(text)
        with pytest.raises(EvaluationError, match="not of an evaluation"):
            find(root, baseline=str(root / "runs" / "first"))
