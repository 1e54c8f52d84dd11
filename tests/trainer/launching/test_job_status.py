"""A training's progress, read from its log."""

import pytest
from event_lines import progress, resumed, scored

from trainer.base import events, log
from trainer.launching.job_status import TrainingProgress, read_progress
from trainer.trackers.training_log import read_rows
from trainer.training.loop import train

LOG = [
    resumed(90, 600),
    progress(100, 600, eta=161.0, metrics={"loss": 0.714, "images_per_second": 50.0}),
    "12:00:20 kubedet: validate 70/80 images 88%, 7.0 images/s, 0:01 left",
    scored(AP=0.312, AP50=0.517),
    progress(133, 600, eta=3723.0, metrics={"loss": 0.699, "images_per_second": 49.0}),
    "12:00:31 NCCL INFO something else",
    progress(5, 7).replace("steps", "images"),
]


def test_the_newest_of_each_number_is_found():
    newest = {"loss": 0.699, "images_per_second": 49.0, "coco/AP": 0.312}
    assert read_progress(LOG) == TrainingProgress(22, 3723, newest)
    assert read_progress(LOG[:3]) == TrainingProgress(16, 161, {"loss": 0.714, "images_per_second": 50.0})


def test_a_resumed_training_has_a_share_and_no_remaining_time_yet():
    assert read_progress(LOG[:1]) == TrainingProgress(15)
    assert read_progress([*LOG, LOG[0]]) == TrainingProgress(15, None, read_progress(LOG).metrics)


@pytest.mark.parametrize("lines", [[], [""], LOG[2:4], LOG[5:], ['{"event": "progress"}', "{"]])
def test_lines_without_steps(lines):
    assert read_progress(lines) is None


def test_a_training_reports_its_progress(shards, tiny, tmp_path, monkeypatch):
    file = tmp_path / "events"
    monkeypatch.setenv(events.FILE, str(file))
    monkeypatch.setattr(log, "_EVENT_SECONDS", 0.0)  # A line after every step.
    train(tiny(), shards, str(tmp_path))
    lines = file.read_text().splitlines()
    rows = {(row["kind"], row["step"]): row for row in read_rows(str(tmp_path))}
    first = next(turn for turn, line in enumerate(lines) if '"task": "train", "done": 3, "total": 12' in line)
    newest = read_progress(lines[: first + 1])
    assert newest.percent == 25 and newest.remaining_seconds is not None
    assert newest.metrics["loss"] == pytest.approx(rows["train", 3]["loss"])
    whole = read_progress(lines)
    assert (whole.percent, whole.remaining_seconds) == (100, 0)
    assert whole.metrics["coco/AP"] == pytest.approx(rows["val", 12]["coco/AP"])
