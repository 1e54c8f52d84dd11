"""The gate step: its verdict on what an evaluation wrote, for a pipeline and for people."""

import json
from types import SimpleNamespace

import pytest

from components.verdict import judge
from trainer import configuration, recipes
from trainer.errors import EvaluationError

METRICS = {"coco/AP": 0.29, "coco/AP50": 0.5}


@pytest.fixture
def trained(tmp_path):
    (tmp_path / "config.json").write_text(configuration.to_json(recipes.load("debug")))
    (tmp_path / "evaluation").mkdir()
    summary = {
        "metrics": METRICS, "per_class": {"cat": {"AP": 0.2, "AP50": 0.4, "boxes": 3}},
        "comparison": {"obstacle": "", "changes": {"coco/AP": [0.3, 0.29, -0.02, 0.005]}},
    }  # fmt: skip
    (tmp_path / "evaluation" / "metrics.json").write_text(json.dumps(summary))
    return {"config": str(tmp_path / "config.json"), "output": str(tmp_path)}


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
def test_rules_of_all_kinds(trained, tmp_path, rules, word):
    verdict = SimpleNamespace(path=str(tmp_path / "verdict.md"), metadata={})
    assert judge(trained, METRICS, rules, verdict) == word
    assert (tmp_path / "verdict.md").read_text().startswith(f"# Gate: {word}\n\n- coco/AP")
    record = json.loads((tmp_path / "evaluation" / "gate.json").read_text())
    assert record["passed"] == (word == "pass") and record["reason"] == verdict.metadata["reason"]
    assert verdict.metadata["verdict"] == word


def test_a_class_that_there_is_not(trained, tmp_path):
    verdict = SimpleNamespace(path=str(tmp_path / "verdict.md"), metadata={})
    with pytest.raises(EvaluationError, match="unknown class"):
        judge(trained, METRICS, "AP[dog] >= 0.1", verdict)
