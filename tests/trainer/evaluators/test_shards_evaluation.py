"""Scoring a checkpoint on a split, and what is refused before any work."""

import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainer import storage
from trainer.base.errors import EvaluationError, FormatError, StorageError
from trainer.config.parsing import to_json
from trainer.data.shard_index import ShardDataset
from trainer.evaluation import coco
from trainer.evaluation.inference import predict_share
from trainer.evaluation.truth_and_predictions import Predictions
from trainer.evaluators import shards as shards_evaluation
from trainer.evaluators.baseline import Baseline, find_baseline
from trainer.model import recipes
from trainer.report import evaluation_page
from trainer.trackers.training_log import format_row
from trainer.training import checkpoint


def evaluate(model, shards, output, config, **options):
    """Score a model on shards that are in a data root."""
    data_root = str(Path(shards).parents[1])
    return shards_evaluation.evaluate(model, shards, output, config, data_root=data_root, **options)


def changed(config, **evaluation):
    return dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, **evaluation))


def test_everything_is_written_and_agrees(saved, shards, config, tmp_path):
    output = str(tmp_path / "evaluation")
    summary = evaluate(saved(), shards, output, config)
    assert summary["split"] == "test" and summary["images"] == 4 and summary["step"] == 7
    written = {path.name for path in (tmp_path / "evaluation").iterdir()}
    assert written == {
        *("metrics.json", "predictions.parquet", "gate.json", "table.txt", "report.html", "report.md"),
    }
    assert storage.read_json(str(tmp_path / "evaluation" / "metrics.json")) == summary
    # Each is a line of the Kubeflow UI, and metadata of an artifact must stay small.
    assert len(summary["metrics"]) <= 15 and all(isinstance(v, float) for v in summary["metrics"].values())
    predictions, made_of = Predictions.read(str(tmp_path / "evaluation" / "predictions.parquet"))
    assert made_of["fingerprint"] == summary["fingerprint"]
    truth = ShardDataset(shards, "test").annotations()
    assert coco.evaluate(truth, predictions).metrics.items() <= summary["metrics"].items()
    assert made_of["sha256"] == checkpoint.read_digest(saved()) == summary["sha256"]
    assert set(predictions.image_ids.tolist()) == {image["id"] for image in truth["images"]}


@pytest.mark.slow
def test_predictions_of_the_same_model_and_images_are_reused(saved, shards, config, tmp_path, monkeypatch):
    uri, output, calls = saved(), str(tmp_path / "e"), []
    real = predict_share
    monkeypatch.setattr(
        "trainer.evaluators.predictions.predict_share", lambda *a, **b: calls.append(1) or real(*a, **b)
    )
    first = evaluate(uri, shards, output, config)
    again = evaluate(uri, shards, output, config, rules=["coco/AP >= 0.99"])
    assert len(calls) == 1 and again["metrics"] == first["metrics"]
    assert not again["verdict"]["passed"]
    of_val = changed(config, split="val")
    evaluate(uri, shards, output, of_val)
    saved(step=8)
    evaluate(uri, shards, output, of_val)
    (tmp_path / "e" / "predictions.parquet").write_bytes(b"PAR1 but damaged PAR1")
    evaluate(uri, shards, output, of_val)
    assert len(calls) == 4


def test_the_report_shows_the_model_and_its_data(saved, shards, config, tmp_path, monkeypatch):
    reports, write = [], evaluation_page.write_report

    def noting(data, folder):
        reports.append(data)
        write(data, folder)

    monkeypatch.setattr("trainer.report.evaluation_page.write_report", noting)
    uri, rows = saved(), [{"kind": "train", "step": 3, "loss": 0.5, "lr": 0.1}]
    (Path(uri).parent / "metrics.jsonl").write_text(format_row(rows[0]))
    summary = evaluate(uri, shards, str(tmp_path / "e"), config, rules=["coco/AP >= 0.99"])
    (data,) = reports
    assert data.training == rows and data.config["model"]["backbone"]
    assert (data.scores.metrics, data.images, data.verdict.passed) == (summary["metrics"], 4, False)
    assert data.versions["model"] == f"{uri} (step 7)" and data.versions["sha256"] == summary["sha256"]


def test_the_summary_is_removed_first_and_written_last(saved, shards, config, tmp_path, monkeypatch):
    evaluate(saved(), shards, str(tmp_path / "e"), config)

    def full(*_):
        raise StorageError("the disk is full")

    monkeypatch.setattr("trainer.report.evaluation_page.write_report", full)
    with pytest.raises(StorageError, match="the disk is full"):
        evaluate(saved(), shards, str(tmp_path / "e"), config)
    assert (tmp_path / "e" / "predictions.parquet").exists()
    assert not (tmp_path / "e" / "metrics.json").exists()


@pytest.mark.slow
def test_a_baseline_scored_on_other_data_is_scored_again(saved, shards, config, tmp_path):
    first = evaluate(saved(), shards, str(tmp_path / "f"), changed(config, split="val"))
    assert first["split"] == "val"
    compare = changed(config, baseline=str(tmp_path / "f"), bootstrap=20)
    second = evaluate(saved(), shards, str(tmp_path / "s"), compare, rules=["coco/AP >= baseline - 0.01"])
    assert not second["verdict"]["passed"] and "too few to tell" in second["verdict"]["reason"]
    change = second["comparison"]["changes"]["coco/AP"]
    assert change[0] == change[1] == pytest.approx(second["metrics"]["coco/AP"], abs=1e-12)
    # So is one whose predictions are another model's.
    empty = Predictions.from_coco([])
    empty.write(str(tmp_path / "s" / "predictions.parquet"), {})
    compare = changed(config, baseline=str(tmp_path / "s"), bootstrap=20)
    third = evaluate(saved(), shards, str(tmp_path / "t"), compare)
    assert third["comparison"]["changes"]["coco/AP"][0] == change[0]


def test_a_baseline_of_other_classes_is_an_obstacle_and_fails_rules_about_it(saved, shards, config, tmp_path):
    categories = [{"id": i, "name": n, "original_id": i} for i, n in enumerate("abcde")]
    other = tmp_path / "other.pt"
    shutil.copy(saved(categories=categories), other)
    compare = changed(config, baseline=str(other))
    summary = evaluate(saved(), shards, str(tmp_path / "e"), compare, rules=["coco/AP >= baseline"])
    assert not summary["verdict"]["passed"] and "10 differ" in summary["verdict"]["reason"]
    assert "cannot be compared" in (tmp_path / "e" / "report.html").read_text()


@pytest.mark.slow
def test_two_processes_find_what_one_finds_each_image_once(saved, shards, config, tmp_path):
    alone = evaluate(saved(), shards, str(tmp_path / "one"), config)
    (tmp_path / "config.json").write_text(to_json(config))
    command = [sys.executable, "-m", "trainer", "launch", "--nproc", "2", "--", "evaluate"]
    command += ["--checkpoint", saved(), "--shards", shards, "--output", str(tmp_path / "two")]
    subprocess.run([*command, "--config", str(tmp_path / "config.json")], check=True, capture_output=True)
    shared = storage.read_json(str(tmp_path / "two" / "metrics.json"))
    assert shared["metrics"] == pytest.approx(alone["metrics"], abs=1e-9)
    one, two = (Predictions.read(str(tmp_path / n / "predictions.parquet"))[0] for n in ("one", "two"))
    assert one.image_ids.tolist() == two.image_ids.tolist()
    assert one.scores == pytest.approx(two.scores, abs=1e-5)


@pytest.mark.slow
def test_every_form_of_an_exported_model_is_scored_like_its_checkpoint(
    exported, trained, shards, config, tmp_path
):
    bundle = exported
    expected = evaluate(trained, shards, str(tmp_path / "a"), config)
    for name in ("", "model.safetensors", "model.raw.onnx"):
        scored = evaluate(str(bundle / name).rstrip("/"), shards, str(tmp_path / "b"), config)
        file = name or "model.onnx"
        assert scored["checkpoint"] == str(bundle / file)
        assert scored["sha256"] == hashlib.sha256((bundle / file).read_bytes()).hexdigest()
        assert scored["metrics"] == pytest.approx(expected["metrics"], abs=1e-3), name
        assert (scored["images"], scored["step"]) == (expected["images"], expected["step"])


def test_other_classes_are_refused_by_name(saved, shards, config, tmp_path):
    categories = [{"id": i, "name": n, "original_id": i} for i, n in enumerate("abcde")]
    with pytest.raises(EvaluationError, match=r"10 differ: c.* in the data; a, b, c, d, e only in the model"):
        evaluate(saved(categories=categories), shards, str(tmp_path / "e"), config)
    assert not (tmp_path / "e").exists()


@pytest.fixture
def no_prediction(monkeypatch):
    """Fails if anything is predicted."""
    monkeypatch.setattr(
        "trainer.evaluators.predictions.predict_share", lambda *_, **__: pytest.fail("predicted")
    )


@pytest.mark.usefixtures("no_prediction")
def test_unusable_rules_and_baselines_are_refused_before_any_prediction(saved, shards, config, tmp_path):
    with pytest.raises(EvaluationError, match=r"'AP\[owl\] >= 0.1' names an unknown class"):
        evaluate(saved(), shards, str(tmp_path / "e"), config, rules=["coco/AP > 0", "AP[owl] >= 0.1"])
    for named, message in (("none.pt", "none.pt"), ("", "neither an evaluation nor a model")):
        compare = changed(config, baseline=str(tmp_path / named))
        with pytest.raises((EvaluationError, StorageError), match=message):
            evaluate(saved(), shards, str(tmp_path / "e"), compare)
    rules = ["coco/AP >= baseline - 0.01"]
    with pytest.raises(EvaluationError, match="coco/AP >= baseline"):
        evaluate(saved(), shards, str(tmp_path / "e"), changed(config, baseline="none"), rules=rules)


@pytest.mark.usefixtures("no_prediction")
def test_a_missing_evaluator_is_refused_before_any_prediction(saved, shards, config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "hotcoco", None)
    with pytest.raises(EvaluationError, match="the evaluator hotcoco cannot be loaded") as error:
        evaluate(saved(), shards, str(tmp_path / "e"), config)
    assert error.value.fix == "install it, or set evaluation.engine=pycocotools"


@pytest.mark.usefixtures("no_prediction")
def test_a_folder_that_cannot_be_written_is_refused_before_any_prediction(saved, shards, config, tmp_path):
    """A file where the folder should be: it refuses root as well."""
    (tmp_path / "e").write_text("a file, not a folder")
    with pytest.raises(StorageError, match="cannot write") as error:
        evaluate(saved(), shards, str(tmp_path / "e"), config)
    assert str(tmp_path / "e") in error.value.message and error.value.fix


@pytest.mark.parametrize(
    ("split", "message"), [("val", "no images of the split val"), ("", "neither a test")]
)
def test_an_empty_split_is_refused_with_the_other_splits(saved, shards, config, tmp_path, split, message):
    copy = tmp_path / "shards"
    shutil.copytree(shards, copy)
    index = storage.read_json(str(copy / "index.json"))
    del index["splits"]["test"]
    index["splits"]["val"]["samples"] = 0
    (copy / "index.json").write_text(json.dumps(index))
    with pytest.raises(EvaluationError, match=message) as error:
        evaluate(saved(), str(copy), str(tmp_path / "e"), changed(config, split=split))
    assert "train (24 images), val (0 images)" in error.value.fix


def test_what_is_no_model_is_refused(shards, config, tmp_path):
    (tmp_path / "notes.txt").write_text("none")
    for uri in (tmp_path, tmp_path / "notes.txt", tmp_path / "gone"):
        with pytest.raises(EvaluationError, match="neither a checkpoint nor an exported model") as error:
            evaluate(str(uri), shards, str(tmp_path / "e"), config)
        assert "best.pt" in error.value.fix


def test_a_folder_without_shards_is_refused(saved, shards, config, tmp_path):
    for folder in (Path(shards).parent, tmp_path / "gone"):
        with pytest.raises(EvaluationError, match=f"{folder} is not a folder of shards") as error:
            evaluate(saved(), str(folder), str(tmp_path / "e"), config)
        assert "<data root>/shards/<fingerprint>" in error.value.fix


@pytest.fixture
def root(tmp_path):
    """A data root with an evaluation and a pointer to it."""
    folder = tmp_path / "runs" / "first" / "evaluation"
    folder.mkdir(parents=True)
    uri = str(folder / "predictions.parquet")
    (folder / "predictions.parquet").touch()
    summary = {"fingerprint": "f", "split": "test", "predictions": uri, "checkpoint": "first/best.pt"}
    summary["predictions_sha256"] = ""
    (folder / "metrics.json").write_text(json.dumps(summary))
    write_pointer(tmp_path, evaluation=str(folder))
    return tmp_path


def write_pointer(root, **changes):
    """What trainer/export/published_models.py writes."""
    place = root / "models" / "detector" / "current"
    place.parent.mkdir(parents=True, exist_ok=True)
    checkpoint = root / "runs" / "first" / "best.pt"
    record = {
        "kind": "current model",
        "form": 1,
        "name": "detector",
        "version": "3",
        "model": "",
        "metrics": {},
        "digest": "",
        "classes": [],
        "checkpoint": str(checkpoint),
        "evaluation": "",
        "fingerprint": "f",
    }
    place.write_text(json.dumps(record | changes))


def baseline_of(root, **overrides):
    overrides = {f"evaluation.{key}": value for key, value in overrides.items()} | {"export.name": "detector"}
    return find_baseline(recipes.load("debug", overrides), str(root / "shards" / "abc"), str(root))


def test_the_last_that_passed_none_or_a_named_model(root, tmp_path):
    published = baseline_of(root)
    assert published.name == "detector 3"
    assert published.summary.predictions == str(root / "runs/first/evaluation/predictions.parquet")
    assert baseline_of(root, baseline="none") is None and baseline_of(tmp_path / "elsewhere") is None
    named = "s3://bucket/best.pt"
    assert baseline_of(root, baseline=named) == Baseline(named, named)


def test_an_evaluation_that_is_gone_leaves_the_model(root):
    write_pointer(root, evaluation=str(root / "deleted"))
    published = baseline_of(root)
    assert published.model == str(root / "models" / "detector" / "3" / "model.safetensors")
    assert published.summary is None
    (root / "runs" / "first" / "best.pt").touch()
    assert baseline_of(root).model == str(root / "runs" / "first" / "best.pt")


@pytest.mark.parametrize("named", ["runs/moved", "runs/moved/evaluation"])
def test_a_copied_run_or_evaluation_by_uri_has_its_predictions_with_it(root, named):
    (root / "runs" / "first").rename(root / "runs" / "moved")
    found = baseline_of(root, baseline=str(root / named))
    assert found.summary.predictions == str(root / "runs/moved/evaluation/predictions.parquet")


def test_other_folders_are_refused_as_baselines(root):
    with pytest.raises(EvaluationError, match="neither an evaluation nor a model"):
        baseline_of(root, baseline=str(root / "runs"))
    for text in ("{}", "[]", '{"fingerprint": 1, "split": "", "predictions": null, "checkpoint": []}'):
        (root / "runs" / "first" / "evaluation" / "metrics.json").write_text(text)
        with pytest.raises(FormatError, match=r"metrics\.json"):
            baseline_of(root, baseline=str(root / "runs" / "first"))
