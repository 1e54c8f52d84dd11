"""Average precision of the Open Images Challenge, at IoU 0.5.

Its protocol (https://storage.googleapis.com/openimages/web/evaluation.html) differs from COCO's: a prediction
can match only the object that it overlaps most; all predictions with at least half of their area in a group
count as one prediction; objects also count for the ancestors of their class; predictions of classes that were
not verified in the image are ignored; the area under the curve is exact, as in VOC 2010.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trainer.evaluation.box_matching import candidate_pairs
from trainer.evaluation.truth_and_predictions import Predictions, Truth

IOU = 0.5  # minimum overlap of a match; for a group, minimum share of the prediction's area inside it


def evaluate(
    truth: Truth,
    predictions: Predictions,
    *,
    verified: np.ndarray | None = None,
    ancestors: Mapping[int, Sequence[int]] | None = None,
    group_weight: float = 1.0,
) -> tuple[float, dict[str, float]]:
    """Return the mean AP at IoU 0.5 over the classes with objects, and AP by class; -1 without objects.

    Args:
        truth: checked ground truth; crowds are the groups.
        predictions: checked predictions, one row for each class for which they count.
        verified: [V, 2] image id and label of each image-level label; None counts all predictions.
        ancestors: ids of the classes above each class.
        group_weight: weight of a group relative to an object, above 0; 1 in the Challenge.
    """
    known, parts = set(truth.category_ids.tolist()), [np.zeros((0, 2), np.int64)]
    for label, above in (ancestors or {}).items():
        rows = np.flatnonzero(truth.labels == label)
        parts += [np.stack([rows, np.full(len(rows), parent)], axis=1) for parent in above if parent in known]
    copies = np.concatenate(parts)
    # Keep the order of the objects: among equal overlaps, the first one counts.
    copies = copies[np.argsort(copies[:, 0], kind="stable")]
    every = np.concatenate([np.arange(len(truth.labels)), copies[:, 0]])
    truth = replace(truth.take(every), labels=np.concatenate([truth.labels, copies[:, 1]]))
    if verified is not None:
        pairs = np.concatenate([verified, np.stack([truth.image_ids, truth.labels], axis=1)])
        top = int(max(pairs[:, 1].max(initial=0), predictions.labels.max(initial=0))) + 1
        verifiable = pairs[:, 0] * top + pairs[:, 1]
        predictions = predictions.take(np.isin(predictions.image_ids * top + predictions.labels, verifiable))
    order = np.argsort(-predictions.scores, kind="stable")
    best, overlap = _match_best_objects(truth, predictions, ~truth.crowd)
    near = order[overlap[order] >= IOU]
    correct = np.zeros(len(predictions), bool)
    # Among predictions with the same best object, the one with the highest score matches.
    correct[near[np.unique(best[near], return_index=True)[1]]] = True
    group, share = _match_best_objects(truth, predictions, truth.crowd)
    return _average_precision(
        truth, predictions, correct, np.where(~correct & (share >= IOU), group, -1), group_weight
    )


def _match_best_objects(
    truth: Truth, predictions: Predictions, mask: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    objects = np.flatnonzero(mask)
    prediction_rows, truth_rows, overlap = candidate_pairs(truth, predictions, objects)
    best, largest = np.full(len(predictions), -1), np.full(len(predictions), -1.0)
    # The last write wins, so the largest overlap comes last; among equals, the first object does.
    order = np.lexsort((-truth_rows, overlap))
    best[prediction_rows[order]], largest[prediction_rows[order]] = truth_rows[order], overlap[order]
    return best, largest


def _average_precision(
    truth: Truth, predictions: Predictions, correct: np.ndarray, group: np.ndarray, weight: float
) -> tuple[float, dict[str, float]]:
    rows, starts = _group_by_label(predictions.labels, truth.category_ids)
    objects, object_starts = _group_by_label(truth.labels, truth.category_ids)
    per_class = {}
    for place, category in enumerate(truth.categories):
        groups_here = truth.crowd[objects[object_starts[place] : object_starts[place + 1]]]
        mine = rows[starts[place] : starts[place + 1]]
        if not len(groups_here):
            per_class[category["name"]] = -1.0
            continue
        single, grouped = mine[group[mine] < 0], mine[group[mine] >= 0]
        # Only the best prediction in a group counts.
        groups, of_group = np.unique(group[grouped], return_inverse=True)
        scores = np.full(len(groups), -np.inf)
        np.maximum.at(scores, of_group, predictions.scores[grouped])
        scores = np.concatenate([predictions.scores[single], scores])
        gained = np.concatenate([correct[single].astype(float), np.full(len(groups), weight)])
        gained = gained[np.argsort(-scores, kind="stable")]
        hits = np.cumsum(gained)
        precision = hits / (hits + np.cumsum(gained == 0))
        envelope = np.maximum.accumulate(precision[::-1])[::-1]
        total = float(np.where(groups_here, weight, 1.0).sum())
        per_class[category["name"]] = float((envelope * gained).sum() / total)
    defined = [value for value in per_class.values() if value >= 0]
    return float(np.mean(defined)) if defined else -1.0, per_class


def _group_by_label(labels: np.ndarray, category_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows = np.argsort(labels, kind="stable")
    return rows, np.searchsorted(labels[rows], np.append(category_ids, category_ids[-1] + 1))


def read_image_labels(dataset: Mapping[str, Any]) -> tuple[np.ndarray | None, dict[int, list[int]]]:
    """Return `verified` and `ancestors` for `evaluate` from ground truth in COCO's format.

    Images may have "verified", the ids of verified classes; "hierarchy" maps a class id to its ancestors.
    """
    pairs = [(image["id"], label) for image in dataset["images"] for label in image.get("verified", ())]
    has_labels = any("verified" in image for image in dataset["images"])
    above = {int(label): list(others) for label, others in dataset.get("hierarchy", {}).items()}
    return (np.array(pairs, np.int64).reshape(-1, 2) if has_labels else None), above
