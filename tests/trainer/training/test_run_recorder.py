"""What is written beside the training: in order, from copies, and never more than was done."""

import dataclasses
import threading

import numpy as np
import pytest
import torch

from trainer.base.errors import StorageError
from trainer.config import parsing
from trainer.evaluation.truth_and_predictions import Predictions
from trainer.trackers.training_log import TrainingLog, read_rows
from trainer.training import checkpoint, run_recorder
from trainer.training.run_recorder import Recorder

TRUTH = {
    "images": [{"id": 1, "width": 50, "height": 50}],
    "annotations": [
        {"id": 1, "image_id": 1, "category_id": 0, "bbox": [5, 5, 20, 20], "area": 400, "iscrowd": 0}
    ],
    "categories": [{"id": 0, "name": "thing"}],
}


def found(shift):
    one = np.array([1])
    return Predictions(one, np.array([0]), np.array([[5.0 + shift, 5, 20, 20]]), np.array([0.9]))


def state_of(step, config, value):
    """As the loop gives it; the average of the weights is what is evaluated."""
    return {
        "config": parsing.to_json(config),
        "categories": [],
        "fingerprint": "f",
        "global_batch": 2,
        "step": step,
        "epoch": step // 6,
        "validated": 0,
        "model": {"weight": torch.full((2,), value)},
        "ema": {"weight": torch.full((2,), value + 0.5)},
    }


@pytest.fixture
def run(tiny, tmp_path):
    """A recorder and its folder."""
    log = TrainingLog(str(tmp_path), 0)
    each = Recorder(tiny(), str(tmp_path), log, None)
    yield each, tmp_path
    each.close()
    log.close()


def test_training_goes_on_and_the_state_of_then_is_written(run, tiny, monkeypatch):
    each, folder = run
    write, free = checkpoint.write_step, threading.Event()
    monkeypatch.setattr(checkpoint, "write_step", lambda *a: (free.wait(20), write(*a)))
    state = state_of(6, tiny(), 1.0)
    each.save(state)
    state["model"]["weight"].fill_(9.0)  # the next step
    state["step"] = 7
    assert checkpoint.read_latest(str(folder / "checkpoints")) is None
    free.set()
    each.wait()
    saved = checkpoint.read_step(str(folder / "checkpoints"), 6)
    assert saved["model"]["weight"].tolist() == [1.0, 1.0] and saved["step"] == 6 and saved["best"] == {}


def test_a_score_belongs_to_the_state_that_was_saved(run, tiny, monkeypatch):
    each, folder = run
    free, evaluate = threading.Event(), run_recorder.evaluate_coco
    monkeypatch.setattr(run_recorder, "evaluate_coco", lambda *a, **o: free.wait(20) and evaluate(*a, **o))
    state = state_of(6, tiny(), 1.0)
    each.save(state)
    each.score(lambda: TRUTH, found(0))
    state["ema"]["weight"].fill_(9.0)
    free.set()
    each.wait()
    best = checkpoint.read(str(folder / "best.pt"))
    assert best["model"]["weight"].tolist() == [1.5, 1.5] and best["step"] == 6 and best["epoch"] == 1
    assert best["metrics"]["coco/AP"] == pytest.approx(1.0) and each.best.step == 6
    # Who goes on from there need not validate again.
    saved = checkpoint.read_latest(str(folder / "checkpoints"))
    assert saved["validated"] == 6 and saved["best"] == dataclasses.asdict(each.best)
    # Worse weights do not take its place.
    each.save(state_of(12, tiny(), 2.0))
    each.score(lambda: TRUTH, found(9))
    each.wait()
    assert each.best.step == 6 and checkpoint.read(str(folder / "best.pt"))["step"] == 6
    assert [row["step"] for row in read_rows(str(folder))] == [6, 12]
    assert checkpoint.read_latest(str(folder / "checkpoints"))["best"]["step"] == 6


def test_a_failure_is_raised_and_nothing_more_is_written(run, tiny):
    each, folder = run
    (folder / "checkpoints").write_text("in the way")
    each.save(state_of(6, tiny(), 1.0))
    each.score(lambda: TRUTH, found(0))
    for ask in (each.wait, each.raise_failure, lambda: each.save(state_of(12, tiny(), 1.0))):
        with pytest.raises(StorageError, match="checkpoints"):
            ask()
    assert not (folder / "best.pt").exists() and read_rows(str(folder)) == []


def test_the_last_weights_are_kept_where_nothing_validates(run, tiny):
    each, folder = run
    each.save(state_of(12, tiny(), 1.0))
    each.write_last_as_best()
    each.wait()
    best = checkpoint.read(str(folder / "best.pt"))
    assert best["metrics"] == {} and best["model"]["weight"].tolist() == [1.5, 1.5]


def test_a_log_forgets_validations_that_are_repeated(tmp_path):
    log = TrainingLog(str(tmp_path), 0)
    for kind, step in (("train", 5), ("train", 6), ("val", 6), ("train", 7)):
        log.add(kind, {"step": step})
    log.close()
    TrainingLog(str(tmp_path), 6, validated=0).close()
    assert [(row["kind"], row["step"]) for row in read_rows(str(tmp_path))] == [("train", 5), ("train", 6)]
