"""The gate: rules such as `coco/AP50 >= 0.5` that decide whether a model is exported."""

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.errors import EvaluationError

_OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_RULE = re.compile(
    r"\s*([^\s<>=,;][^<>=,;]*?)\s*(>=|<=|>|<)\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*"
)


@dataclass(frozen=True)
class Rule:
    """One rule: the metric of that name, compared with a number."""

    metric: str
    comparison: str
    bound: float

    def __str__(self) -> str:
        return f"{self.metric} {self.comparison} {self.bound:g}"


@dataclass(frozen=True)
class Verdict:
    """What the gate decided, and why."""

    passed: bool
    reason: str
    """Each rule with the value found, e.g. `coco/AP50 0.482 >= 0.5: failed`; one a line."""


def split_rules(text: str) -> list[str]:
    """Split a text of rules at commas, semicolons and line ends."""
    return [rule.strip() for rule in re.split(r"[,;\n]", text) if rule.strip()]


def parse(text: str) -> Rule:
    """Read one rule, `metric >= number` or with >, < or <=.

    Raises:
        EvaluationError: the text is no such rule, or no COCO metric can ever reach its number.
    """
    match = _RULE.fullmatch(text)
    if match is None:
        raise EvaluationError(
            f"gate rule {text!r} cannot be read",
            fix="write `metric >= number` (or >, <, <=), for example `coco/AP50 >= 0.5`",
        )
    rule = Rule(match[1], match[2], float(match[3]))
    if rule.metric.startswith("coco/") and not 0 <= rule.bound <= 1:
        raise EvaluationError(
            f"gate rule {text!r}: COCO metrics lie between 0 and 1",
            fix=f"give the number as a share, for example {rule.bound / 100:g} for {rule.bound:g} %",
        )
    return rule


def decide(metrics: Mapping[str, float], rules: Sequence[str]) -> Verdict:
    """Decide whether all rules hold. A metric that is NaN or -1 (no ground truth) fails its rule.

    Args:
        metrics: values by name.
        rules: as `parse` reads them; without any, the gate is open.

    Raises:
        EvaluationError: a rule cannot be read, or names a metric that there is not.
    """
    if not rules:
        return Verdict(passed=True, reason="no rule is set: passed")
    outcomes = [_apply(rule, metrics) for rule in map(parse, rules)]
    return Verdict(
        passed=all(passed for passed, _ in outcomes), reason="\n".join(text for _, text in outcomes)
    )


def _apply(rule: Rule, metrics: Mapping[str, float]) -> tuple[bool, str]:
    if rule.metric not in metrics:
        raise EvaluationError(
            f"gate rule `{rule}` names an unknown metric", fix=f"use one of: {', '.join(sorted(metrics))}"
        )
    value = metrics[rule.metric]
    if not math.isfinite(value):
        return False, f"{rule.metric} {value} {rule.comparison} {rule.bound:g}: failed, it is not a number"
    if value == -1:
        return False, f"{rule}: failed, there is no ground truth to measure it on"
    compare = _OPERATORS[rule.comparison]
    passed = compare(value, rule.bound)
    # 0.4996 shown as 0.5 would contradict "failed": show the digits that the outcome needs.
    texts = (f"{value:.{digits}f}" for digits in (3, 4, 6, 9))
    shown = next((text for text in texts if compare(float(text), rule.bound) == passed), repr(value))
    return (
        passed,
        f"{rule.metric} {shown} {rule.comparison} {rule.bound:g}: {'passed' if passed else 'failed'}",
    )
