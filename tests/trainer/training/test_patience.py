"""A training ends early where validations do not become better, at the same step however it was stopped."""

import dataclasses
import logging

import pytest
from finished_runs import train_in_parts

from trainer.base.errors import ConfigError
from trainer.data.shard_index import ShardDataset
from trainer.trackers.training_log import read_rows
from trainer.training import run_recorder
from trainer.training.loop import train

QUICK = {"train__epochs": 6, "train__batch_size": 8}
"""Three steps an epoch."""
SCORES = {1: 0.2, 2: 0.4, 3: 0.3, 4: 0.4, 5: 0.35, 6: 0.5}
"""By epoch: none after the second is better before the sixth."""


@pytest.fixture
def scored(monkeypatch):
    """Validations score as SCORES says."""
    evaluate, score, current = run_recorder.evaluate_coco, run_recorder.Recorder._score, []

    def noting(self, truth, predictions):
        current[:] = [SCORES[self._saved["epoch"]]]
        score(self, truth, predictions)

    def scoring(*given, **options):
        evaluated = evaluate(*given, **options)
        metrics = dict.fromkeys(("coco/AP", "coco/AP50"), current[0])
        return dataclasses.replace(evaluated, metrics={**evaluated.metrics, **metrics})

    monkeypatch.setattr(run_recorder.Recorder, "_score", noting)
    monkeypatch.setattr(run_recorder, "evaluate_coco", scoring)


@pytest.mark.slow
def test_it_ends_after_as_many_epochs_without_a_better_score(scored, shards, tiny, tmp_path, caplog):
    """Stopped and resumed it ends at the same step."""
    caplog.set_level(logging.INFO, "train")
    config = tiny(**QUICK, train__patience=2)
    whole, result = train_in_parts(config, shards, tmp_path, 7)
    assert whole["ended_early"] and (whole["steps"], whole["epochs"]) == (12, 4)
    assert whole["best_step"] == 6 and whole["metrics"]["coco/AP"] == 0.4
    assert "no better coco/AP since epoch 2: the training ends after epoch 4 of 6" in caplog.text
    rows = read_rows(str(tmp_path / "whole"))
    assert [row["epoch"] for row in rows if row["kind"] == "val"] == [1, 2, 3, 4]
    assert {**result, "seconds": 0, "images_per_second": 0, "checkpoint": "", "resumed_from": 0} == {
        **whole, "seconds": 0, "images_per_second": 0, "checkpoint": "", "resumed_from": 0,
    }  # fmt: skip


def test_without_a_validation_split_it_is_refused(shards, tiny, tmp_path, monkeypatch):
    opened = ShardDataset.__init__

    def without_val(self, *given):
        opened(self, *given)
        self.index = dataclasses.replace(self.index, splits={"train": self.index.splits["train"]})

    monkeypatch.setattr(ShardDataset, "__init__", without_val)
    with pytest.raises(ConfigError, match=r"train\.patience=2 needs a validation split") as caught:
        train(tiny(train__patience=2), shards, str(tmp_path))
    assert "data.val_fraction" in caught.value.fix
