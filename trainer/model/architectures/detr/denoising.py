"""Denoising queries of a training batch (Zhang et al. 2022, arXiv:2203.03605): targets with noise.

The layout is the authors': groups of a positive and a negative query for each box of the fullest image.
The noise is a hash of seed, step and image, so it does not depend on other images, processes or state.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.data.batch import PADDING
from trainer.model.boxes import to_centre, to_corners
from trainer.model.global_batch import uniform

_NUMBERS = 10
"""Random numbers of a query: whether to redraw its label, the new label, sign and size for four sides."""
_EPSILON = 1e-5


class Pairs(NamedTuple):
    """P pairs of a query and a target in each of S sets of predictions, or in all (S is 1).

    NumPy arrays, or tensors on a device.
    """

    image: Any  # int64 [P]
    query: Any  # int64 [S, P]
    target: Any  # int64 [S, P]


class Denoising(NamedTuple):
    """Q denoising queries of each image, which come before the other queries."""

    labels: Tensor  # int64 [B, Q]; the number of classes where a query is padding
    references: Tensor  # [B, Q, 4] centre and size relative to the image, as logits
    pairs: Pairs  # the positive queries and their targets, on the host
    groups: int  # how often each target occurs among the positive queries

    def visible(self, queries: int) -> Tensor:
        """Attention mask, bool [Q + queries, Q + queries]: groups see themselves and the other `queries`.

        The others see no denoising query.
        """
        own = self.labels.shape[1]
        group = torch.arange(own, device=self.labels.device) // (own // self.groups)
        whole = torch.ones(own + queries, own + queries, dtype=torch.bool, device=group.device)
        whole[own:, :own] = False
        whole[:own, :own] = group[:, None] == group[None]
        return whole


def denoising(
    boxes: Tensor, labels: Tensor, counts: list[int], keys: Tensor, classes: int, most: int,
    *, queries: int, label_noise: float, box_noise: float, unfold: bool,
) -> Denoising:  # fmt: skip
    """Make the denoising queries of a batch; for `counts`, `keys` and `most` see `global_batch.Part`.

    `boxes` [B, M, 4] have centre and size relative to the image, `labels` [B, M] are PADDING behind the
    targets. `queries` is the approximate number of pairs; an image with more targets has more. Half of a
    share `label_noise` of the labels is redrawn. `box_noise` is the largest move of a side of a positive
    query, relative to half of the box. With `unfold` sides that passed each other give the box between them
    (D-FINE), otherwise one without a size (RT-DETRv2).
    """
    # Without a box in the step: one pair of queries, as in RT-DETRv2's code.
    groups = max(1, queries // most) if most else 1
    most = max(1, most)
    batch, device = len(labels), labels.device
    padded_boxes = boxes.new_zeros(batch, most, 4)
    padded_labels = labels.new_full((batch, most), PADDING)
    rows = min(most, labels.shape[1])
    padded_boxes[:, :rows], padded_labels[:, :rows] = boxes[:, :rows], labels[:, :rows]
    boxes, labels = padded_boxes.repeat(1, 2 * groups, 1), padded_labels.repeat(1, 2 * groups)
    total = labels.shape[1]
    noise = uniform(keys, total * _NUMBERS).view(batch, total, _NUMBERS).to(boxes.dtype)
    real = labels != PADDING
    labels = torch.where(real, labels, classes)
    redrawn = (noise[..., 0] < label_noise / 2) & real
    labels = torch.where(redrawn, (noise[..., 1] * classes).long().clamp(max=classes - 1), labels)
    negative = (torch.arange(total, device=device) // most % 2)[:, None]
    sign = torch.where(noise[..., 2:6] < 0.5, -1.0, 1.0)
    moves = sign * (noise[..., 6:10] + negative) * box_noise
    half = boxes[..., 2:].repeat(1, 1, 2) / 2
    noisy = to_centre((to_corners(boxes) + moves * half).clamp(0, 1))
    noisy = noisy.abs() if unfold else noisy
    references = torch.log(noisy.clamp(min=_EPSILON) / (1 - noisy).clamp(min=_EPSILON))
    image, group, target = np.nonzero(
        np.broadcast_to(np.arange(most) < np.array(counts)[:, None, None], (batch, groups, most))
    )
    pairs = Pairs(image, (2 * most * group + target)[None], target[None])
    return Denoising(labels, references, pairs, groups)
