"""Confidence intervals for the comparison of two models, by a paired bootstrap over images.

Efron and Tibshirani, An Introduction to the Bootstrap, 1993; Holm, Scandinavian Journal of Statistics 6,
1979. docs/evaluation.md explains intervals and verdicts. Arrays are [rows, B samples].
"""

from dataclasses import replace

import numpy as np

from trainer.evaluation.box_matching import Matches
from trainer.evaluation.coco_metrics import RECALLS
from trainer.evaluation.metrics import BETTER, LEAST_IMAGES, NOT_SURE, TOO_FEW, WORSE, Change

_SIGNIFICANCE = 0.05
_CELLS = 20_000_000  # Largest array of one step: samples x predictions of a class.


def compare(
    base: Matches, new: Matches, names: list[str], *, samples: int = 200, seed: int = 0
) -> dict[str, Change]:
    """Compare the matches of two models with the same ground truth.

    Returns:
        The change of coco/AP, coco/AP50 (AP at the first threshold) and of AP[class] for each class with
        objects; empty if none has.
    """
    weights = _drawn_images(base.image_count, samples, seed)
    per_class, p_values, drawn = {}, {}, []
    for place, name in enumerate(names):
        if not len(objects := base.objects(place)):
            continue
        pair = [_precision(matches, place, weights) for matches in (base, new)]
        key = f"AP[{name}]"
        per_class[key], p_values[key] = _change(pair[0][0], pair[1][0], len(np.unique(objects)))
        drawn.append(pair)
    if not drawn:
        return {}
    # [classes, models, mean or first, B]; a class that a sample draws no object of is left out of
    # that sample's mean.
    precisions = np.array(drawn)
    with np.errstate(invalid="ignore"):
        base_means, new_means = np.nansum(precisions, axis=0) / np.isfinite(precisions).sum(axis=0)
    count = len(np.unique(base.truth_images))
    overall, at_half = (_change(*pair, count)[0] for pair in zip(base_means, new_means, strict=True))
    return {"coco/AP": overall, "coco/AP50": at_half, **_holm(per_class, p_values)}


def _drawn_images(images: int, samples: int, seed: int) -> np.ndarray:
    # The first column is the data: every image counts once.
    random = np.random.default_rng(seed)
    weights = np.ones((images, samples + 1), np.uint8)
    for sample in range(1, samples + 1):
        counts = np.bincount(random.integers(0, images, images), minlength=images)
        weights[:, sample] = np.minimum(counts, 255)
    return weights


def _change(base: np.ndarray, new: np.ndarray, images: int) -> tuple[Change, float]:
    spread = (new - base)[1:]
    spread = spread[np.isfinite(spread)]
    delta, low, high, p_value = float(new[0] - base[0]), np.nan, np.nan, 1.0
    if len(spread):
        low, high = np.clip(np.percentile(spread, [2.5, 97.5]) - (spread.mean() - delta), -1, 1)
        p_value = _p_value(delta, float(spread.std()), images)
    verdict = BETTER if low > 0 else WORSE if high < 0 else NOT_SURE
    if images < LEAST_IMAGES:
        verdict, p_value = TOO_FEW, 1.0
    return Change(float(base[0]), float(new[0]), float(low), float(high), verdict), p_value


def _p_value(delta: float, deviation: float, images: int) -> float:
    if not delta or images < LEAST_IMAGES:
        return 1.0
    # With t = sqrt(df) tan(angle), the density is proportional to cos(angle) ** (df - 1).
    freedom = images - 1
    tail = np.linspace(np.arctan2(abs(delta), deviation * np.sqrt(images)), np.pi / 2, 1001)
    density, whole = (np.cos(angles) ** (freedom - 1) for angles in (tail, np.linspace(0, np.pi / 2, 1001)))
    return float(np.trapezoid(density, tail) / np.trapezoid(whole, dx=np.pi / 2000))


def _holm(changes: dict[str, Change], p_values: dict[str, float]) -> dict[str, Change]:
    kept, rest = {}, sum(change.verdict != TOO_FEW for change in changes.values())
    for name in sorted(p_values, key=p_values.__getitem__):
        if p_values[name] * rest > _SIGNIFICANCE:
            break
        kept[name], rest = changes[name], rest - 1
    return {
        name: change if name in kept or change.verdict == TOO_FEW else replace(change, verdict=NOT_SURE)
        for name, change in changes.items()
    }


def _precision(matches: Matches, place: int, weights: np.ndarray) -> np.ndarray:
    rows = matches.of_class(place)
    step = max(_CELLS // max(rows.stop - rows.start, 1), 1)
    parts = [
        _precision_part(matches, rows, matches.objects(place), weights[:, begin : begin + step])
        for begin in range(0, weights.shape[1], step)
    ]
    return np.concatenate(parts, axis=1)


def _precision_part(matches: Matches, rows: slice, objects: np.ndarray, weights: np.ndarray) -> np.ndarray:
    counts = weights[objects].sum(axis=0, dtype=np.int64)
    precision = np.zeros((len(matches.thresholds), weights.shape[1]))
    drawn = weights[matches.images[rows]]
    # Only rows that are right at some threshold matter one by one; rows between them are summed up.
    hits = np.flatnonzero(matches.right[rows].any(axis=1))
    if len(hits):
        between = np.add.reduceat(drawn[: hits[-1] + 1], np.r_[0, hits[:-1] + 1], axis=0, dtype=np.int32)
        seen, hit_weights = np.cumsum(between, axis=0), drawn[hits]
        table, starts = _recalls(counts)
        for threshold in range(len(matches.thresholds)):
            right_hits = np.flatnonzero(matches.right[rows][hits, threshold])
            counted = seen[right_hits]
            ignored = np.flatnonzero(matches.ignored[rows, threshold])
            if len(ignored):
                before = np.cumsum(drawn[ignored], axis=0, dtype=np.int32)
                before = np.concatenate([np.zeros_like(before[:1]), before])
                counted = counted - before[np.searchsorted(ignored, hits[right_hits])]
            if len(right_hits):
                right = np.cumsum(hit_weights[right_hits], axis=0, dtype=np.int32)
                precision[threshold] = _area(right, counted, table[right + starts])
    return np.where(counts > 0, [precision.mean(axis=0), precision[0]], np.nan)


def _recalls(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of RECALLS reached by 0 to `counts` hits, sample after sample, and their starts."""
    sizes = counts + 1
    starts = np.cumsum(sizes) - sizes
    hits = np.arange(sizes.sum()) - np.repeat(starts, sizes)
    recall = hits / np.repeat(np.maximum(counts, 1), sizes)
    return np.searchsorted(RECALLS, recall, side="right").astype(np.int32), starts


def _area(right: np.ndarray, counted: np.ndarray, reached: np.ndarray) -> np.ndarray:
    # The smallest number keeps pycocotools' 0/0 at 0, and its last bit the same.
    precision = right / (counted + np.spacing(1))
    envelope = np.maximum.accumulate(precision[::-1], axis=0)[::-1]
    steps = np.diff(reached, axis=0, prepend=0)
    return np.einsum("mb,mb->b", envelope, steps) / len(RECALLS)
