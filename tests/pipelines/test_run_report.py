"""The report at the end of a run."""

import json

import pytest

from pipelines.commands.run import RunRecord, report
from pipelines.display import RunProgress, describe_step

AGAIN = "kubedet run --name first"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "metrics.json").write_text(json.dumps({"images": 80, "split": "test"}))
    (tmp_path / "evaluation" / "table.txt").write_text("precision AP\n          0.5\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def record(folder):
    return RunRecord(
        "first", {}, "succeeded", "2026-01-01T10:00:00+00:00", "2026-01-01T11:00:05+00:00",
        training={"steps": 10, "seconds": 62.0, "images_per_second": 12.34, "processes": 2},
        metrics={"coco/AP": 0.5},
        gate={"passed": True, "reason": "coco/AP 0.5 >= 0: passed"},
        paths={"report": str(folder / "evaluation" / "report.html"), "model": str(folder / "a model")},
    )  # fmt: skip


def tell(record, folder):
    report(record, RunProgress(folder / "events"), folder, again=AGAIN)


def test_a_run_that_went_well(record, folder, capsys):
    tell(record, folder)
    printed, complaints = capsys.readouterr()
    assert complaints == ""
    for part in (
        "80 images of the test split\n\nprecision AP\n          0.5\n",
        "training: 10 steps in 1:02, 12.3 images/s on 2 processes\n",
        "gate: passed\n  coco/AP 0.5 >= 0: passed\n",
        "run first: succeeded in 1:00:05\n  report  evaluation/report.html\n  model   a model\n",
        "kubedet predict 'a model' IMAGES... -o DIR\n",
    ):
        assert part in printed


def test_without_a_model_there_is_none_to_try(record, folder, capsys):
    del record.paths["model"]
    record.gate = {"passed": False, "reason": "coco/AP 0.5 >= 0.9: failed"}
    record.training["images_per_second"] = 0.0
    tell(record, folder)
    printed = capsys.readouterr().out
    assert "try the model" not in printed and "training:" not in printed
    assert "\n\ngate: failed, no model was exported\n  coco/AP 0.5 >= 0.9: failed\n\nrun first" in printed


@pytest.mark.parametrize(("passed", "status"), [(False, "succeeded"), (True, "failed")])
def test_a_run_succeeds_without_an_export_only_if_the_gate_failed(record, folder, passed, status):
    progress = RunProgress(folder / "events")
    for name in ("prepare", "train", "evaluate"):
        progress.steps[name].state = "done"
    record.gate["passed"] = passed
    progress.finish()
    record.end(progress)
    assert record.status == status and bool(record.error) == passed
    assert "held back by the gate" in describe_step(progress.steps["export"])
