"""Matches predictions with objects by COCO's rules (pycocotools, cocoeval.py, evaluateImg).

Within an image and class, predictions are processed by descending score. Each takes the unmatched object that
it overlaps most, if the overlap reaches the threshold; an unmatched prediction in a crowd is ignored. All
images and classes are processed together: first the best prediction of each, then the second best, and so on.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from trainer.evaluation.truth_and_predictions import Predictions, Truth

MAX_DETECTIONS = 100  # predictions of one class in an image that count, as in COCO


@dataclass(frozen=True)
class BoxMatches:
    """Matches of N predictions, which are sorted by class and descending score."""

    thresholds: np.ndarray  # [T] IoU thresholds
    starts: np.ndarray  # [K + 1] first row of each class, in the order of category ids
    rows: np.ndarray  # [N] row of each prediction in the original predictions
    partners: np.ndarray  # [N] row of the matched object at the first threshold, or -1
    images: np.ndarray  # [N] index of the image, if images are sorted by id
    scores: np.ndarray
    correct: np.ndarray  # [N, T] bool: matches an object
    ignored: np.ndarray  # [N, T] bool: is in a crowd and matches no object
    truth_starts: np.ndarray  # [K + 1] first object of each class, without crowds
    truth_images: np.ndarray  # [G] index of the image of each object
    image_count: int

    def class_rows(self, index: int) -> slice:
        return slice(int(self.starts[index]), int(self.starts[index + 1]))

    def image_of_each_object(self, index: int) -> np.ndarray:
        """Return the image index of each object of a class."""
        return self.truth_images[int(self.truth_starts[index]) : int(self.truth_starts[index + 1])]


def match_boxes(truth: Truth, predictions: Predictions, thresholds: np.ndarray) -> BoxMatches:
    """Match predictions with objects of the same class and image."""
    detections, objects = _BoxGroups(truth, predictions), _BoxGroups(truth, truth)
    # Sort by class, image and score; ties keep their order, as in a stable sort of each image.
    order = np.lexsort((-predictions.scores, detections.groups))
    sorted_groups = detections.groups[order]
    rank = np.arange(len(order)) - np.searchsorted(sorted_groups, sorted_groups)
    order, rank = order[rank < MAX_DETECTIONS], rank[rank < MAX_DETECTIONS]
    truth_order = np.argsort(objects.groups, kind="stable")
    correct, ignored, partners = _match_by_rank(
        detections.groups[order],
        rank,
        predictions.boxes[order],
        objects.groups[truth_order],
        truth.boxes[truth_order],
        truth.crowd[truth_order],
        thresholds,
    )
    # Sort by class and score; ties by image and rank, as pycocotools concatenates them.
    final = np.lexsort((-predictions.scores[order], detections.labels[order]))
    kept = truth_order[~truth.crowd[truth_order]]
    classes = np.arange(len(truth.categories) + 1)
    return BoxMatches(
        thresholds=thresholds,
        starts=np.searchsorted(detections.labels[order][final], classes),
        rows=order[final],
        partners=np.where(partners < 0, -1, truth_order[partners])[final],
        images=detections.images[order][final],
        scores=predictions.scores[order][final],
        correct=correct[final],
        ignored=ignored[final],
        truth_starts=np.searchsorted(objects.labels[kept], classes),
        truth_images=objects.images[kept],
        image_count=len(truth.images),
    )


def candidate_pairs(
    truth: Truth, predictions: Predictions, objects: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all pairs of a prediction and one of `objects` (rows of the truth) of the same image and class.

    Returns:
        Rows of predictions [P], rows of the truth [P], overlaps [P]: IoU, or the share inside a crowd.
    """
    detections = _BoxGroups(truth, predictions)
    groups = _BoxGroups(truth, truth).groups[objects]
    order = np.argsort(groups, kind="stable")
    low = np.searchsorted(groups[order], detections.groups, "left")
    sizes = np.searchsorted(groups[order], detections.groups, "right") - low
    rows = np.repeat(np.arange(len(predictions)), sizes)
    starts = np.cumsum(sizes) - sizes
    others = objects[order[np.repeat(low - starts, sizes) + np.arange(sizes.sum())]]
    return rows, others, _iou(predictions.boxes[rows], truth.boxes[others], truth.crowd[others])


class _BoxGroups:
    def __init__(self, truth: Truth, items: Truth | Predictions) -> None:
        self.images = np.searchsorted(truth.all_image_ids, items.image_ids)
        self.labels = np.searchsorted(truth.category_ids, items.labels)
        self.groups = self.labels * len(truth.images) + self.images


def _match_by_rank(
    groups: np.ndarray,
    rank: np.ndarray,
    boxes: np.ndarray,
    truth_groups: np.ndarray,
    truth_boxes: np.ndarray,
    crowd: np.ndarray,
    thresholds: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    count = len(thresholds)
    partners = np.full(len(groups), -1)
    correct = np.zeros((len(groups), count), bool)
    ignored = np.zeros((len(groups), count), bool)
    low = np.searchsorted(truth_groups, groups, "left")
    rivals = np.searchsorted(truth_groups, groups, "right") - low
    # Pairs of prediction and object; most predictions of a class have no object in their image.
    with_rivals = np.flatnonzero(rivals)
    by_rank = with_rivals[np.argsort(rank[with_rivals], kind="stable")]
    ends = np.searchsorted(rank[by_rank], np.arange(rank.max(initial=-1) + 2))
    taken = np.zeros((len(truth_groups), count), bool)
    bounds = np.minimum(thresholds, 1 - 1e-10)
    for begin, end in pairwise(ends):
        if begin == end:
            continue
        rows = by_rank[begin:end]
        sizes = rivals[rows]
        starts = np.r_[0, np.cumsum(sizes)[:-1]]
        objects = np.repeat(low[rows] - starts, sizes) + np.arange(sizes.sum())
        overlap = _iou(np.repeat(boxes[rows], sizes, axis=0), truth_boxes[objects], crowd[objects])
        near = overlap[:, None] >= bounds
        free = near & ~taken[objects] & ~crowd[objects, None]
        candidates = np.where(free, overlap[:, None], -1.0)
        best = np.maximum.reduceat(candidates, starts, axis=0)
        is_best = (candidates == np.repeat(best, sizes, axis=0)) & free
        # Among equally good objects, take the last one.
        chosen = np.maximum.reduceat(np.where(is_best, np.arange(len(overlap))[:, None], -1), starts, axis=0)
        hit = chosen >= 0
        column = np.nonzero(hit)[1]
        taken[objects[chosen[hit]], column] = True
        correct[rows] = hit
        partners[rows] = np.where(hit[:, 0], objects[chosen[:, 0]], -1)
        in_crowd = np.logical_or.reduceat(near & crowd[objects, None], starts, axis=0)
        ignored[rows] = ~hit & in_crowd
    return correct, ignored, partners


def _iou(boxes: np.ndarray, truth: np.ndarray, crowd: np.ndarray) -> np.ndarray:
    near = np.maximum(boxes[:, :2], truth[:, :2])
    far = np.minimum(boxes[:, :2] + boxes[:, 2:], truth[:, :2] + truth[:, 2:])
    sides = far - near
    common = np.where((sides > 0).all(axis=1), sides[:, 0] * sides[:, 1], 0.0)
    area = boxes[:, 2] * boxes[:, 3]
    union = np.where(crowd, area, area + truth[:, 2] * truth[:, 3] - common)
    return np.asarray(np.divide(common, union, out=np.zeros_like(common), where=common > 0))
