"""Metrics on their way to trackers: chosen by configuration or environment, never in a training's way."""

import threading
import time

import pytest
from patience import until

from trainer.trackers import experiment_tracking
from trainer.trackers.experiment_tracking import TrackedRun, Tracking, enabled_trackers, open_tracking


class Tracker:
    """Takes rows, or fails as it is told to."""

    def __init__(self):
        self.calls, self.rows, self.error = [], [], None
        self.hangs = threading.Event()
        self.hangs.set()

    def start(self, run, run_id):
        self.hangs.wait(30)
        self._fail()
        self.calls.append(("start", run.name, run_id))
        return run_id or "new"

    def write(self, rows):
        self._fail()
        self.rows += rows

    def finish(self, state, summary):
        self._fail()
        self.calls.append(("finish", state, dict(summary)))

    def _fail(self):
        if self.error:
            raise self.error


@pytest.fixture
def tracker():
    return Tracker()


def run_at(folder):
    return TrackedRun("first", str(folder), {"train.lr": 0.1}, {"recipe": "debug"})


def test_rows_reach_a_tracker_in_order_with_the_names_of_tensorboard(tracker, tmp_path):
    tracking = Tracking({"mine": tracker}, run_at(tmp_path))
    tracking.add("train", {"step": 1, "loss": 2, "lr": 0.1})
    tracking.add("val", {"step": 1, "epoch": 1, "coco/AP": 0.5})
    tracking.finish("finished", {"best/AP": 0.5})
    assert [(row.step, row.values) for row in tracker.rows] == [
        (1, {"train/loss": 2.0, "train/lr": 0.1}),
        (1, {"val/epoch": 1.0, "val/AP": 0.5}),
    ]
    assert tracker.calls == [("start", "first", ""), ("finish", "finished", {"best/AP": 0.5})]
    tracking.finish("failed")
    tracking.add("train", {"step": 2, "loss": 1.0})
    assert len(tracker.calls) == 2 and len(tracker.rows) == 2


@pytest.mark.parametrize(("resumed", "run_id"), [(True, "new"), (False, "")])
def test_a_resumed_run_goes_on_in_the_same_run_of_the_tracker(tracker, tmp_path, resumed, run_id):
    for again in (False, resumed):
        tracking = Tracking({"mine": tracker}, run_at(tmp_path), resumed=again)
        tracking.add("train", {"step": 1, "loss": 1.0})
        tracking.finish("stopped")
    assert [call[2] for call in tracker.calls if call[0] == "start"] == ["", run_id]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"kind": "trackers", "version": 9, "ids": {}}', "was written by another version of kubedet"),
        ("{", "is not JSON"),
    ],
)
def test_unreadable_tracker_ids_start_a_new_run(tracker, tmp_path, caplog, content, told):
    (tmp_path / "trackers.json").write_text(content)
    tracking = Tracking({"mine": tracker}, run_at(tmp_path), resumed=True)
    tracking.add("train", {"step": 1, "loss": 1.0})
    tracking.finish("stopped")
    assert tracker.calls[0] == ("start", "first", "") and len(tracker.rows) == 1
    assert told in caplog.text and "starting new runs at the trackers" in caplog.text


def test_a_tracker_that_fails_is_told_of_once_and_gets_everything_when_it_is_back(
    tracker, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(experiment_tracking, "RETRY_SECONDS", 0.0)
    tracker.error = ConnectionError("refused\nby the server")
    tracking = Tracking({"mine": tracker}, run_at(tmp_path))
    for step in range(5):
        tracking.add("train", {"step": step, "loss": 1.0})
        time.sleep(0.02)
    until(lambda: caplog.records)
    tracker.error = None
    tracking.finish("finished")
    assert [row.step for row in tracker.rows] == [0, 1, 2, 3, 4]
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "cannot send metrics to mine (refused)" in warning.message and "continues" in warning.message


def test_nobody_waits_for_a_tracker_that_hangs(tracker, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(experiment_tracking, "END_SECONDS", {"finished": 0.2})
    tracker.hangs.clear()
    tracking = Tracking({"mine": tracker}, run_at(tmp_path))
    start = time.monotonic()
    tracking.add("train", {"step": 1, "loss": 1.0})
    tracking.finish("finished")
    assert time.monotonic() - start < 10 and "did not respond in time" in caplog.text
    tracker.hangs.set()


@pytest.mark.parametrize(
    ("configured", "environment", "names"),
    [
        ([], {}, []),
        (["wandb"], {}, ["wandb"]),
        ([], {"MLFLOW_TRACKING_URI": "http://x"}, ["mlflow"]),
        ([], {"MLFLOW_RUN_ID": "1"}, ["mlflow"]),
        (["mlflow", "wandb"], {"MLFLOW_RUN_ID": "1"}, ["mlflow", "wandb"]),
        ([], {"WANDB_API_KEY": "key"}, []),
    ],
)
def test_trackers_are_off_unless_configured(configured, environment, names, tiny, monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert enabled_trackers(tiny(train__trackers=configured)) == names


def test_a_tracker_that_is_not_installed_is_one_warning(tiny, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(experiment_tracking._TRACKERS, "wandb", ("trainer.trackers.nothing", "Nothing"))
    tracking = open_tracking(tiny(train__trackers=["wandb"]), str(tmp_path), "f", resumed=False)
    tracking.add("train", {"step": 1, "loss": 1.0})
    tracking.finish("finished")
    assert "[wandb]" in caplog.text and not list(tmp_path.iterdir())
