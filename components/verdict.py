"""What the gate step decides, and how it says so."""

from pathlib import Path
from typing import Any

from trainer import config, storage
from trainer.evaluation.gate import decide, split_rules


def judge(trained: dict[str, Any], metrics: dict[str, float], rules: str, verdict: Any) -> str:
    """Hold metrics against the gate's rules and write the verdict.

    The verdict goes to `evaluation/gate.json` in the run's folder and, for people, into
    the artifact.

    Args:
        trained: manifest of the trained model.
        metrics: by name, e.g. {"coco/AP50": 0.61}.
        rules: `metric >= number`, several parted by commas; empty takes the configuration's.
        verdict: output artifact of kfp that shows Markdown.

    Returns:
        "pass" or "fail".

    Raises:
        EvaluationError: a rule cannot be read or names a metric that is not there.
    """
    settings = config.from_json(storage.read_bytes(trained["config"]), where=trained["config"])
    held = split_rules(rules) or settings.evaluation.gate
    decided = decide(metrics, held)
    word = "pass" if decided.passed else "fail"
    record = {"passed": decided.passed, "reason": decided.reason, "rules": held}
    storage.write_json(storage.join(trained["output"], "evaluation", "gate.json"), record)
    Path(verdict.path).write_text(
        f"# Gate: {word}\n\n" + "".join(f"- {line}\n" for line in decided.reason.splitlines())
    )
    verdict.metadata.update(verdict=word, reason=decided.reason, rules=", ".join(held))
    return word
