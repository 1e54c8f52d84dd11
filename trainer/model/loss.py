"""The RetinaNet loss (Lin et al. 2017, arXiv:1708.02002), equal to torchvision's, for a batch at once.

Targets are padded to one length, so no shape depends on the data and no step waits for the device.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.model import boxes as box_ops
from trainer.model.anchor_matching import Matches, assign, pad_targets
from trainer.model.focal import conv_focal_loss, focal_loss, supports
from trainer.model.fused_functions import fused


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

    Call it under the autocast of the network.

    Args:
        kind: see `box_loss`.
        features: [B, F, h, w] of each level, input of the class head's last convolution.
        last: that convolution, to A * C channels.
        offsets: [B, N, 4] predicted offsets, all levels after one another.
        anchors: [n, 4] fp32 of each level, pixels; the n = h * w * A add up to N.
        boxes: [B, M, 4] targets, pixels.
        labels: [B, M] int64 classes, PADDING where a row is padding.
        verified: [B, C] bool, the classes that may be negatives of each image; None is all of them.
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
    """Box regression loss of the matched anchors; a scalar.

    Args:
        offsets: [B, N, 4] predicted.
        kind: "l1" or "smooth_l1" (on offsets, beta 1), or "giou" (on decoded boxes).
        anchors: [N, 4] fp32.
        matches: targets of the anchors.
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
