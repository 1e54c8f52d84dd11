"""What the evaluation step scores and decides, and how it says so."""

import logging
from pathlib import Path
from typing import Any

from trainer import configuration, storage
from trainer.baseline import SUMMARY
from trainer.config import Config
from trainer.evaluate import evaluate
from trainer.evaluation.gate import Evidence, decide, split_rules

logger = logging.getLogger("gate")

NOT_THERE = -1.0
"""What COCO's metrics are where there is nothing to score, e.g. no small object."""


def rules_for(trained: dict[str, Any], rules: str) -> tuple[Config, list[str]]:
    """Return a run's configuration, and the gate's rules.

    Args:
        trained: manifest of the trained model.
        rules: several parted by commas; empty takes the configuration's.
    """
    settings = configuration.from_json(storage.read_bytes(trained["config"]), where=trained["config"])
    return settings, split_rules(rules) or settings.evaluation.gate


def score(trained: dict[str, Any], rules: str, report: str, summary: str, verdict: str) -> dict[str, Any]:
    """Score the best checkpoint, write the report, and hold the metrics against the gate's rules.

    Args:
        trained: manifest of the trained model.
        rules: several parted by commas; empty takes the configuration's.
        report: local file that receives the report, as a page.
        summary: local file that receives it in short, as Markdown.
        verdict: local file that receives what was decided and why, as Markdown.

    Returns:
        metrics (all, by name), shown (those that are there) and verdict: word, reason, rules.

    Raises:
        EvaluationError: a rule cannot be read or names a metric that is not there.
        KubedetError: as `trainer.evaluate.evaluate` raises them.
    """
    settings, held = rules_for(trained, rules)
    folder = storage.join(trained["output"], "evaluation")
    scored = evaluate(trained["checkpoint"], trained["shards"], folder, settings, rules=held)
    for name, path in (("report.html", report), ("report.md", summary)):
        Path(path).write_bytes(storage.read_bytes(storage.join(folder, name)))
    decided = judge(trained, scored["metrics"], rules)
    logger.info("gate: %s: %s", decided["verdict"], "; ".join(decided["reason"].splitlines()))
    lines = "".join(f"- {line}\n" for line in decided["reason"].splitlines())
    Path(verdict).write_text(f"# Gate: {decided['verdict']}\n\n{lines}")
    shown = {name: value for name, value in scored["metrics"].items() if value != NOT_THERE}
    return {"metrics": scored["metrics"], "shown": shown, "verdict": decided}


def judge(trained: dict[str, Any], metrics: dict[str, float], rules: str) -> dict[str, str]:
    """Hold an evaluation against the gate's rules, and write `evaluation/gate.json` in the run's folder.

    Args:
        trained: manifest of the trained model.
        metrics: by name, e.g. {"coco/AP50": 0.61}.
        rules: as trainer/evaluation/gate.py reads them; empty takes the configuration's.

    Returns:
        verdict ("pass" or "fail"), reason and rules.

    Raises:
        EvaluationError: a rule cannot be read or names a metric that is not there.
    """
    _, held = rules_for(trained, rules)
    folder = storage.join(trained["output"], "evaluation")
    summary = storage.read_json(storage.join(folder, SUMMARY))
    decided = decide(Evidence.from_summary({**summary, "metrics": metrics}), held)
    record = {"passed": decided.passed, "reason": decided.reason, "rules": held}
    storage.write_json(storage.join(folder, "gate.json"), record)
    word = "pass" if decided.passed else "fail"
    return {"verdict": word, "reason": decided.reason, "rules": ", ".join(held)}
