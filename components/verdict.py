"""What the gate step decides, and how it says so."""

from pathlib import Path
from typing import Any

from trainer import configuration, storage
from trainer.config import Config
from trainer.evaluation.baseline import SUMMARY
from trainer.evaluation.gate import Evidence, decide, split_rules


def rules_for(trained: dict[str, Any], rules: str) -> tuple[Config, list[str]]:
    """Return a run's configuration, and the gate's rules.

    Args:
        trained: manifest of the trained model.
        rules: several parted by commas; empty takes the configuration's.
    """
    settings = configuration.from_json(storage.read_bytes(trained["config"]), where=trained["config"])
    return settings, split_rules(rules) or settings.evaluation.gate


def judge(trained: dict[str, Any], metrics: dict[str, float], rules: str, verdict: Any) -> str:
    """Hold an evaluation against the gate's rules and write the verdict.

    The verdict goes to `evaluation/gate.json` in the run's folder and, for people, into
    the artifact.

    Args:
        trained: manifest of the trained model.
        metrics: by name, e.g. {"coco/AP50": 0.61}: the artifact that this step waits for.
        rules: as trainer/evaluation/gate.py reads them; empty takes the configuration's.
        verdict: output artifact of kfp that shows Markdown.

    Returns:
        "pass" or "fail".

    Raises:
        EvaluationError: a rule cannot be read or names a metric that is not there.
    """
    _, held = rules_for(trained, rules)
    folder = storage.join(trained["output"], "evaluation")
    summary = storage.read_json(storage.join(folder, SUMMARY))
    decided = decide(Evidence.of({**summary, "metrics": metrics}), held)
    word = "pass" if decided.passed else "fail"
    record = {"passed": decided.passed, "reason": decided.reason, "rules": held}
    storage.write_json(storage.join(folder, "gate.json"), record)
    Path(verdict.path).write_text(
        f"# Gate: {word}\n\n" + "".join(f"- {line}\n" for line in decided.reason.splitlines())
    )
    verdict.metadata.update(verdict=word, reason=decided.reason, rules=", ".join(held))
    return word
