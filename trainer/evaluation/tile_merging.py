"""Merges the detections of neighbouring tiles, which both see a part of the image.

In the region that two tiles share, the same object looks the same to both. So two detections of a class are
of one object if the parts of their boxes in that region overlap by at least half (IoU): whole objects, and
objects that the border of one tile, or of both, cuts. The box is that of a detection that no border cuts;
if there is none, it is extended over all of them. The score is the highest. Detections of one tile are
never merged with each other.
"""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import torch
from torchvision.ops import box_iou

from trainer.evaluation.truth_and_predictions import Predictions

_OVERLAP = 0.5
_CUT = 0.01  # a side this near to a border of the tile is cut by it; relative to the tile


def merge_tiles(
    predictions: Predictions, windows: np.ndarray, sizes: Mapping[int, np.ndarray]
) -> Predictions:
    """Return predictions with one detection of each object.

    `windows` [N, 4] are left, top, width and height of the tile that each comes from, in pixels of the image;
    `sizes` are width and height of each image by id. The order of what is left is kept.
    """
    boxes = np.concatenate([predictions.boxes[:, :2], predictions.boxes[:, :2] + predictions.boxes[:, 2:]], 1)
    tiles = np.concatenate([windows[:, :2], windows[:, :2] + windows[:, 2:]], axis=1).astype(np.float64)
    scores, kept = predictions.scores.copy(), np.ones(len(boxes), bool)
    order = np.argsort(predictions.image_ids, kind="stable")
    ends = np.flatnonzero(np.diff(predictions.image_ids[order])) + 1
    for rows in np.split(order, ends) if len(order) else ():
        size = sizes[int(predictions.image_ids[rows[0]])]
        cut = _is_cut(boxes[rows], tiles[rows], size)
        own_boxes, own_scores = boxes[rows], scores[rows]
        kept[rows] = _merge(own_boxes, own_scores, predictions.labels[rows], tiles[rows], cut)
        boxes[rows], scores[rows] = own_boxes, own_scores
    boxes[:, 2:] -= boxes[:, :2]
    return Predictions(predictions.image_ids, predictions.labels, boxes, scores).take(kept)


def _is_cut(boxes: np.ndarray, tiles: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Whether each box [N, 4] ends at a border of its tile that is not a border of the image."""
    near = _CUT * (tiles[:, 2:] - tiles[:, :2])
    low = (boxes[:, :2] <= tiles[:, :2] + near) & (tiles[:, :2] > 0)
    high = (boxes[:, 2:] >= tiles[:, 2:] - near) & (tiles[:, 2:] < size)
    return np.asarray((low | high).any(axis=1))


def _merge(
    boxes: np.ndarray, scores: np.ndarray, labels: np.ndarray, tiles: np.ndarray, cut: np.ndarray
) -> np.ndarray:
    """Merge the detections of one image in place; returns which ones are left, bool [N]."""
    names, tile = np.unique(tiles, axis=0, return_inverse=True)
    pairs = _pairs(boxes, labels, names, tile.reshape(-1))
    kept = np.ones(len(boxes), bool)
    leader: dict[int, int] = {}
    tiles_of: dict[int, set[int]] = {}
    # Whole objects first, then by score; only those that have a partner.
    for row in sorted(pairs, key=lambda row: (cut[row], -scores[row], row)):
        number = int(tile[row])
        leaders = (leader[other] for _, other in sorted(pairs[row], reverse=True) if other in leader)
        first = next((one for one in leaders if number not in tiles_of[one]), row)
        leader[row] = first
        tiles_of.setdefault(first, set()).add(number)
        if first != row:
            kept[row] = False
            scores[first] = max(scores[first], scores[row])
            if cut[first]:
                boxes[first, :2] = np.minimum(boxes[first, :2], boxes[row, :2])
                boxes[first, 2:] = np.maximum(boxes[first, 2:], boxes[row, 2:])
    return kept


def _pairs(
    boxes: np.ndarray, labels: np.ndarray, tiles: np.ndarray, tile: np.ndarray
) -> dict[int, list[tuple[float, int]]]:
    """The overlap and row of each partner of a row, in the regions that two tiles share."""
    pairs: dict[int, list[tuple[float, int]]] = defaultdict(list)
    rows_of = [np.flatnonzero(tile == number) for number in range(len(tiles))]
    for one, rows in enumerate(rows_of):
        for other in range(one + 1, len(tiles)):
            low = np.maximum(tiles[one, :2], tiles[other, :2])
            high = np.minimum(tiles[one, 2:], tiles[other, 2:])
            if not (high > low).all():
                continue
            region = np.concatenate([low, high])
            first, second = (_inside(boxes, part, region) for part in (rows, rows_of[other]))
            parts = (torch.from_numpy(_clipped(boxes[part], region)) for part in (first, second))
            overlap = box_iou(*parts).numpy()
            same = labels[first][:, None] == labels[second]
            for i, j in np.argwhere((overlap >= _OVERLAP) & same).tolist():
                pairs[int(first[i])].append((float(overlap[i, j]), int(second[j])))
                pairs[int(second[j])].append((float(overlap[i, j]), int(first[i])))
    return pairs


def _clipped(boxes: np.ndarray, region: np.ndarray) -> np.ndarray:
    return np.clip(boxes, np.tile(region[:2], 2), np.tile(region[2:], 2))


def _inside(boxes: np.ndarray, rows: np.ndarray, region: np.ndarray) -> np.ndarray:
    clipped = _clipped(boxes[rows], region)
    return rows[((clipped[:, 2:] - clipped[:, :2]) > 0).all(axis=1)]
