"""Advice after a training, from what its validations say."""

from collections.abc import Iterable, Mapping
from typing import Any

_METRIC = "coco/AP50"
_GAIN = 0.02
"""Smallest gain that is told: less is what chance makes of a small validation split."""


def train_longer(rows: Iterable[Mapping[str, Any]], epochs: int) -> str:
    """Say that a longer training will pay, where AP50 was still rising when it ended.

    Args:
        rows: of metrics.jsonl.
        epochs: how many it was trained.

    Returns:
        The advice; empty where the last validation is not clearly the best, or was the only one.
    """
    *before, last = [row[_METRIC] for row in rows if row["kind"] == "val"] or [-1.0]
    if not before or last - max(before) < _GAIN:
        return ""
    return (
        f"AP50 was still rising at the last validation ({max(before):.3f}, then {last:.3f}): train longer: "
        f"--set train.epochs={2 * epochs}"
    )
