"""Predictions that a training makes for its evaluation: used if they fit, and never needed."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from trainer import storage
from trainer.evaluation.truth_and_predictions import Predictions
from trainer.evaluators import predictions
from trainer.evaluators.predictions import predict_after_training
from trainer.evaluators.shards import evaluate


@pytest.fixture
def shares(monkeypatch):
    """Counts how often a model predicts, or raises an error that is appended."""
    calls, predict = [], predictions.predict_share

    def counted(*arguments, **options):
        calls.append(1)
        if counted.error:
            raise counted.error
        return predict(*arguments, **options)

    counted.error, counted.calls = None, calls
    monkeypatch.setattr(predictions, "predict_share", counted)
    return counted


def test_predictions_of_the_training_are_scored_with_the_same_result(saved, shards, config, tmp_path, shares):
    uri = saved()
    alone = evaluate(uri, shards, str(tmp_path / "alone"), config)
    predict_after_training(uri, shards, config, "")
    assert len(shares.calls) == 2
    summary = evaluate(uri, shards, str(tmp_path / "after"), config)
    assert len(shares.calls) == 2, "it predicted again"
    assert (summary["metrics"], summary["per_class"]) == (alone["metrics"], alone["per_class"])
    assert summary["predictions_sha256"] == alone["predictions_sha256"]
    predict_after_training(uri, shards, config, "")  # The training was repeated.
    assert len(shares.calls) == 2
    saved(step=8)  # Other weights.
    evaluate(uri, shards, str(tmp_path / "other"), config)
    assert len(shares.calls) == 3


def test_the_baseline_is_predicted_too(saved, shards, config, tmp_path, shares):
    uri, baseline = saved(), str(tmp_path / "before.pt")
    shutil.copy(uri, baseline)
    saved(step=9)
    compared = replace(config, evaluation=replace(config.evaluation, baseline=baseline))
    predict_after_training(uri, shards, compared, "")
    assert len(shares.calls) == 2
    summary = evaluate(uri, shards, str(tmp_path / "e"), compared)
    assert len(shares.calls) == 2 and summary["comparison"]["baseline"] == baseline


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), MemoryError(), OSError("disk full")])
def test_a_failure_loses_nothing(saved, shards, config, tmp_path, shares, caplog, error):
    uri, shares.error = saved(), error
    predict_after_training(uri, shards, config, "")
    assert "`evaluate` will predict the split" in caplog.text
    assert not (Path(uri).parent / predictions.PREDICTIONS).exists()
    shares.error = None
    assert evaluate(uri, shards, str(tmp_path / "e"), config)["images"] == 4


def test_processes_that_are_killed_each_time_do_not_try_for_ever(saved, shards, config, shares, monkeypatch):
    uri = saved()
    shares.error = KeyboardInterrupt()
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            predict_after_training(uri, shards, config, "")
    predict_after_training(uri, shards, config, "")
    assert len(shares.calls) == 3


@pytest.mark.slow
def test_two_processes_predict_after_the_training(node, training, shards, tmp_path):
    """Once with success, and once with images that cannot be read: the training is finished all the same."""
    copy = tmp_path / "shards"
    shutil.copytree(shards, copy)
    arguments, output = training
    words = [str(copy) if word == shards else word for word in arguments(train__epochs=1)]
    kept = copy / "test-00000.tar"
    kept.rename(tmp_path / "moved.tar")
    started = node([*words, "--predict"], "--nproc", "2")
    assert started.wait() == 0, started.output
    assert "`evaluate` will predict the split" in started.output and "Traceback" not in started.output
    result = storage.read_json(f"{output}/result.json")
    (tmp_path / "moved.tar").rename(kept)
    again = node([*words, "--predict"], "--nproc", "2")
    assert again.wait() == 0, again.output
    assert Predictions.read(f"{output}/{predictions.PREDICTIONS}")[1]["split"] == "test"
    assert storage.read_json(f"{output}/result.json")["best_step"] == result["best_step"]
