"""Bipartite matching of queries and targets (Carion et al. 2020, arXiv:2005.12872).

The device computes the costs of all sets of predictions at once; scipy assigns on the host.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from trainer.data import batch
from trainer.model.boxes import area

_CLASS_COST, _DISTANCE_COST, _OVERLAP_COST = 2.0, 5.0, 2.0
_ALPHA = 0.25
"""Balance of the focal cost; its exponent is 2."""


class Pairs(NamedTuple):
    """P pairs of a query and a target in each of S sets of predictions, or in all (S is 1).

    NumPy arrays, or tensors on a device.
    """

    image: Any
    """int64 [P]."""
    query: Any
    """int64 [S, P]."""
    target: Any
    """int64 [S, P]."""


@torch.no_grad()
def costs(logits: Tensor, boxes: Tensor, targets: Tensor, labels: Tensor) -> Tensor:
    """Cost of each pair of query and target, [B, S, Q, M], as D-FINE's and RT-DETRv2's `HungarianMatcher`.

    Predictions are `logits` [B, S, Q, C] and `boxes` [B, S, Q, 4]; `targets` [B, M, 4] have `labels` [B, M].
    """
    index = labels.clamp(min=0)[:, None, None].expand(*logits.shape[:3], -1)
    chance = logits.sigmoid().gather(3, index)
    negative = (1 - _ALPHA) * chance**2 * -(1 - chance + 1e-8).log()
    positive = _ALPHA * (1 - chance) ** 2 * -(chance + 1e-8).log()
    distance = (boxes[:, :, :, None] - targets[:, None, None]).abs().sum(-1)
    _, overlap = overlaps(boxes[:, :, :, None], targets[:, None, None])
    total = _CLASS_COST * (positive - negative) + _DISTANCE_COST * distance - _OVERLAP_COST * overlap
    # Values that are not finite match last; the loss reports them.
    worst = torch.finfo(total.dtype).max
    return torch.nan_to_num(total, nan=worst, posinf=worst, neginf=worst)


def assign(values: Tensor, counts: Sequence[int]) -> Pairs:
    """Assign queries to targets at the least cost, in each set of predictions.

    `values` are the costs [B, S, Q, M] on the host, with padding behind the `counts` of targets.
    """
    found = [
        np.array([linear_sum_assignment(one[:, :count]) for one in image])
        for image, count in zip(values.double().numpy(), counts, strict=True)
    ]
    query, target = np.concatenate(found, axis=2).swapaxes(0, 1)
    return Pairs(np.repeat(np.arange(len(found)), [each.shape[2] for each in found]), query, target)


def union(pairs: Pairs) -> Pairs:
    """Each query that any set matches, with its most frequent target; of equally frequent ones the first.

    D-FINE's authors do not define the order of equally frequent targets.
    """
    image = np.broadcast_to(pairs.image, pairs.query.shape)
    each = np.stack([part.ravel() for part in (image, pairs.query, pairs.target)])
    found, times = np.unique(each, axis=1, return_counts=True)
    found = found[:, np.lexsort((found[2], -times, found[1], found[0]))]
    first = np.ones(found.shape[1], dtype=bool)
    first[1:] = (found[:2, 1:] != found[:2, :-1]).any(axis=0)
    return Pairs(found[0, first], found[None, 1, first], found[None, 2, first])


def to_device(groups: Sequence[Pairs | None], device: torch.device) -> list[Any]:
    """Copy pairs to a device at once."""
    arrays = [part for pairs in groups if pairs for part in pairs]
    joined = batch.to_device(torch.from_numpy(np.concatenate([part.ravel() for part in arrays])), device)
    sent = joined.split([part.size for part in arrays])
    shaped = iter([part.view(array.shape) for part, array in zip(sent, arrays, strict=True)])
    return [Pairs(*itertools.islice(shaped, 3)) if pairs else None for pairs in groups]


def corners(boxes: Tensor) -> Tensor:
    """x1 y1 x2 y2 of boxes [..., 4] given by centre and size; a negative size counts as 0."""
    half = boxes[..., 2:].clamp(min=0) / 2
    return torch.cat([boxes[..., :2] - half, boxes[..., :2] + half], dim=-1)


def overlaps(boxes: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """IoU and GIoU (arXiv:1902.09630) of pairs of boxes given by centre and size: [..., 4] -> [...]."""
    first, second = corners(boxes), corners(others)
    low, high = torch.maximum(first[..., :2], second[..., :2]), torch.minimum(first[..., 2:], second[..., 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    joined = area(first) + area(second) - shared
    outer = torch.maximum(first[..., 2:], second[..., 2:]) - torch.minimum(first[..., :2], second[..., :2])
    hull = outer.prod(-1)
    overlap = shared / joined
    return overlap, overlap - (hull - joined) / hull
