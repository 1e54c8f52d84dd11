import math

import pytest

from trainer.base.errors import EvaluationError
from trainer.evaluation import gate
from trainer.evaluation.metrics import Change

METRICS = {"coco/AP": 0.3, "coco/AP50": 0.482, "coco/APs": -1.0, "oid/AP50": math.nan}


@pytest.mark.parametrize(
    ("text", "metric", "comparison", "bound"),
    [
        ("coco/AP50 >= 0.5", "coco/AP50", ">=", 0.5),
        ("  coco/AP>.25 ", "coco/AP", ">", 0.25),
        ("oid/AP50 <= 1.5e-1", "oid/AP50", "<=", 0.15),
        ("coco/AP < 1", "coco/AP", "<", 1.0),
        ("AP[person] >= 0.3", "AP[person]", ">=", 0.3),
        ("AP50[remote, tv] > 0", "AP50[remote, tv]", ">", 0.0),
        ("AP[*] >= .05", "AP[*]", ">=", 0.05),
    ],
)
def test_parse(text, metric, comparison, bound):
    assert gate.parse_rule(text) == gate.Rule(metric, comparison, bound)


@pytest.mark.parametrize(
    "text",
    [
        "", "coco/AP50", "coco/AP50 >=", ">= 0.5", "coco/AP50 == 0.5", "coco/AP50 => 0.5",
        "coco/AP50 >= half", "coco/AP50 >= nan", "coco/AP50 >= 0x1", "coco/AP50 >= 0.5 please",
        "coco/AP >= baseline -", "coco/AP >= baseline 0.1", "AP[] >= 0.1", "AP[a >= 0.1", "coco/AP >= base",
        "0.1 < coco/AP50 < 0.5", "coco/AP >= 0.1, coco/AP50 >= 0.2", "coco/AP50 > = 0.5",
    ],
)  # fmt: skip
def test_parse_refuses(text):
    with pytest.raises(EvaluationError, match="cannot be read"):
        gate.parse_rule(text)


def test_verdict_names_each_rule_and_value():
    verdict = gate.decide(gate.Evidence(METRICS), ["coco/AP50 >= 0.5", "coco/AP >= 0.3"])
    assert not verdict.passed
    assert verdict.reason == "coco/AP50 0.482 >= 0.5: failed\ncoco/AP 0.300 >= 0.3: passed"
    assert gate.decide(gate.Evidence(METRICS), ["coco/AP >= 0.3", "coco/AP50 < 0.9"]).passed
    assert not gate.decide(gate.Evidence(METRICS), ["coco/AP > 0.3"]).passed
    assert gate.decide(gate.Evidence(METRICS), []).passed


@pytest.mark.parametrize(
    ("value", "rule", "reason"),
    [
        (0.49996, "coco/AP >= 0.5", "coco/AP 0.499960 >= 0.5: failed"),
        (0.50004, "coco/AP > 0.5", "coco/AP 0.500040 > 0.5: passed"),
        (0.5 - 1e-12, "coco/AP >= 0.5", "coco/AP 0.499999999999 >= 0.5: failed"),
    ],
)
def test_shown_value_never_contradicts_the_outcome(value, rule, reason):
    assert gate.decide(gate.Evidence({"coco/AP": value}), [rule]).reason == reason


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("coco/APs >= 0.0", "no ground truth"),
        ("oid/AP50 <= 0.5", "not a number"),
        ("coco/APl > 0", "not report"),
    ],
)
def test_a_metric_without_a_value_fails_its_rule(rule, reason):
    verdict = gate.decide(gate.Evidence(METRICS), ["coco/AP >= 0.1", rule])
    assert not verdict.passed and reason in verdict.reason.splitlines()[1]


def test_check_lists_all_bad_rules():
    gate.check_rules(["coco/AP >= 0.1", "AP[whatever] >= 0.1", "AP[*] >= 0.1"])
    gate.check_rules(["AP[cat] >= 0.1", "AP[*] >= baseline"], ["dog", "cat"])
    with pytest.raises(EvaluationError, match=r"^gate rule 'AP\[cta\] >= 0.1' names an unknown") as error:
        gate.check_rules(["AP[cta] >= 0.1"], ["dog", "cat"])
    assert error.value.fix == "did you mean cat?"
    with pytest.raises(EvaluationError, match="3 rules of the gate cannot be used") as error:
        gate.check_rules(["mAP > 0", "coco/AP > 0", "AP[owl] > 0", "coco/AP > 50"], ["dog", "cat"])
    lines = error.value.message.splitlines()[1:]
    assert [line.split("'")[1] for line in lines] == ["mAP > 0", "AP[owl] > 0", "coco/AP > 50"]
    assert lines[1].endswith("names an unknown class; classes are: dog, cat")


def test_split_rules():
    assert gate.split_rules("coco/AP >= 0.1, coco/AP50 >= 0.5;\n coco/APs > 0\n") == [
        "coco/AP >= 0.1",
        "coco/AP50 >= 0.5",
        "coco/APs > 0",
    ]
    assert gate.split_rules("  \n") == []
    assert gate.split_rules("AP[a, b; c] >= 0.1, AP[*] > 0") == ["AP[a, b; c] >= 0.1", "AP[*] > 0"]


@pytest.mark.parametrize(
    ("text", "bound", "shown"),
    [
        ("coco/AP >= baseline - 0.01", -0.01, "coco/AP >= baseline - 0.01"),
        ("coco/AP50>baseline", 0.0, "coco/AP50 > baseline"),
        ("AP[stop sign] >= baseline+.5e-2", 0.005, "AP[stop sign] >= baseline + 0.005"),
    ],
)
def test_parse_baseline(text, bound, shown):
    rule = gate.parse_rule(text)
    assert rule.baseline and rule.bound == pytest.approx(bound) and str(rule) == shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("coco/APs >= baseline", "coco/APs cannot be compared"),
        ("AP50[cat] >= baseline", r"AP50\[cat\] cannot be compared"),
        ("coco/AP <= baseline", "a model that is worse"),
        ("coco/AP >= baseline - 5", "between 0 and 1"),
        ("mAP[cat] >= 0.1", "classes have no metric mAP"),
        ("AP[cat] >= 30", "between 0 and 1"),
    ],
)
def test_impossible_rules_are_refused(text, message):
    with pytest.raises(EvaluationError, match=message):
        gate.parse_rule(text)


def row(ap):
    return {"AP": ap, "AP50": ap, "boxes": 3}


CLASSES = {"cat": row(0.1), "stop sign": row(0.6), "dog": row(0.02), "nothing": row(-1.0)}


def test_floors_of_classes():
    evidence = gate.Evidence(METRICS, CLASSES)
    verdict = gate.decide(evidence, ["AP[stop sign] >= 0.3", "AP50[cat] >= 0.2"])
    assert verdict.reason == "AP[stop sign] 0.600 >= 0.3: passed\nAP50[cat] 0.100 >= 0.2: failed"
    assert gate.decide(evidence, ["AP[*] >= 0.02"]) == gate.Verdict(True, "AP[*] >= 0.02, 3 classes: passed")
    verdict = gate.decide(evidence, ["AP[*] >= 0.2"])
    assert verdict == gate.Verdict(False, "AP[*] >= 0.2: failed by 2 of 3 classes: dog 0.020, cat 0.100")
    assert "no ground truth" in gate.decide(evidence, ["AP[nothing] >= 0.0"]).reason
    verdict = gate.decide(gate.Evidence(METRICS, {"nothing": row(-1.0)}), ["AP[*] >= 0.02"])
    assert verdict == gate.Verdict(False, "AP[*] >= 0.02: failed because there is no ground truth for it")
    with pytest.raises(EvaluationError, match="unknown class") as error:
        gate.decide(evidence, ["AP[stopsign] >= 0.3"])
    assert "did you mean stop sign?" in error.value.fix
    many = {f"c{i}": row(i / 100) for i in range(20)}
    assert gate.decide(gate.Evidence({}, many), ["AP[*] >= 0.1"]).reason.endswith("c4 0.040, and 5 more")


def test_not_worse_than_the_baseline():
    def verdict(low, high, rule):
        changes = {"coco/AP": Change(0.30, 0.29, low, high), "AP[cat]": Change(0.2, 0.1, -0.2, -0.01)}
        return gate.decide(gate.Evidence(METRICS, CLASSES, changes), [rule])

    assert verdict(-0.009, 0.02, "coco/AP >= baseline - 0.01").passed
    assert not verdict(-0.011, 0.02, "coco/AP >= baseline - 0.01").passed
    assert verdict(0.001, 0.02, "coco/AP > baseline").passed
    assert not verdict(0.0, 0.02, "coco/AP > baseline").passed
    assert verdict(0.0, 0.0, "coco/AP >= baseline").passed
    assert verdict(-0.02, 0.01, "coco/AP >= baseline - 0.01").reason == (
        "coco/AP 0.290 against the baseline's 0.300: changed by -0.0200 to +0.0100 with 95 % confidence, "
        "at least -0.01 is needed: failed"
    )
    assert not verdict(0, 0, "AP[cat] >= baseline - 0.1").passed
    assert "no ground truth" in verdict(0, 0, "AP[nothing] >= baseline").reason


def test_classes_with_too_few_images_are_not_compared_with_the_baseline():
    few, sound = Change(0.1, 0.9, 0.5, 1.0, "too few to tell"), Change(0.2, 0.3, 0.05, 0.2, "better")
    classes = {"cat": row(0.9), "dog": row(0.3)}

    def verdict(rule, **changes):
        by_name = {"coco/AP": few, **{f"AP[{name}]": change for name, change in changes.items()}}
        return gate.decide(gate.Evidence(METRICS, classes, by_name), [rule])

    assert not verdict("coco/AP >= baseline").passed
    assert not verdict("AP[cat] >= baseline", cat=few, dog=sound).passed
    named = verdict("AP[*] > baseline", cat=few, dog=sound)
    assert named.passed and "1 with boxes in fewer than 10 images left out" in named.reason
    assert not verdict("AP[*] > baseline", cat=few, dog=few).passed
    assert verdict("AP[*] >= 0.2", cat=few, dog=sound).reason == "AP[*] >= 0.2, 2 classes: passed"


def test_without_a_baseline_the_first_model_passes_but_not_one_that_cannot_be_compared():
    rules = ["coco/AP >= baseline - 0.01"]
    first = gate.decide(gate.Evidence(METRICS), rules)
    assert first.passed and "there is no baseline yet" in first.reason
    other = gate.decide(gate.Evidence(METRICS, obstacle="its classes differ"), rules)
    assert not other.passed and "its classes differ" in other.reason
