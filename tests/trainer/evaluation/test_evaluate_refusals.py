"""What cannot be scored is refused, before the work that would end with it."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest

from trainer import storage
from trainer.base.errors import EvaluationError, StorageError
from trainer.evaluation import engines
from trainer.evaluation.evaluate import evaluate


def test_other_classes_are_refused_by_name(saved, shards, config, tmp_path):
    categories = [{"id": i, "name": n, "original_id": i} for i, n in enumerate("abcde")]
    with pytest.raises(EvaluationError, match=r"10 differ: c.* in the data; a, b, c, d, e only in the model"):
        evaluate(saved(categories=categories), shards, str(tmp_path / "e"), config)
    assert not (tmp_path / "e").exists()


def test_a_rule_that_cannot_be_read_is_refused_before_any_work(shards, config, tmp_path):
    with pytest.raises(EvaluationError, match="cannot be read"):
        evaluate(str(tmp_path / "none.pt"), shards, str(tmp_path / "e"), config, rules=["coco/AP = 1"])


@pytest.fixture
def no_prediction(monkeypatch):
    """Fails where anything is predicted."""
    monkeypatch.setattr(
        "trainer.evaluation.evaluate.predict_split", lambda *_, **__: pytest.fail("predicted")
    )


@pytest.mark.usefixtures("no_prediction")
def test_what_the_work_would_end_with_is_told_before_it(saved, shards, config, tmp_path):
    with pytest.raises(EvaluationError, match=r"'AP\[owl\] >= 0.1' names an unknown class"):
        evaluate(saved(), shards, str(tmp_path / "e"), config, rules=["coco/AP > 0", "AP[owl] >= 0.1"])
    for named, message in (("none.pt", "none.pt"), ("", "neither an evaluation nor a model")):
        compare = dataclasses.replace(config.evaluation, baseline=str(tmp_path / named))
        with pytest.raises((EvaluationError, StorageError), match=message):
            evaluate(saved(), shards, str(tmp_path / "e"), dataclasses.replace(config, evaluation=compare))


@pytest.mark.usefixtures("no_prediction")
@pytest.mark.parametrize("engine", engines.ENGINES)
def test_an_evaluator_that_is_not_installed_is_told_before_the_work(
    saved, shards, config, tmp_path, monkeypatch, engine
):
    monkeypatch.setitem(sys.modules, engine, None)
    changed = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, engine=engine))
    with pytest.raises(EvaluationError, match=f"the evaluator {engine} cannot be loaded") as error:
        evaluate(saved(), shards, str(tmp_path / "e"), changed)
    other = next(name for name in engines.ENGINES if name != engine)
    assert error.value.fix == f"install it, or set evaluation.engine={other}"


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
def test_an_empty_split_is_refused_with_what_there_is(saved, shards, config, tmp_path, split, message):
    copy = tmp_path / "shards"
    shutil.copytree(shards, copy)
    index = storage.read_json(str(copy / "index.json"))
    del index["splits"]["test"]
    index["splits"]["val"]["samples"] = 0
    (copy / "index.json").write_text(json.dumps(index))
    chosen = dataclasses.replace(config.evaluation, split=split)
    with pytest.raises(EvaluationError, match=message) as error:
        evaluate(saved(), str(copy), str(tmp_path / "e"), dataclasses.replace(config, evaluation=chosen))
    assert "train (24 images), val (0 images)" in error.value.fix


def test_what_is_no_model_is_refused(shards, config, tmp_path):
    (tmp_path / "notes.txt").write_text("none")
    for uri in (tmp_path, tmp_path / "notes.txt", tmp_path / "gone"):
        with pytest.raises(EvaluationError, match="neither a checkpoint nor an exported model") as error:
            evaluate(str(uri), shards, str(tmp_path / "e"), config)
        assert error.value.fix.startswith("give a best.pt")


def test_the_folder_of_a_run_is_refused_with_its_checkpoint(saved, shards, config, tmp_path):
    uri = saved()
    for folder in (Path(uri).parent, Path(uri).parents[1]):
        with pytest.raises(EvaluationError, match="neither a checkpoint nor an exported model") as error:
            evaluate(str(folder), shards, str(tmp_path / "e"), config)
        assert error.value.fix == f"give {uri}"


def test_a_folder_without_shards_is_refused(saved, shards, config, tmp_path):
    for folder in (Path(shards).parent, tmp_path / "gone"):
        with pytest.raises(EvaluationError, match=f"{folder} holds no shards") as error:
            evaluate(saved(), str(folder), str(tmp_path / "e"), config)
        assert "<data root>/shards/<fingerprint>" in error.value.fix
