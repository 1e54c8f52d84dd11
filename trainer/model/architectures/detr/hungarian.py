"""Which query learns which target: the cheapest assignment (Carion et al. 2020, arXiv:2005.12872).

Costs of all layers and images are computed on the device at once and copied once; the assignment itself
is the processor's (scipy), while the device goes on with what needs none.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from trainer.data.batch import PADDING

Assigned = list[tuple[Tensor, Tensor]]
"""Of each image the queries and their targets, int64 on the device."""


class Weights(NamedTuple):
    """How the parts of the costs are weighed."""

    labels: float
    distance: float
    overlap: float
    alpha: float
    """Balance of the focal cost."""
    gamma: float
    """Its exponent."""


@torch.no_grad()
def costs(logits: Tensor, boxes: Tensor, targets: Tensor, labels: Tensor, weights: Weights) -> Tensor:
    """Cost of giving each query each target, [L, B, Q, M].

    Args:
        logits: [L, B, Q, C] of L sets of predictions.
        boxes: [L, B, Q, 4] centre and size, relative to the image.
        targets: [B, M, 4] the same of the targets.
        labels: int64 [B, M] of the targets, PADDING where a row is padding.
        weights: of the parts.
    """
    index = labels.clamp(min=0)[None, :, None].expand(*logits.shape[:3], -1)
    chance = logits.sigmoid().gather(3, index)
    negative = (1 - weights.alpha) * chance**weights.gamma * -(1 - chance + 1e-8).log()
    positive = weights.alpha * (1 - chance) ** weights.gamma * -(chance + 1e-8).log()
    distance = (boxes[:, :, :, None] - targets[None, :, None]).abs().sum(-1)
    overlap = generalized_overlap(corners(boxes)[:, :, :, None], corners(targets)[None, :, None])
    total = weights.labels * (positive - negative) + weights.distance * distance - weights.overlap * overlap
    # What is not finite is taken last; the loss will say what is wrong.
    worst = torch.finfo(total.dtype).max
    return torch.nan_to_num(total, nan=worst, posinf=worst, neginf=worst)


def start(values: Tensor) -> Callable[[], Tensor]:
    """Start to copy costs to the host; the function waits for them and returns them."""
    if values.device.type != "cuda":
        return lambda: values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> Tensor:
        copied.synchronize()
        return host

    return wait


def assign(values: Tensor, counts: Sequence[int], device: torch.device) -> list[Assigned]:
    """Assign queries to targets, for each set of predictions.

    Args:
        values: [L, B, Q, M] costs, on the host.
        counts: targets of each image; columns from there on are padding.
        device: where the indices are needed.
    """
    every = values.double().numpy()
    pairs = [
        [linear_sum_assignment(image[:, :count]) for image, count in zip(layer, counts, strict=True)]
        for layer in every
    ]
    flat = [torch.from_numpy(part) for layer in pairs for pair in layer for part in pair]
    # One copy for all of them.
    sent = torch.cat(flat).to(device, non_blocking=True).split([len(part) for part in flat])
    places = iter(sent)
    return [[(next(places), next(places)) for _ in layer] for layer in pairs]


def corners(boxes: Tensor) -> Tensor:
    """x1 y1 x2 y2 of boxes given by centre and size, [..., 4]."""
    half = boxes[..., 2:] / 2
    return torch.cat([boxes[..., :2] - half, boxes[..., :2] + half], dim=-1)


def generalized_overlap(first: Tensor, second: Tensor) -> Tensor:
    """GIoU (Rezatofighi et al. 2019) of boxes x1 y1 x2 y2, element by element: [..., 4] -> [...]."""
    size = (first[..., 2:] - first[..., :2]).prod(-1) + (second[..., 2:] - second[..., :2]).prod(-1)
    both = torch.minimum(first[..., 2:], second[..., 2:]) - torch.maximum(first[..., :2], second[..., :2])
    shared = both.clamp(min=0).prod(-1)
    union = size - shared
    hull = torch.maximum(first[..., 2:], second[..., 2:]) - torch.minimum(first[..., :2], second[..., :2])
    around = hull.clamp(min=0).prod(-1)
    return shared / union - (around - union) / around


def target_counts(labels: Tensor) -> Tensor:
    """Targets of each image, int64 [B]: labels [B, M] that are no padding."""
    return (labels != PADDING).sum(dim=1)
