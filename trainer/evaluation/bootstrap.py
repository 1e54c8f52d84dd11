"""Compares two models by a paired bootstrap over images, which gives confidence intervals.

Efron and Tibshirani, An Introduction to the Bootstrap, 1993; Holm, Scandinavian Journal of Statistics 6,
1979. docs/evaluation.md explains intervals and verdicts. Arrays have one column per bootstrap sample (B).
"""

from dataclasses import replace

import numpy as np

from trainer.evaluation.box_matching import BoxMatches
from trainer.evaluation.coco import RECALLS
from trainer.evaluation.metrics import BETTER, MIN_IMAGES, NOT_SURE, TOO_FEW, WORSE, Change

_SIGNIFICANCE = 0.05
_MAX_CELLS = 20_000_000  # limits the samples that are processed at once: samples x predictions of a class


def compare(
    base: BoxMatches, new: BoxMatches, class_names: list[str], *, samples: int = 200
) -> dict[str, Change]:
    """Compare the matches of two models with the same ground truth.

    Returns:
        The change of coco/AP, coco/AP50 (AP at the first threshold) and AP[class] of each class with objects;
        empty if no class has objects.
    """
    random = np.random.default_rng(0)
    # The first column is the original dataset: every image counts once.
    weights = np.ones((base.image_count, samples + 1), np.uint8)
    for sample in range(1, samples + 1):
        chosen = random.integers(0, base.image_count, base.image_count)
        weights[:, sample] = np.minimum(np.bincount(chosen, minlength=base.image_count), 255)
    per_class, p_values, drawn = {}, {}, []
    for place, name in enumerate(class_names):
        if not len(objects := base.image_of_each_object(place)):
            continue
        pair = [_resample(matches, place, weights) for matches in (base, new)]
        key = f"AP[{name}]"
        per_class[key], p_values[key] = _estimate_change(pair[0][0], pair[1][0], len(np.unique(objects)))
        drawn.append(pair)
    if not drawn:
        return {}
    # [classes, models, mean and first threshold, B]; a sample's mean excludes classes without objects in it.
    precisions = np.array(drawn)
    with np.errstate(invalid="ignore"):
        base_means, new_means = np.nansum(precisions, axis=0) / np.isfinite(precisions).sum(axis=0)
    count = len(np.unique(base.truth_images))
    overall, at_half = (_estimate_change(*pair, count)[0] for pair in zip(base_means, new_means, strict=True))
    # Holm's correction: verdicts hold with 95 % confidence for all classes together.
    rest = sum(change.verdict != TOO_FEW for change in per_class.values())
    is_sure = True
    for key in sorted(p_values, key=p_values.__getitem__):
        is_sure = is_sure and p_values[key] * rest <= _SIGNIFICANCE
        rest -= 1
        if not is_sure and per_class[key].verdict != TOO_FEW:
            per_class[key] = replace(per_class[key], verdict=NOT_SURE)
    return {"coco/AP": overall, "coco/AP50": at_half, **per_class}


def _estimate_change(base: np.ndarray, new: np.ndarray, image_count: int) -> tuple[Change, float]:
    """Return the change with its interval, and the p-value of Student's t-test."""
    spread = (new - base)[1:]
    spread = spread[np.isfinite(spread)]
    delta, low, high = float(new[0] - base[0]), np.nan, np.nan
    if len(spread):
        low, high = np.clip(np.percentile(spread, [2.5, 97.5]) - (spread.mean() - delta), -1, 1)
    verdict = BETTER if low > 0 else WORSE if high < 0 else NOT_SURE
    if image_count < MIN_IMAGES:
        verdict = TOO_FEW
    change = Change(float(base[0]), float(new[0]), float(low), float(high), verdict)
    if not delta or not len(spread) or image_count < MIN_IMAGES:
        return change, 1.0
    # With t = sqrt(df) tan(angle), the density is proportional to cos(angle) ** (df - 1).
    start = np.arctan2(abs(delta), float(spread.std()) * np.sqrt(image_count))
    tail, whole = np.linspace(start, np.pi / 2, 1001), np.linspace(0, np.pi / 2, 1001)
    density, total = (np.cos(angles) ** (image_count - 2) for angles in (tail, whole))
    return change, float(np.trapezoid(density, tail) / np.trapezoid(total, dx=np.pi / 2000))


def _resample(matches: BoxMatches, place: int, weights: np.ndarray) -> np.ndarray:
    """Return a class's mean precision over all thresholds and its precision at the first one, [2, B]."""
    rows = matches.class_rows(place)
    step = max(_MAX_CELLS // max(rows.stop - rows.start, 1), 1)
    parts = [
        _resample_chunk(matches, rows, matches.image_of_each_object(place), weights[:, begin : begin + step])
        for begin in range(0, weights.shape[1], step)
    ]
    return np.concatenate(parts, axis=1)


def _resample_chunk(matches: BoxMatches, rows: slice, objects: np.ndarray, weights: np.ndarray) -> np.ndarray:
    counts = weights[objects].sum(axis=0, dtype=np.int64)
    precision = np.zeros((len(matches.thresholds), weights.shape[1]))
    drawn = weights[matches.images[rows]]
    # Keep only rows with a match at some threshold; sum the rows between them.
    hits = np.flatnonzero(matches.correct[rows].any(axis=1))
    if len(hits):
        between = np.add.reduceat(drawn[: hits[-1] + 1], np.r_[0, hits[:-1] + 1], axis=0, dtype=np.int32)
        seen, hit_weights = np.cumsum(between, axis=0), drawn[hits]
        # For each sample: how many RECALLS are reached by 0, 1, ..., `counts` hits.
        starts = np.cumsum(counts + 1) - (counts + 1)
        number = np.arange((counts + 1).sum()) - np.repeat(starts, counts + 1)
        recall = number / np.repeat(np.maximum(counts, 1), counts + 1)
        table = np.searchsorted(RECALLS, recall, side="right").astype(np.int32)
        for threshold in range(len(matches.thresholds)):
            correct_hits = np.flatnonzero(matches.correct[rows][hits, threshold])
            if not len(correct_hits):
                continue
            counted = seen[correct_hits]
            ignored = np.flatnonzero(matches.ignored[rows, threshold])
            if len(ignored):
                before = np.cumsum(drawn[ignored], axis=0, dtype=np.int32)
                before = np.concatenate([np.zeros_like(before[:1]), before])
                counted = counted - before[np.searchsorted(ignored, hits[correct_hits])]
            correct = np.cumsum(hit_weights[correct_hits], axis=0, dtype=np.int32)
            # The smallest float avoids 0/0, exactly as in pycocotools.
            envelope = np.maximum.accumulate((correct / (counted + np.spacing(1)))[::-1], axis=0)[::-1]
            steps = np.diff(table[correct + starts], axis=0, prepend=0)
            precision[threshold] = np.einsum("mb,mb->b", envelope, steps) / len(RECALLS)
    return np.where(counts > 0, [precision.mean(axis=0), precision[0]], np.nan)
