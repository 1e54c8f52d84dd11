"""What steps leave in Kubeflow: artifacts, what the UI shows, and the outcome of the run."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from components import hooks, reports, steps
from trainer import storage
from trainer.base.errors import StorageError
from trainer.steps.manifests import Bundle, NothingNew, Scores, TrainedModel, read


@pytest.fixture
def artifact(tmp_path):
    return lambda name: SimpleNamespace(path=str(tmp_path / name), metadata={})


@pytest.fixture
def ended(monkeypatch):
    """The ends of runs that steps report: event and reason."""
    ends = []
    monkeypatch.setattr(hooks, "on_step_end", ends.append)
    monkeypatch.setattr(steps, "record_outcome", ends.append)
    return ends


def scores(tmp_path, **fields):
    (tmp_path / "report.html").write_text("<p>report")
    (tmp_path / "report.md").write_text("# report")
    values = {"metrics": {"coco/AP": 0.29, "coco/APs": -1.0}, "passed": True, "rules": ["coco/AP > 0"]}
    values |= {"reason": "coco/AP 0.290 > 0: passed", "model": "pets", "evaluation": str(tmp_path)}
    return Scores(data_root="root", **values | fields)


@pytest.fixture
def model(tmp_path):
    return TrainedModel(data_root="root", output=str(tmp_path / "run"), shards="root/shards/x", metrics={})


def test_scores_and_a_passed_gate(artifact, ended, model, tmp_path):
    metrics, report, summary, verdict = map(artifact, ("metrics", "report", "summary", "verdict"))
    assert reports.publish_scores(scores(tmp_path), model, metrics, report, summary, verdict) == "pass"
    # COCO's value is -1 if there is nothing of a size: it would look like a bad score.
    assert metrics.metadata == {"coco/AP": 0.29}
    assert read(metrics.path, Scores).metrics["coco/APs"] == -1.0
    assert Path(report.path).read_text() == "<p>report" and Path(summary.path).read_text() == "# report"
    assert Path(verdict.path).read_text().startswith("# Gate: pass\n\n- coco/AP 0.290 > 0: passed")
    assert not ended  # The export reports the end of the run.


def test_a_store_that_is_away_while_a_report_is_copied(artifact, ended, model, tmp_path, monkeypatch, capfd):
    artifacts = list(map(artifact, ("metrics", "report", "summary", "verdict")))
    monkeypatch.setattr(steps.RetryPolicy, "from_environment", lambda: steps.RetryPolicy(3, first_wait=0.01))
    read_bytes, failures = storage.read_bytes, [StorageError("cannot read", transient=True)] * 2

    def read_later(uri):
        if failures:
            raise failures.pop()
        return read_bytes(uri)

    monkeypatch.setattr(storage, "read_bytes", read_later)
    assert reports.publish_scores(scores(tmp_path), model, *artifacts) == "pass"
    failures += [StorageError("the store is closed", fix="open it")] * 9
    with pytest.raises(SystemExit):
        reports.publish_scores(scores(tmp_path), model, *artifacts)
    assert ended == ["the store is closed\n  fix: open it"] and "fix: open it" in capfd.readouterr().err


def test_a_run_that_is_held_back(artifact, ended, model, tmp_path):
    failed = scores(tmp_path, passed=False, reason="coco/AP 0.290 > 0.5: failed")
    artifacts = map(artifact, ("metrics", "report", "summary", "verdict"))
    assert reports.publish_scores(failed, model, *artifacts) == "fail"
    end, text = ended
    assert (end.outcome.event, end.outcome.run, end.outcome.model) == (hooks.HELD_BACK, "run", "pets")
    assert end.outcome.metrics == {"coco/AP": 0.29} and end.folder == model.output
    assert text == "held back\ncoco/AP 0.290 > 0.5: failed"


def test_a_run_with_nothing_new(artifact, ended, monkeypatch):
    monkeypatch.setenv("KUBEDET_RUN_ID", "night-2")
    found = NothingNew(data_root="root", since="pets v7", found="0 new", model="pets", model_version="v7")
    assert reports.publish_raw_data(found, artifact("raw"), keep_runs=3) == hooks.NOTHING_NEW
    end, text, pruned = ended
    assert (pruned.data_root, pruned.keep_runs) == ("root", 3)
    assert (end.outcome.run, end.outcome.model_version) == ("night-2", "v7")
    assert end.folder == "root/notices/night-2" and text == "nothing new\nnothing new since pets v7: 0 new"


def test_an_exported_model(artifact, ended, model):
    bundle = Bundle(
        data_root="root", model="root/models/pets/v8", name="pets", model_version="v8", formats=["onnx"],
        metrics={"coco/AP": 0.3, "coco/APs": -1.0}, gate="coco/AP > 0: passed",
    )  # fmt: skip
    exported = artifact("exported")
    reports.publish_bundle(bundle, model, exported)
    assert exported.metadata == {"uri": "root/models/pets/v8", "name": "pets", "model_version": "v8"}
    assert read(exported.path, Bundle) == bundle
    end, text = ended
    assert end.outcome.event == hooks.PASSED and end.outcome.metrics == {"coco/AP": 0.3}
    assert text == "passed\ncoco/AP > 0: passed"
