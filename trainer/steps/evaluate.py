"""The step `evaluate`: score the best checkpoint, write the report, and decide whether it is exported."""

import logging

from trainer.config import parsing
from trainer.evaluation.gate import split_rules
from trainer.evaluators import shards
from trainer.steps.manifests import Scores, TrainedModel
from trainer.steps.records import VerdictRecord, utc_timestamp

logger = logging.getLogger("gate")


def evaluate(model: TrainedModel, rules: str = "") -> Scores:
    """Score the best checkpoint on the test split (or validation), and apply the rules of the gate.

    `rules` are separated by commas; if empty, the rules of the configuration apply.
    """
    config = parsing.read(model.config)
    summary = shards.evaluate(
        model.checkpoint,
        model.shards,
        model.evaluation,
        config,
        data_root=model.data_root,
        rules=split_rules(rules) or config.evaluation.gate,
    )
    scores = Scores(
        data_root=model.data_root,
        evaluation=model.evaluation,
        model=config.export.name,
        metrics=summary["metrics"],
        **summary["verdict"],
    )
    word = "pass" if scores.passed else "fail"
    logger.info("%s: %s", word, "; ".join(scores.reason.splitlines()))
    VerdictRecord(model.run, scores.passed, scores.defined_metrics, utc_timestamp()).write(model.data_root)
    return scores
