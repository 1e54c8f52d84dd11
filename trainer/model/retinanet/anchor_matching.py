"""Matching of anchors to targets, equal to torchvision's, for targets padded to one length."""

import torch
from torch import Tensor

from trainer.data.batch import PADDING
from trainer.model.boxes import pairwise_iou
from trainer.model.fused_functions import fused_exactly
from trainer.model.retinanet.focal import BACKGROUND, IGNORED

_FOREGROUND, _BACKGROUND = 0.5, 0.4
_OVERLAPS_AT_ONCE = 32 * 1024 * 1024
"""Pairs of target and anchor whose overlaps are in memory at the same time."""


def match(boxes: Tensor, labels: Tensor, anchors: Tensor) -> Tensor:
    """Assign to every anchor a target, BACKGROUND or IGNORED, as torchvision's `Matcher` does.

    An anchor takes the target it overlaps most if that IoU is at least 0.5; below 0.4 it takes none. The
    anchors that overlap a target most keep their own best target however small the overlap, so that every
    target has an anchor. Of targets [B, M, 4] with labels [B, M] and anchors [N, 4]: int64 [B, N], indices
    into the M targets, or BACKGROUND or IGNORED.
    """
    count = max(1, _OVERLAPS_AT_ONCE // (boxes.shape[1] * len(anchors)))
    parts = zip(boxes.split(count), labels.split(count), strict=True)
    found = [_best_overlaps(part, names != PADDING, anchors) for part, names in parts]
    iou, target, best = (torch.cat(part) for part in zip(*found, strict=True))
    matched = torch.where(iou < _FOREGROUND, IGNORED, target)
    matched = torch.where(iou < _BACKGROUND, BACKGROUND, matched)
    return torch.where(best, target, matched)


@fused_exactly
def _best_overlaps(boxes: Tensor, valid: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each anchor its largest IoU, that target, and whether the anchor is the best of any target."""
    iou = pairwise_iou(boxes, anchors).masked_fill_(~valid[:, :, None], -1.0)
    best_iou, best_target = iou.max(dim=1)
    best = ((iou == iou.amax(dim=2, keepdim=True)) & valid[:, :, None]).any(dim=1)
    return best_iou, best_target, best
