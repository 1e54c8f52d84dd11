"""How far a training is, read from its log: what it really prints is what is understood."""

import logging

import pytest

from trainer.base import log
from trainer.launching.job_status import Progress, parse
from trainer.trackers.training_log import read_rows
from trainer.training.loop import train

pytestmark = pytest.mark.usefixtures("forked_processes")

LOG = """\
12:00:00 train: resumed at step 90 of 600: 16 images a step on 2 processes
12:00:10 kubedet: train 100/600 steps 17%, 3.1 steps/s, 2:41 left, loss 0.714, 50 images/s
12:00:20 kubedet: validate 70/80 images 88%, 7.0 images/s, 0:01 left
12:00:21 train: epoch 3: coco/AP 0.312, coco/AP50 0.517
12:00:30 kubedet: train 133/600 steps 22%, 0.1 steps/s, 1:02:03 left, loss 0.699, 49 images/s
12:00:31 NCCL INFO something else
12:00:40 kubedet: inspect train 5/7 images 71%, 7.0 images/s, loss 9.0, 1 images/s
""".splitlines()


def test_the_newest_of_each_number_is_found():
    assert parse(LOG) == Progress(22, 3723, {"loss": 0.699, "images_per_second": 49.0, "coco/AP": 0.312})
    assert parse([f"[pod-0] 2026-11-22T12:00:00.1Z {line}  \n" for line in LOG]) == parse(LOG)
    assert parse(LOG[:3]) == Progress(16, 161, {"loss": 0.714, "images_per_second": 50.0})


def test_a_training_that_has_just_been_taken_up_again_has_a_place_and_no_time_left_yet():
    assert parse(LOG[:1]) == Progress(15)
    assert parse([*LOG, LOG[0]]) == Progress(15, None, parse(LOG).metrics)


@pytest.mark.parametrize(
    "lines", [[], [""], LOG[2:4], LOG[5:], ["train steps 3%", "train 3 steps, 1.0 steps/s"]]
)
def test_lines_that_tell_of_no_steps(lines):
    assert parse(lines) is None


@pytest.mark.parametrize("eta", [None, 0.4, 59.6, 3599.7, 90000.0])
@pytest.mark.parametrize("note", ["", "loss 0.5, 12 images/s", "17 failed: not found, 3/4 steps 75%"])
def test_a_line_of_progress_is_read_as_it_was_written(eta, note):
    event = {
        "task": "download",
        "done": 3,
        "total": 40,
        "unit": "images",
        "rate": 1.25,
        "eta": eta,
        "note": note,
    }
    parsed = log.parse(f"12:00:00 kubedet: {log.describe(event)}")
    assert parsed == {**event, "rate": 1.2, "eta": None if eta is None else float(round(eta))}


def test_the_log_of_a_training_is_parsed(shards, tiny, tmp_path, caplog, monkeypatch):
    monkeypatch.delenv(log.PROGRESS_FILE, raising=False)
    monkeypatch.setattr(log, "_PLAIN_INTERVAL", 0.0)  # A line after every step.
    with caplog.at_level(logging.INFO):
        train(tiny(), shards, str(tmp_path))
    lines = [f"12:00:00 {each.name}: {each.getMessage()}" for each in caplog.records]
    rows = {(row["kind"], row["step"]): row for row in read_rows(str(tmp_path))}
    first = next(turn for turn, line in enumerate(lines) if "train 3/12 steps" in line)
    row = rows["train", 3]
    progress = parse(lines[: first + 1])
    assert progress.percent == 25 and progress.remaining_seconds is not None
    assert progress.metrics == {
        "loss": pytest.approx(row["loss"], abs=6e-4),
        "images_per_second": pytest.approx(row["images_per_second"], abs=0.6),
    }
    whole = parse(lines)
    assert (whole.percent, whole.remaining_seconds) == (100, 0)
    assert whole.metrics["coco/AP"] == pytest.approx(rows["val", 12]["coco/AP"], abs=6e-4)
    assert whole.metrics["loss"] == pytest.approx(rows["train", 12]["loss"], abs=6e-4)
