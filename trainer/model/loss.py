"""The RetinaNet loss (Lin et al. 2017, arXiv:1708.02002) on padded targets.

The same numbers as torchvision's per-image loops, for a whole batch at once: targets are
padded to one length, so no shape depends on the data and no step waits for the device.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model import boxes as box_ops

PADDING = -1
"""Label of a target that is only padding."""
BACKGROUND = -1
"""Match of an anchor whose best overlap is below BACKGROUND_IOU."""
IGNORED = -2
"""Match of an anchor between the two thresholds: neither object nor background."""
FOREGROUND_IOU = 0.5
BACKGROUND_IOU = 0.4
ALPHA = 0.25
GAMMA = 2.0


class Losses(NamedTuple):
    """Scalars, each a mean over the images of the sum over anchors per matched anchor."""

    classification: Tensor
    boxes: Tensor


def match(boxes: Tensor, labels: Tensor, anchors: Tensor) -> Tensor:
    """Assign to every anchor a target, BACKGROUND or IGNORED.

    An anchor takes the target it overlaps most if that IoU is at least FOREGROUND_IOU.
    Besides, the anchors that overlap a target more than all others do keep their own best
    target however small the overlap, so that every target has an anchor.

    Args:
        boxes: [B, M, 4] targets in pixels, fp32.
        labels: [B, M], PADDING where a row is padding.
        anchors: [N, 4].

    Returns:
        [B, N] int64, indices into the M targets, or BACKGROUND or IGNORED.
    """
    valid = labels != PADDING
    iou = box_ops.pairwise_iou(boxes, anchors).masked_fill_(~valid[:, :, None], -1.0)
    best_iou, best_target = iou.max(dim=1)
    matched = torch.where(best_iou < BACKGROUND_IOU, BACKGROUND, best_target)
    between = (best_iou >= BACKGROUND_IOU) & (best_iou < FOREGROUND_IOU)
    matched = torch.where(between, IGNORED, matched)
    best_anchor_iou = iou.amax(dim=2, keepdim=True)
    keeps_best = ((iou == best_anchor_iou) & valid[:, :, None]).any(dim=1)
    return torch.where(keeps_best, best_target, matched)


def focal_loss(logits: Tensor, matched_labels: Tensor) -> Tensor:
    """Sigmoid focal loss summed over anchors and classes, per image.

    Every logit is first scored as a negative; the few positives are then corrected. That
    needs no one-hot targets.

    Args:
        logits: [B, N, C].
        matched_labels: [B, N] int64: class of the matched target, BACKGROUND or IGNORED.

    Returns:
        [B] fp32.
    """
    logits = logits.float()
    negative = _negative_focal(logits).sum(dim=2)
    positive_logits = logits.gather(2, matched_labels.clamp(min=0)[:, :, None]).squeeze(2)
    positive = _positive_focal(positive_logits) - _negative_focal(positive_logits)
    per_anchor = torch.where(matched_labels >= 0, negative + positive, negative)
    return torch.where(matched_labels == IGNORED, 0.0, per_anchor).sum(dim=1)


def _negative_focal(logits: Tensor) -> Tensor:
    return (1 - ALPHA) * torch.sigmoid(logits) ** GAMMA * F.softplus(logits)


def _positive_focal(logits: Tensor) -> Tensor:
    return ALPHA * torch.sigmoid(-logits) ** GAMMA * F.softplus(-logits)


def box_loss(kind: str, offsets: Tensor, anchors: Tensor, matched_boxes: Tensor, positive: Tensor) -> Tensor:
    """Box regression loss summed over the matched anchors, per image.

    Args:
        kind: "l1" or "smooth_l1" (on offsets, beta 1), or "giou" (on decoded boxes).
        offsets: [B, N, 4] predicted.
        anchors: [N, 4].
        matched_boxes: [B, N, 4]; rows that are not positive may hold anything finite.
        positive: [B, N] bool.

    Returns:
        [B] fp32.
    """
    offsets = offsets.float()
    # Other rows get a target equal to their anchor: finite values and zero, finite gradients.
    target = torch.where(positive[:, :, None], matched_boxes, anchors)
    offsets = torch.where(positive[:, :, None], offsets, 0.0)
    if kind == "giou":
        per_anchor = box_ops.giou_loss(box_ops.decode(offsets, anchors), target)
    elif kind == "l1":
        per_anchor = F.l1_loss(offsets, box_ops.encode(target, anchors), reduction="none").sum(dim=2)
    else:
        per_anchor = F.smooth_l1_loss(offsets, box_ops.encode(target, anchors), reduction="none").sum(dim=2)
    return torch.where(positive, per_anchor, 0.0).sum(dim=1)


def retinanet_loss(
    kind: str, logits: Tensor, offsets: Tensor, anchors: Tensor, boxes: Tensor, labels: Tensor
) -> Losses:
    """Both losses of a batch, normalised as torchvision does: per image by its matched anchors.

    Args:
        kind: see `box_loss`.
        logits: [B, N, C] class logits.
        offsets: [B, N, 4] predicted offsets.
        anchors: [N, 4] fp32, pixels.
        boxes: [B, M, 4] targets, pixels.
        labels: [B, M] int64 classes, PADDING where a row is padding.
    """
    matched = match(boxes, labels, anchors)
    positive = matched >= 0
    index = matched.clamp(min=0)
    matched_labels = torch.where(positive, labels.gather(1, index), matched)
    matched_boxes = boxes.gather(1, index[:, :, None].expand(-1, -1, 4))
    count = positive.sum(dim=1).clamp(min=1)
    return Losses(
        classification=(focal_loss(logits, matched_labels) / count).mean(),
        boxes=(box_loss(kind, offsets, anchors, matched_boxes, positive) / count).mean(),
    )
