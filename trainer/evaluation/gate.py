"""The gate: rules such as `coco/AP50 >= 0.5` that decide whether a model is exported.

`coco/AP50 >= 0.5`            a metric and a number; also >, <, <=
`AP[person] >= 0.3`           AP of a class; also AP50, AP75, APs, APm, APl, AR100
`AP[*] >= 0.05`               AP of every class that has objects
`coco/AP >= baseline - 0.01`  not worse than the baseline by more than 0.01, with 95 % confidence
`coco/AP > baseline`          better than the baseline, with 95 % confidence
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
    METRICS,
    MIN_IMAGES,
    OPEN_IMAGES,
    PER_CLASS,
    TOO_FEW,
    BaselineComparison,
    Change,
)

_OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RULE = re.compile(
    # Words and the spaces between them share no character, so matching takes linear time.
    r"\s*(?P<metric>[A-Za-z0-9/]+\[[^\[\]]+\]|[^\s<>=,;\[\]]+(?:\s+[^\s<>=,;\[\]]+)*)\s*(?P<comparison>>=|<=|>|<)\s*"
    rf"(?:(?P<number>[+-]?{_NUMBER})|(?P<baseline>baseline)(?:\s*(?P<sign>[+-])\s*(?P<margin>{_NUMBER}))?)\s*"
)
_CLASS_METRIC = re.compile(r"([A-Za-z0-9]+)\[(.+)\]")
_ALL_METRICS = (*METRICS, OPEN_IMAGES)
_NOT_MEASURED = "the evaluation does not report it"
_NO_TRUTH = " because there is no ground truth for it"
_MAX_LISTED = 5


@dataclass(frozen=True)
class Rule:
    """A metric compared with a number or with the baseline's value."""

    metric: str
    comparison: str
    bound: float  # the number, or the margin that is added to the baseline's value
    baseline: bool = False

    def __str__(self) -> str:
        if not self.baseline:
            return f"{self.metric} {self.comparison} {self.bound:g}"
        margin = f" {'-' if self.bound < 0 else '+'} {abs(self.bound):g}" if self.bound else ""
        return f"{self.metric} {self.comparison} baseline{margin}"


@dataclass(frozen=True)
class Evidence:
    """Results of an evaluation that rules can refer to."""

    metrics: Mapping[str, float]
    per_class: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """AP, AP50, ... of each class by name, as in CocoResult."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    """Change of coco/AP, coco/AP50 and AP[class]; empty without a baseline."""
    obstacle: str = ""  # reason why the model cannot be compared with the baseline

    @classmethod
    def from_summary(cls, summary: Mapping[str, Any]) -> "Evidence":
        """Read the content of metrics.json."""
        compared = (
            BaselineComparison.from_dict(summary["comparison"])
            if summary.get("comparison")
            else BaselineComparison("")
        )
        return cls(summary["metrics"], summary["per_class"], compared.changes, compared.obstacle)


@dataclass(frozen=True)
class Verdict:
    """Decision of the gate."""

    passed: bool
    reason: str  # one line for each rule with the measured value, e.g. `coco/AP50 0.482 >= 0.5: failed`


def split_rules(text: str) -> list[str]:
    """Split a text of rules at commas, semicolons and line ends outside of brackets."""
    rules, end, in_brackets = [], len(text), False
    for match in reversed(list(re.finditer(r"[\[\],;\n]", text))):
        if match[0] in "[]":
            in_brackets = match[0] == "]"
        elif not in_brackets:
            rules.append(text[match.end() : end].strip())
            end = match.start()
    return [rule for rule in (text[:end].strip(), *reversed(rules)) if rule]


def parse_rule(text: str) -> Rule:
    """Parse one rule; raise EvaluationError if it is malformed, impossible, or names an unknown metric."""
    match = _RULE.fullmatch(text)
    if match is None:
        raise EvaluationError(
            f"gate rule {text!r} cannot be read",
            fix="write `metric >= number` (or >, <, <=), for example `coco/AP50 >= 0.5`, "
            "`AP[person] >= 0.3`, or `coco/AP >= baseline - 0.01`",
        )
    bound = match["number"] or (match["sign"] or "") + (match["margin"] or "0")
    rule = Rule(match["metric"], match["comparison"], float(bound), baseline=bool(match["baseline"]))
    metric, of_class, problem, fix = rule.metric, _CLASS_METRIC.fullmatch(rule.metric), "", ""
    if of_class and of_class[1] not in PER_CLASS:
        problem, fix = f": classes have no metric {of_class[1]}", f"use {', '.join(PER_CLASS)}"
    elif not of_class and metric not in _ALL_METRICS:
        problem = " names an unknown metric"
        fix = f"use one of: {', '.join(_ALL_METRICS)}, or AP[class]"
    elif rule.baseline and metric not in ("coco/AP", "coco/AP50") and not metric.startswith("AP["):
        problem = f": {metric} cannot be compared with the baseline"
        fix = "use coco/AP, coco/AP50 or AP[class]"
    elif rule.baseline and rule.comparison not in (">=", ">"):
        problem, fix = " requires a model that is worse", "compare with >= or > the baseline"
    elif not (-1 if rule.baseline else 0) <= rule.bound <= 1:
        problem = ": metrics are between 0 and 1"
        fix = f"write the number as a fraction, for example {rule.bound / 100:g} for {rule.bound:g} %"
    if problem:
        raise EvaluationError(f"gate rule {text!r}{problem}", fix=fix)
    return rule


def check_rules(rules: Sequence[str], classes: Collection[str] | None = None) -> None:
    """Check all rules, and their class names unless `classes` is None; the error lists all invalid rules."""
    errors = []
    for text in rules:
        try:
            of_class = _CLASS_METRIC.fullmatch(parse_rule(text).metric)
            if of_class and classes is not None:
                _check_class_name(text, of_class[2], classes)
        except EvaluationError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        reasons = "".join(f"\n  {error.message}; {error.fix}" for error in errors)
        raise EvaluationError(
            f"{len(errors)} rules of the gate cannot be used:{reasons}", fix="correct these rules"
        )


def refuse_baseline_rules(rules: Sequence[str]) -> None:
    """Refuse rules that refer to a baseline if none can exist, because they would always hold."""
    if compared := [text for text in rules if parse_rule(text).baseline]:
        raise EvaluationError(
            f"there is no baseline for the rules of the gate: {', '.join(compared)}",
            fix="name one (evaluation.baseline), or remove these rules",
        )


def decide(evidence: Evidence, rules: Sequence[str]) -> Verdict:
    """Decide whether all rules hold. A metric that is NaN or -1 (no ground truth) fails its rule."""
    outcomes = [_check_rule(rule, evidence) for rule in map(parse_rule, rules)]
    lines = [f"{text}: {'passed' if passed else 'failed'}{reason}" for passed, text, reason in outcomes]
    return Verdict(all(passed for passed, *_ in outcomes), "\n".join(lines) or "no rule is set: passed")


def _check_rule(rule: Rule, evidence: Evidence) -> tuple[bool, str, str]:
    """Return whether a rule holds, the rule with the measured value, and the reason."""
    of_class, text, passed, reason = _CLASS_METRIC.fullmatch(rule.metric), str(rule), False, ""
    if of_class and of_class[2] == "*":
        return _check_all_classes(rule, of_class[1], evidence)
    if of_class:
        _check_class_name(text, of_class[2], evidence.per_class)
    elif rule.metric not in evidence.metrics:
        return False, text, f" because {_NOT_MEASURED}"
    change, holds = evidence.changes.get(rule.metric), _OPERATORS[rule.comparison]
    if not rule.baseline:
        value = evidence.per_class[of_class[2]][of_class[1]] if of_class else evidence.metrics[rule.metric]
        if not math.isfinite(value):
            text = f"{rule.metric} {value} {rule.comparison} {rule.bound:g}"
            reason = " because it is not a number"
        elif value == -1:
            reason = _NO_TRUTH
        else:
            passed = holds(value, rule.bound)
            text = f"{rule.metric} {_format_comparison(rule, value)} {rule.comparison} {rule.bound:g}"
    elif evidence.obstacle:
        reason = f" because {evidence.obstacle}"
    elif not evidence.changes:
        passed, reason = True, " because there is no baseline yet"
    elif change is None:
        reason = _NO_TRUTH
    elif change.verdict == TOO_FEW:
        reason = f" because fewer than {MIN_IMAGES} images have such boxes: {TOO_FEW}"
    else:
        passed = holds(change.low, rule.bound)
        text = (
            f"{rule.metric} {change.new:.3f} against the baseline's {change.base:.3f}: changed by "
            f"{change.low:+.4f} to {change.high:+.4f} with 95 % confidence, "
            f"{'more than' if rule.comparison == '>' else 'at least'} {rule.bound:+g} is needed"
        )
    return passed, text, reason


def _check_all_classes(rule: Rule, metric: str, evidence: Evidence) -> tuple[bool, str, str]:
    measured = sorted((row[metric], name) for name, row in evidence.per_class.items() if row[metric] >= 0)
    values, note = measured, ""
    if rule.baseline:
        few = {name for name, change in evidence.changes.items() if change.verdict == TOO_FEW}
        values = [(value, name) for value, name in measured if f"{metric}[{name}]" not in few]
        if left_out := len(measured) - len(values):
            note = f" ({left_out} with boxes in fewer than {MIN_IMAGES} images left out: {TOO_FEW})"
    if not values:
        return False, str(rule), _NO_TRUTH + note
    failed = [
        f"{name} {_format_comparison(one, value)}"
        for value, name in values
        if not _check_rule(one := replace(rule, metric=f"{metric}[{name}]"), evidence)[0]
    ]
    if not failed:
        return True, f"{rule}, {len(values)} classes{note}", ""
    more = f", and {len(failed) - _MAX_LISTED} more" if len(failed) > _MAX_LISTED else ""
    listed = ", ".join(failed[:_MAX_LISTED]) + more
    return False, str(rule), f" by {len(failed)} of {len(values)} classes{note}: {listed}"


def _check_class_name(text: str, name: str, classes: Collection[str]) -> None:
    if name != "*" and name not in classes:
        close = " or ".join(difflib.get_close_matches(name, classes, n=3))
        fix = f"did you mean {close}?" if close else f"classes are: {', '.join(list(classes)[:20])}"
        raise EvaluationError(f"gate rule {text!r} names an unknown class", fix=fix)


def _format_comparison(rule: Rule, value: float) -> str:
    # Show enough digits: 0.4996 shown as 0.5 would contradict `failed`.
    if rule.baseline:
        return f"{value:.3f}"
    compare = _OPERATORS[rule.comparison]
    passed = compare(value, rule.bound)
    texts = (f"{value:.{digits}f}" for digits in (3, 4, 6, 9))
    return next((text for text in texts if compare(float(text), rule.bound) == passed), repr(value))
