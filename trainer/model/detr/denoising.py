"""Denoising queries of a training batch (Zhang et al. 2022, arXiv:2203.03605): targets with noise.

The layout is that of the authors: each group has a positive and a negative query for each box of the image
with the most boxes. The noise is a hash of seed, step and image, so it depends on no other image, process or
state.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from trainer.data.batch import PADDING, to_device
from trainer.model.boxes import to_center, to_corners
from trainer.model.global_batch import draw_uniform

_NUMBERS_PER_QUERY = 10
"""Random numbers per query: whether to redraw its label, the new label, sign and size for four sides."""
_EPSILON = 1e-5


class DenoisingQueries(NamedTuple):
    """D denoising queries of each image, which come before the normal queries.

    D depends only on the number of target rows. Queries that the authors' layout does not use are padding,
    which no other query attends to.
    """

    labels: Tensor  # int64 [B, D]; the number of classes where a query is padding
    references: Tensor  # [B, D, 4] center and size relative to the image, as logits
    targets: Tensor  # int64 [B, 1, D], target row of each positive query; PADDING for other queries
    group: Tensor  # int64 [D], the group of each query
    groups: int  # number of groups: each target has one positive query in each

    def attention_mask(self, queries: int) -> Tensor:
        """Return the attention mask, bool [D + queries, D + queries].

        Each group attends to itself and to the normal queries; normal queries attend to no denoising query.
        """
        own = self.labels.shape[1]
        whole = torch.ones(own + queries, own + queries, dtype=torch.bool, device=self.group.device)
        whole[own:, :own] = False
        whole[:own, :own] = self.group[:, None] == self.group[None]
        return whole


def make_denoising_queries(
    boxes: Tensor,
    labels: Tensor,
    keys: Tensor,
    classes: int,
    max_targets: int,
    *,
    queries: int,
    label_noise: float,
    box_noise: float,
    unfold: bool,
) -> DenoisingQueries:
    """Make the denoising queries of a batch; for `keys` and `max_targets` see `global_batch.BatchContext`.

    `boxes` [B, M, 4] have center and size relative to the image; `labels` [B, M] are PADDING after the
    targets. `queries` is the approximate number of pairs; an image with more targets has more pairs. A
    fraction `label_noise / 2` of all labels is redrawn. `box_noise` is the maximum shift of a side of a
    positive query, relative to half of the box. If noise moves sides past each other, `unfold` swaps them
    (D-FINE); otherwise the box has size 0 (RT-DETRv2).
    """
    # As in RT-DETRv2's code, a step without boxes has one pair of queries.
    groups = max(1, queries // max_targets) if max_targets else 1
    device, rows = labels.device, labels.shape[1]
    total = 2 * max(queries, rows)
    size = to_device(torch.tensor(max(1, max_targets)), device)
    index = torch.arange(total, device=device)
    group, target = index // (2 * size), index % size
    row = target.clamp(max=rows - 1)
    labels = torch.where((group < groups) & (target < rows), labels[:, row], PADDING)
    boxes = boxes[:, row]
    noise = draw_uniform(keys, total * _NUMBERS_PER_QUERY).view(-1, total, _NUMBERS_PER_QUERY).to(boxes.dtype)
    real = labels != PADDING
    negative = index // size % 2
    targets = torch.where(real & (negative == 0), target, PADDING)[:, None]
    labels = torch.where(real, labels, classes)
    redrawn = (noise[..., 0] < label_noise / 2) & real
    labels = torch.where(redrawn, (noise[..., 1] * classes).long().clamp(max=classes - 1), labels)
    sign = torch.where(noise[..., 2:6] < 0.5, -1.0, 1.0)
    moves = sign * (noise[..., 6:10] + negative[:, None]) * box_noise
    half = boxes[..., 2:].repeat(1, 1, 2) / 2
    noisy = to_center((to_corners(boxes) + moves * half).clamp(0, 1))
    noisy = noisy.abs() if unfold else noisy
    references = torch.log(noisy.clamp(min=_EPSILON) / (1 - noisy).clamp(min=_EPSILON))
    return DenoisingQueries(labels, references, targets, group, groups)
