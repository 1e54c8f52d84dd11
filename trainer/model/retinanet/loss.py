"""RetinaNet's losses, equal to those of torchvision.

Targets are padded to the same length, so no shape depends on the data and no step waits for the device.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.data.batch import PADDING
from trainer.model import boxes as box_ops
from trainer.model.boxes import pairwise_iou
from trainer.model.fused_functions import fused, fused_exactly
from trainer.model.retinanet.focal import BACKGROUND, IGNORED, conv_focal_loss, focal_loss, supports_autocast

_FOREGROUND, _BACKGROUND = 0.5, 0.4
_OVERLAPS_AT_ONCE = 32 * 1024 * 1024
"""Maximum number of pairs of target and anchor whose IoUs are in memory at the same time."""


class AnchorTargets(NamedTuple):
    """The targets of every anchor of every image."""

    labels: Tensor  # [B, N] int32: class of the matched target, BACKGROUND or IGNORED
    boxes: Tensor  # [B, N, 4] fp32: the matched target, or the anchor itself if there is none
    positive: Tensor  # [B, N] bool: whether a target is matched
    weights: Tensor
    """[B, N] fp32: factor that turns a sum over anchors into a mean over images, each divided by its
    matched anchors."""


def match_anchors(boxes: Tensor, labels: Tensor, anchors: Tensor) -> Tensor:
    """Assign to every anchor a target, BACKGROUND or IGNORED, as torchvision's `Matcher` does.

    An anchor matches the target with the largest IoU if that is at least 0.5, and none if it is below 0.4.
    The anchors with the largest IoU for a target keep their best target even if the IoU is small, so that
    every target has an anchor. For targets [B, M, 4] with labels [B, M] and anchors [N, 4], the result is
    int64 [B, N]: indices into the M targets, or BACKGROUND or IGNORED.
    """
    count = max(1, _OVERLAPS_AT_ONCE // (boxes.shape[1] * len(anchors)))
    parts = zip(boxes.split(count), labels.split(count), strict=True)
    found = [_best_overlaps(part, classes != PADDING, anchors) for part, classes in parts]
    iou, target, best = (torch.cat(part) for part in zip(*found, strict=True))
    matched = torch.where(iou < _FOREGROUND, IGNORED, target)
    matched = torch.where(iou < _BACKGROUND, BACKGROUND, matched)
    return torch.where(best, target, matched)


@fused_exactly
def _best_overlaps(boxes: Tensor, valid: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each anchor's largest IoU, the target, and whether the anchor is the best of any target."""
    iou = pairwise_iou(boxes, anchors).masked_fill_(~valid[:, :, None], -1.0)
    best_iou, best_target = iou.max(dim=1)
    best = ((iou == iou.amax(dim=2, keepdim=True)) & valid[:, :, None]).any(dim=1)
    return best_iou, best_target, best


def assign_targets(boxes: Tensor, labels: Tensor, anchors: Tensor) -> AnchorTargets:
    """Match the anchors and look up their targets; arguments as for `match_anchors`."""
    matched = match_anchors(boxes, labels, anchors)
    positive = matched >= 0
    index = matched.clamp(min=0)
    matched_boxes = boxes.gather(1, index[:, :, None].expand(-1, -1, 4))
    count = positive.sum(dim=1, keepdim=True).clamp(min=1)
    return AnchorTargets(
        labels=torch.where(positive, labels.gather(1, index), matched).int(),
        boxes=torch.where(positive[:, :, None], matched_boxes, anchors),
        positive=positive,
        weights=(1 / (count * boxes.shape[0])).expand_as(positive),
    )


def pad_targets(boxes: Tensor, labels: Tensor, *, minimum: int = 8) -> tuple[Tensor, Tensor]:
    """Pad boxes [B, M, 4] and labels [B, M] to the next power of two, so that compiled graphs are reused."""
    rows = boxes.shape[1]
    missing = max(minimum, 1 << (rows - 1).bit_length()) - rows
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
) -> dict[str, Tensor]:
    """Return the losses `classification` and `boxes`.

    Each loss is summed over the anchors of an image, divided by its number of matched anchors, and averaged
    over the images. Call it under autocast. `features` [B, F, h, w] of each level are the input of the class
    head's `last` convolution (A * C channels); `offsets` [B, N, 4] cover all levels; `anchors` [n, 4] are
    given for each level. For `boxes` and `labels` see `Architecture.forward`.
    """
    sizes = [len(level) for level in anchors]
    together = torch.cat(anchors)
    with torch.autocast(offsets.device.type, enabled=False):
        targets = assign_targets(*pad_targets(boxes, labels), together)
        box = box_loss(offsets, kind, together, targets)
    classes = classification_loss(features, last, targets, sizes)
    return {"classification": classes, "boxes": box}


def classification_loss(
    features: list[Tensor], last: nn.Conv2d, targets: AnchorTargets, sizes: list[int]
) -> Tensor:
    """Return the focal loss of the class head; `sizes` are the numbers of anchors of each level."""
    labels = [part.contiguous() for part in targets.labels.split(sizes, dim=1)]
    weights = [part.contiguous() for part in targets.weights.split(sizes, dim=1)]
    assert last.bias is not None
    device = targets.labels.device
    if supports_autocast(device):
        return conv_focal_loss(features, last.weight, last.bias, labels, weights)
    total = torch.zeros((), device=device)
    for level, classes, factors in zip(features, labels, weights, strict=True):
        logits = last(level).permute(0, 2, 3, 1).reshape(classes.numel(), -1)
        total = total + focal_loss(logits, classes.flatten(), factors.flatten())
    return total


@fused
def box_loss(offsets: Tensor, kind: str, anchors: Tensor, targets: AnchorTargets) -> Tensor:
    """Return the box regression loss of predicted offsets [B, N, 4] over the matched anchors, a scalar.

    `kind` is "l1" (on offsets) or "giou" (on decoded boxes).
    """
    # The target of an unmatched anchor is the anchor itself, so its loss and gradient are finite, and the
    # mask below never computes 0 * inf.
    offsets = torch.where(targets.positive[:, :, None], offsets.float(), 0.0)
    if kind == "giou":
        values = box_ops.giou_loss(box_ops.decode(offsets, anchors), targets.boxes)
    else:
        values = (offsets - box_ops.encode(targets.boxes, anchors)).abs().sum(dim=2)
    return (torch.where(targets.positive, values, 0.0) * targets.weights).sum()
