"""The work of the evaluation step: score the model, apply the gate, write the report."""

import logging
from pathlib import Path
from typing import Any

from components import hooks, steps
from components.records import VerdictRecord, name_of, now
from trainer import storage
from trainer.config import parsing
from trainer.data.shard_index import data_root_of
from trainer.evaluation.evaluate import evaluate
from trainer.evaluation.gate import Evidence, decide, split_rules
from trainer.evaluation.metrics import SUMMARY

logger = logging.getLogger("gate")

MISSING_METRIC = -1.0  # Value of COCO's metrics if there is nothing to score, e.g. no small object.


def score(trained: dict[str, Any], rules: str, report: str, summary: str, verdict: str) -> dict[str, Any]:
    """Score the best checkpoint, write the report, and apply the gate's rules to the metrics.

    `trained` is the manifest of the trained model; `rules` are separated by commas, empty takes the
    configuration's. `report`, `summary` and `verdict` are local files that receive a page and two Markdown
    texts. Returns `metrics` by name, `shown` (those that have a value) and the `verdict`.
    """
    output, data_root = trained["output"], data_root_of(trained["shards"])
    settings = parsing.read(trained["config"])
    folder = storage.join(output, "evaluation")
    gate_rules = split_rules(rules) or settings.evaluation.gate
    scored = evaluate(trained["checkpoint"], trained["shards"], folder, settings, rules=gate_rules)
    for name, path in (("report.html", report), ("report.md", summary)):
        Path(path).write_bytes(storage.read_bytes(storage.join(folder, name)))
    measured = storage.read_json(storage.join(folder, SUMMARY)) | {"metrics": scored["metrics"]}
    decision = decide(Evidence.from_summary(measured), gate_rules)
    reason, word = decision.reason, "pass" if decision.passed else "fail"
    record = {"passed": decision.passed, "reason": reason, "rules": gate_rules}
    storage.write_json(storage.join(folder, "gate.json"), record)
    logger.info("%s: %s", word, "; ".join(reason.splitlines()))
    Path(verdict).write_text(f"# Gate: {word}\n\n" + "".join(f"- {line}\n" for line in reason.splitlines()))
    shown = {name: value for name, value in scored["metrics"].items() if value != MISSING_METRIC}
    VerdictRecord(name_of(output), decision.passed, shown, now()).write(data_root)
    decided = {"verdict": word, "reason": reason, "rules": ", ".join(gate_rules)}
    if not decision.passed:  # Otherwise the export step reports the outcome.
        outcome = hooks.Outcome(hooks.HELD_BACK, name_of(output), reason, settings.export.name, metrics=shown)
        hooks.at_end(hooks.StepEnd("evaluate", outcome, output))
        steps.record(f"{outcome.event}\n{reason}")
    return {"metrics": scored["metrics"], "shown": shown, "verdict": decided}
