import math

import pytest

from trainer.errors import EvaluationError
from trainer.evaluation import gate

METRICS = {"coco/AP": 0.3, "coco/AP50": 0.482, "coco/APs": -1.0, "loss": math.nan, "coco/AP50/stop sign": 0.7}


@pytest.mark.parametrize(
    ("text", "metric", "comparison", "bound"),
    [
        ("coco/AP50 >= 0.5", "coco/AP50", ">=", 0.5),
        ("  coco/AP>.25 ", "coco/AP", ">", 0.25),
        ("loss <= 1.5e-1", "loss", "<=", 0.15),
        ("coco/AP < 1", "coco/AP", "<", 1.0),
        ("coco/AP50/stop sign >= 0.5", "coco/AP50/stop sign", ">=", 0.5),
    ],
)
def test_parse(text, metric, comparison, bound):
    assert gate.parse(text) == gate.Rule(metric, comparison, bound)


@pytest.mark.parametrize(
    "text",
    [
        *("", "coco/AP50", "coco/AP50 >=", ">= 0.5", "coco/AP50 == 0.5", "coco/AP50 => 0.5"),
        *("coco/AP50 >= half", "coco/AP50 >= nan", "coco/AP50 >= 0x1", "coco/AP50 >= 0.5 please"),
        *("0.1 < coco/AP50 < 0.5", "coco/AP >= 0.1, coco/AP50 >= 0.2", "coco/AP50 > = 0.5"),
    ],
)
def test_parse_refuses(text):
    with pytest.raises(EvaluationError, match="cannot be read"):
        gate.parse(text)


def test_percent_for_share_is_refused_with_the_number_meant():
    with pytest.raises(EvaluationError, match=r"between 0 and 1") as error:
        gate.parse("coco/AP50 >= 50")
    assert "0.5 for 50 %" in error.value.fix


def test_verdict_names_each_rule_and_value():
    verdict = gate.decide(METRICS, ["coco/AP50 >= 0.5", "coco/AP >= 0.3"])
    assert not verdict.passed
    assert verdict.reason == "coco/AP50 0.482 >= 0.5: failed\ncoco/AP 0.300 >= 0.3: passed"
    assert gate.decide(METRICS, ["coco/AP >= 0.3", "coco/AP50 < 0.9"]).passed
    assert not gate.decide(METRICS, ["coco/AP > 0.3"]).passed


@pytest.mark.parametrize(
    ("value", "rule", "reason"),
    [
        (0.49996, "m >= 0.5", "m 0.499960 >= 0.5: failed"),
        (0.50004, "m > 0.5", "m 0.500040 > 0.5: passed"),
        (0.5 - 1e-12, "m >= 0.5", "m 0.499999999999 >= 0.5: failed"),
    ],
)
def test_shown_value_never_contradicts_the_outcome(value, rule, reason):
    assert gate.decide({"m": value}, [rule]).reason == reason


def test_no_ground_truth_and_nan_fail_with_the_reason():
    verdict = gate.decide(METRICS, ["coco/APs >= 0.0"])
    assert not verdict.passed and "no ground truth" in verdict.reason
    verdict = gate.decide(METRICS, ["loss <= 5"])
    assert not verdict.passed and "nan" in verdict.reason and "not a number" in verdict.reason


def test_unknown_metric_names_the_known_ones():
    with pytest.raises(EvaluationError, match=r"mAP >= 0\.5` names an unknown metric") as error:
        gate.decide(METRICS, ["coco/AP >= 0.1", "mAP >= 0.5"])
    assert "coco/AP50" in error.value.fix


def test_no_rules_leave_the_gate_open():
    assert gate.decide(METRICS, []) == gate.Verdict(passed=True, reason="no rule is set: passed")


def test_split_rules():
    assert gate.split_rules("coco/AP >= 0.1, coco/AP50 >= 0.5;\n coco/APs > 0\n") == [
        "coco/AP >= 0.1", "coco/AP50 >= 0.5", "coco/APs > 0",
    ]  # fmt: skip
    assert gate.split_rules("  \n") == []
