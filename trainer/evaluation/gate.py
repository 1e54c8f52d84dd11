"""The gate: rules such as `coco/AP50 >= 0.5` that decide whether a model is exported.

`coco/AP50 >= 0.5`            a metric and a number; also >, <, <=
`AP[person] >= 0.3`           AP of a class; also AP50, AP75, APs, APm, APl, AR100
`AP[*] >= 0.05`               of every class that has objects
`coco/AP >= baseline - 0.01`  with 95 % confidence not worse than the baseline by more than that
`coco/AP > baseline`          with 95 % confidence better than the baseline
`drift/classes <= 0.2`        the data are no further than that from those of the baseline's training
"""

import difflib
import math
import operator
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.base.errors import EvaluationError
from trainer.evaluation.metrics import (
    DRIFT,
    LEAST_IMAGES,
    METRICS,
    OPEN_IMAGES,
    PER_CLASS,
    TOO_FEW,
    Change,
    Compared,
)

_OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RULE = re.compile(
    # Words and the blanks between have no character in common: nothing is tried twice, however long it is.
    r"\s*(?P<metric>[A-Za-z0-9/]+\[[^\[\]]+\]|[^\s<>=,;\[\]]+(?:\s+[^\s<>=,;\[\]]+)*)\s*(?P<comparison>>=|<=|>|<)\s*"
    rf"(?:(?P<number>[+-]?{_NUMBER})|(?P<baseline>baseline)(?:\s*(?P<sign>[+-])\s*(?P<margin>{_NUMBER}))?)\s*"
)
_OF_CLASS = re.compile(r"([A-Za-z0-9]+)\[(.+)\]")
_COMPARED = "coco/AP, coco/AP50 and AP[class]"
_LISTED = 5


@dataclass(frozen=True)
class Rule:
    """One rule: the metric of that name, compared with a number or with the baseline's value."""

    metric: str
    comparison: str
    bound: float
    """The number, or what is added to the baseline's value."""
    baseline: bool = False

    def __str__(self) -> str:
        if not self.baseline:
            return f"{self.metric} {self.comparison} {self.bound:g}"
        margin = f" {'-' if self.bound < 0 else '+'} {abs(self.bound):g}" if self.bound else ""
        return f"{self.metric} {self.comparison} baseline{margin}"


@dataclass(frozen=True)
class Evidence:
    """What an evaluation found out, as far as rules may ask for it."""

    metrics: Mapping[str, float]
    """Values by name, e.g. coco/AP."""
    per_class: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """AP, AP50, ... of each class by name, as in CocoResult."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    """Change against the baseline of coco/AP, coco/AP50 and AP[class]; empty without a baseline."""
    obstacle: str = ""
    """Why there is a baseline that the model cannot be compared with."""
    drift_obstacle: str = "the evaluation does not tell it"
    """Why the drift of the data is not known; empty where there is nothing yet to compare them with."""

    @classmethod
    def from_summary(cls, summary: Mapping[str, Any]) -> "Evidence":
        """Read the content of metrics.json."""
        compared = Compared.from_json(summary["comparison"]) if summary.get("comparison") else Compared("")
        drift = summary.get("drift") or {"metrics": {}, "obstacle": cls.drift_obstacle}
        return cls(
            {**summary["metrics"], **drift["metrics"]}, summary["per_class"], compared.changes,
            compared.obstacle, drift["obstacle"],
        )  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What the gate decided, and why."""

    passed: bool
    reason: str
    """Each rule with the value found, e.g. `coco/AP50 0.482 >= 0.5: failed`; one a line."""
    rules: tuple[str, ...] = field(default=(), compare=False)
    """The rules that were applied."""

    def to_json(self) -> dict[str, Any]:
        """Return the content of gate.json."""
        return {"passed": self.passed, "reason": self.reason, "rules": list(self.rules)}


def split_rules(text: str) -> list[str]:
    """Split a text of rules at commas, semicolons and line ends; not within brackets."""
    rules, end, in_brackets = [], len(text), False
    for match in reversed(list(re.finditer(r"[\[\],;\n]", text))):
        if match[0] in "[]":
            in_brackets = match[0] == "]"
        elif not in_brackets:
            rules.append(text[match.end() : end].strip())
            end = match.start()
    return [rule for rule in (text[:end].strip(), *reversed(rules)) if rule]


def parse(text: str) -> Rule:
    """Read one rule.

    Raises:
        EvaluationError: the text is no rule, there is no such metric, nothing can ever fulfil it, or it
            compares with the baseline what is not compared.
    """
    match = _RULE.fullmatch(text)
    if match is None:
        raise EvaluationError(
            f"gate rule {text!r} cannot be read",
            fix="write `metric >= number` (or >, <, <=), for example `coco/AP50 >= 0.5`, "
            "`AP[person] >= 0.3`, or `coco/AP >= baseline - 0.01`",
        )
    metric, of_class = match["metric"], _OF_CLASS.fullmatch(match["metric"])
    if of_class and of_class[1] not in PER_CLASS:
        raise EvaluationError(
            f"gate rule {text!r}: there is no {of_class[1]} of a class", fix=f"use {', '.join(PER_CLASS)}"
        )
    if not of_class and metric not in (metric_names := (*METRICS, OPEN_IMAGES, *DRIFT)):
        raise EvaluationError(
            f"gate rule {text!r} names an unknown metric",
            fix=f"use one of: {', '.join(metric_names)}, or AP[class]",
        )
    if not match["baseline"]:
        rule = Rule(metric, match["comparison"], float(match["number"]))
    else:
        margin = float((match["sign"] or "") + (match["margin"] or "0"))
        rule = Rule(metric, match["comparison"], margin, baseline=True)
        _check_compared(text, rule)
    if not (-1 if rule.baseline else 0) <= rule.bound <= 1:
        raise EvaluationError(
            f"gate rule {text!r}: metrics lie between 0 and 1",
            fix=f"give the number as a share, for example {rule.bound / 100:g} for {rule.bound:g} %",
        )
    return rule


def drift_metrics(rules: Sequence[str]) -> set[str]:
    """Return which distances of data rules ask for.

    Raises:
        EvaluationError: as `parse`.
    """
    return {parse(rule).metric for rule in rules} & DRIFT.keys()


def check(rules: Sequence[str], classes: Collection[str] | None = None) -> None:
    """Check rules before the work that they are to judge.

    Args:
        rules: as `parse` reads them.
        classes: names of the classes that rules may ask for; None where they are not known yet.

    Raises:
        EvaluationError: rules cannot be read, or name a metric or class that there is not; with all of them.
    """
    wrong = []
    for text in rules:
        try:
            of_class = _OF_CLASS.fullmatch(parse(text).metric)
            if of_class and classes is not None:
                _check_class_name(text, of_class[2], classes)
        except EvaluationError as error:
            wrong.append(error)
    if len(wrong) == 1:
        raise wrong[0]
    if wrong:
        reasons = "".join(f"\n  {error.message}; {error.fix}" for error in wrong)
        raise EvaluationError(f"{len(wrong)} rules of the gate cannot be used:{reasons}", fix="correct these")


def decide(evidence: Evidence, rules: Sequence[str]) -> Verdict:
    """Decide whether all rules hold. A metric that is NaN or -1 (no ground truth) fails its rule.

    Raises:
        EvaluationError: a rule cannot be read, or names a metric or class that there is not.
    """
    if not rules:
        return Verdict(passed=True, reason="no rule is set: passed")
    outcomes = [_apply(rule, evidence) for rule in map(parse, rules)]
    return Verdict(
        passed=all(passed for passed, _ in outcomes),
        reason="\n".join(text for _, text in outcomes),
        rules=tuple(rules),
    )


def _check_compared(text: str, rule: Rule) -> None:
    if rule.metric not in ("coco/AP", "coco/AP50") and not rule.metric.startswith("AP["):
        raise EvaluationError(
            f"gate rule {text!r}: {rule.metric} is not compared with the baseline", fix=f"use {_COMPARED}"
        )
    if rule.comparison not in (">=", ">"):
        raise EvaluationError(
            f"gate rule {text!r} asks for a model that is worse", fix="compare with >= or > the baseline"
        )


def _apply(rule: Rule, evidence: Evidence) -> tuple[bool, str]:
    of_class = _OF_CLASS.fullmatch(rule.metric)
    if of_class and of_class[2] == "*":
        return _apply_to_all(rule, of_class[1], evidence)
    if of_class:
        _check_class_name(str(rule), of_class[2], evidence.per_class)
    elif rule.metric not in evidence.metrics:
        return _without_value(rule, evidence)
    if rule.baseline:
        return _against_baseline(rule, evidence)
    value = evidence.per_class[of_class[2]][of_class[1]] if of_class else evidence.metrics[rule.metric]
    if not math.isfinite(value):
        return False, f"{rule.metric} {value} {rule.comparison} {rule.bound:g}: failed, it is not a number"
    if value == -1:
        return False, f"{rule}: failed, there is no ground truth to measure it on"
    passed = _OPERATORS[rule.comparison](value, rule.bound)
    return passed, f"{rule.metric} {_shown(rule, value)} {rule.comparison} {rule.bound:g}: {_word(passed)}"


def _without_value(rule: Rule, evidence: Evidence) -> tuple[bool, str]:
    reason = evidence.drift_obstacle if rule.metric in DRIFT else "the evaluation does not tell it"
    return not reason, f"{rule}: " + (
        f"failed, {reason}" if reason else "passed, there is nothing to compare with"
    )


def _apply_to_all(rule: Rule, metric: str, evidence: Evidence) -> tuple[bool, str]:
    values = sorted((row[metric], name) for name, row in evidence.per_class.items() if row[metric] >= 0)
    few = ""
    if rule.baseline:
        compared = [(value, name) for value, name in values if not _too_few(evidence, f"{metric}[{name}]")]
        if left_out := len(values) - len(compared):
            few = f" ({left_out} with boxes in fewer than {LEAST_IMAGES} images left out: {TOO_FEW})"
        values = compared
    if not values:
        return False, f"{rule}: failed, there is no ground truth to measure it on{few}"
    failed = [
        f"{name} {_shown(one, value)}"
        for value, name in values
        if not _apply(one := replace(rule, metric=f"{metric}[{name}]"), evidence)[0]
    ]
    if not failed:
        return True, f"{rule}, {len(values)} classes{few}: passed"
    more = f", and {len(failed) - _LISTED} more" if len(failed) > _LISTED else ""
    listed = ", ".join(failed[:_LISTED]) + more
    return False, f"{rule}: failed by {len(failed)} of {len(values)} classes{few}: {listed}"


def _too_few(evidence: Evidence, metric: str) -> bool:
    change = evidence.changes.get(metric)
    return change is not None and change.verdict == TOO_FEW


def _check_class_name(text: str, name: str, classes: Collection[str]) -> None:
    if name != "*" and name not in classes:
        close = difflib.get_close_matches(name, classes, n=3)
        raise EvaluationError(
            f"gate rule {text!r} names an unknown class",
            fix=f"did you mean {' or '.join(close)}?" if close
            else f"classes are: {', '.join(list(classes)[:20])}",
        )  # fmt: skip


def _against_baseline(rule: Rule, evidence: Evidence) -> tuple[bool, str]:
    if evidence.obstacle:
        return False, f"{rule}: failed, {evidence.obstacle}"
    if not evidence.changes:
        return True, f"{rule}: passed, there is no baseline yet"
    change = evidence.changes.get(rule.metric)
    if change is None:
        return False, f"{rule}: failed, there is no ground truth to measure it on"
    if _too_few(evidence, rule.metric):
        return False, f"{rule}: failed, fewer than {LEAST_IMAGES} images have such boxes: {TOO_FEW}"
    passed = _OPERATORS[rule.comparison](change.low, rule.bound)
    needed = "more than" if rule.comparison == ">" else "at least"
    return passed, (
        f"{rule.metric} {change.new:.3f} against the baseline's {change.base:.3f}: changed by "
        f"{change.low:+.4f} to {change.high:+.4f} with 95 % confidence, {needed} {rule.bound:+g} "
        f"is needed: {_word(passed)}"
    )


def _shown(rule: Rule, value: float) -> str:
    if rule.baseline:
        return f"{value:.3f}"
    compare = _OPERATORS[rule.comparison]
    passed = compare(value, rule.bound)
    texts = (f"{value:.{digits}f}" for digits in (3, 4, 6, 9))
    return next((text for text in texts if compare(float(text), rule.bound) == passed), repr(value))


def _word(passed: bool) -> str:
    return "passed" if passed else "failed"
