"""The evaluation step: its verdict on what was scored, for a pipeline and for people."""

import json
from pathlib import Path

import pytest

from components import scoring
from components.scoring import score
from trainer import storage
from trainer.config import parsing
from trainer.model import recipes

METRICS = {"coco/AP": 0.29, "coco/AP50": 0.5}


@pytest.fixture
def trained(tmp_path):
    (tmp_path / "config.json").write_text(parsing.to_json(recipes.load("debug")))
    (tmp_path / "evaluation").mkdir()
    summary = {
        "metrics": METRICS,
        "per_class": {"cat": {"AP": 0.2, "AP50": 0.4, "boxes": 3}},
        "comparison": {
            "baseline": "before",
            "samples": 100,
            "obstacle": "",
            "changes": {"coco/AP": [0.3, 0.29, -0.02, 0.005]},
        },
    }
    (tmp_path / "evaluation" / "metrics.json").write_text(json.dumps(summary))
    return {
        "config": str(tmp_path / "config.json"),
        "output": str(tmp_path),
        "checkpoint": "best.pt",
        "shards": str(tmp_path / "shards" / "0123"),
    }


@pytest.fixture
def evaluated(tmp_path, monkeypatch):
    """In the place of an evaluation."""

    def scores(model, shards, output, config, *, rules):
        (tmp_path / "evaluation" / "report.html").write_text("<p>report")
        (tmp_path / "evaluation" / "report.md").write_text("# report")
        return {"metrics": {**METRICS, "coco/APs": -1.0}}

    monkeypatch.setattr(scoring, "evaluate", scores)


@pytest.mark.parametrize(
    ("rules", "word"),
    [
        ("coco/AP >= 0.2", "pass"),
        ("coco/AP >= 0.2, AP[cat] >= 0.3", "fail"),
        ("coco/AP >= baseline - 0.05", "pass"),
        ("coco/AP >= baseline - 0.01", "fail"),
        ("", "pass"),
    ],
)
def test_rules_of_all_kinds(trained, evaluated, tmp_path, rules, word):
    decided = score(trained, rules, *(str(tmp_path / name) for name in ("page", "short", "gate")))["verdict"]
    record = storage.read_json(str(tmp_path / "evaluation" / "gate.json"))
    assert record["passed"] == (word == "pass") and record["reason"] == decided["reason"]
    assert decided["verdict"] == word


def test_what_people_see_and_metrics_that_do_not_exist(trained, evaluated, tmp_path):
    files = [str(tmp_path / name) for name in ("page", "short", "gate")]
    scored = score(trained, "coco/AP >= 0.2", *files)
    # COCO says -1 where there is nothing of a size: as a number beside others it would be a bad score.
    assert scored["shown"] == METRICS and scored["metrics"]["coco/APs"] == -1.0
    page, short, gate = (Path(file).read_text() for file in files)
    assert page == "<p>report" and short == "# report" and gate.startswith("# Gate: pass\n\n- coco/AP")
