"""RetinaNet's matching and loss (Lin et al. 2017, arXiv:1708.02002), equal to torchvision's, batched.

Targets are padded to one length, so no shape depends on the data and no step waits for the device.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.data.batch import PADDING
from trainer.model import boxes as box_ops
from trainer.model.focal import BACKGROUND, IGNORED, conv_focal_loss, focal_loss, supports
from trainer.model.fused_functions import fused, fused_exactly

FOREGROUND_IOU = 0.5
BACKGROUND_IOU = 0.4
_OVERLAPS_AT_ONCE = 32 * 1024 * 1024
"""Pairs of target and anchor whose overlaps are in memory at the same time."""


class Matches(NamedTuple):
    """The targets of every anchor of every image."""

    labels: Tensor
    """[B, N] int32: class of the matched target, BACKGROUND or IGNORED."""
    boxes: Tensor
    """[B, N, 4] fp32: the matched target, or the anchor itself without one."""
    positive: Tensor
    """[B, N] bool: whether a target is matched."""
    weights: Tensor
    """[B, N] fp32: factor that turns a sum over anchors into the mean over images of the sum per
    matched anchor."""


def assign(boxes: Tensor, labels: Tensor, anchors: Tensor) -> Matches:
    """Match the anchors and look up their targets; arguments as for `match`."""
    matched = match(boxes, labels, anchors)
    positive = matched >= 0
    index = matched.clamp(min=0)
    matched_boxes = boxes.gather(1, index[:, :, None].expand(-1, -1, 4))
    count = positive.sum(dim=1, keepdim=True).clamp(min=1)
    return Matches(
        labels=torch.where(positive, labels.gather(1, index), matched).int(),
        boxes=torch.where(positive[:, :, None], matched_boxes, anchors),
        positive=positive,
        weights=(1 / (count * boxes.shape[0])).expand_as(positive),
    )


def match(boxes: Tensor, labels: Tensor, anchors: Tensor) -> Tensor:
    """Assign to every anchor a target, BACKGROUND or IGNORED.

    An anchor takes the target it overlaps most if that IoU is at least FOREGROUND_IOU. The anchors that
    overlap a target most keep their own best target however small the overlap, so that every target has
    an anchor. Of targets [B, M, 4] with labels [B, M] and anchors [N, 4]: int64 [B, N], indices into the
    M targets, or BACKGROUND or IGNORED.
    """
    count = max(1, _OVERLAPS_AT_ONCE // (boxes.shape[1] * anchors.shape[0]))
    parts = zip(boxes.split(count), labels.split(count), strict=True)
    return torch.cat([_match(some, names != PADDING, anchors) for some, names in parts])


@fused_exactly
def _match(boxes: Tensor, valid: Tensor, anchors: Tensor) -> Tensor:
    iou = box_ops.pairwise_iou(boxes, anchors).masked_fill_(~valid[:, :, None], -1.0)
    best_iou, best_target = iou.max(dim=1)
    matched = torch.where(best_iou < BACKGROUND_IOU, BACKGROUND, best_target)
    between = (best_iou >= BACKGROUND_IOU) & (best_iou < FOREGROUND_IOU)
    matched = torch.where(between, IGNORED, matched)
    best_anchor_iou = iou.amax(dim=2, keepdim=True)
    keeps_best = ((iou == best_anchor_iou) & valid[:, :, None]).any(dim=1)
    return torch.where(keeps_best, best_target, matched)


def pad_targets(boxes: Tensor, labels: Tensor, *, least: int = 8) -> tuple[Tensor, Tensor]:
    """Pad boxes [B, M, 4] and labels [B, M] to the next power of two, so that graphs are reused."""
    rows = boxes.shape[1]
    missing = max(least, 1 << (rows - 1).bit_length()) - rows
    if not missing:
        return boxes, labels
    return F.pad(boxes, (0, 0, 0, missing)), F.pad(labels, (0, missing), value=PADDING)


def retinanet_loss(
    kind: str,
    features: list[Tensor],
    last: nn.Conv2d,
    offsets: Tensor,
    anchors: list[Tensor],
    boxes: Tensor,
    labels: Tensor,
    verified: Tensor | None = None,
) -> dict[str, Tensor]:
    """`classification` and `boxes`: means over the images of the sum over anchors per matched anchor.

    Call it under the autocast of the network. `features` [B, F, h, w] of each level are the input of the
    class head's `last` convolution, to A * C channels; `offsets` [B, N, 4] are of all levels; `anchors`
    [n, 4] of each level add up to N. The targets are as for `Architecture.forward`.
    """
    sizes = [len(level) for level in anchors]
    together = torch.cat(anchors)
    with torch.autocast(offsets.device.type, enabled=False):
        matches = assign(*pad_targets(boxes, labels), together)
        box = box_loss(offsets, kind, together, matches)
    classes = classification_loss(features, last, matches, sizes, verified)
    return {"classification": classes, "boxes": box}


def classification_loss(
    features: list[Tensor], last: nn.Conv2d, matches: Matches, sizes: list[int],
    verified: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Focal loss of the class head; a scalar. `sizes` are the anchors of each level; see `retinanet_loss`."""
    labels = [part.contiguous() for part in matches.labels.split(sizes, dim=1)]
    weights = [part.contiguous() for part in matches.weights.split(sizes, dim=1)]
    assert last.bias is not None
    device = matches.labels.device
    if supports(device):
        return conv_focal_loss(features, last.weight, last.bias, labels, weights, verified)
    total = torch.zeros((), device=device)
    for level, names, factors in zip(features, labels, weights, strict=True):
        logits = last(level).permute(0, 2, 3, 1).reshape(names.numel(), -1)
        total = total + focal_loss(logits, names.flatten(), factors.flatten(), verified)
    return total


@fused
def box_loss(offsets: Tensor, kind: str, anchors: Tensor, matches: Matches) -> Tensor:
    """Box regression loss of the matched anchors, of predicted offsets [B, N, 4]; a scalar.

    `kind` is "l1" or "smooth_l1" (on offsets, beta 1), or "giou" (on decoded boxes).
    """
    # Anchors without a target have themselves as target: with zero offsets loss and gradient are
    # finite, and the mask below cannot turn into 0 * inf.
    offsets = torch.where(matches.positive[:, :, None], offsets.float(), 0.0)
    if kind == "giou":
        each = box_ops.giou_loss(box_ops.decode(offsets, anchors), matches.boxes)
    else:
        measure = F.l1_loss if kind == "l1" else F.smooth_l1_loss
        each = measure(offsets, box_ops.encode(matches.boxes, anchors), reduction="none").sum(dim=2)
    return (torch.where(matches.positive, each, 0.0) * matches.weights).sum()
