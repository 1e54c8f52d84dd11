"""Box operations, batched and without data-dependent shapes.

Boxes are [x1, y1, x2, y2]. GIoU follows Rezatofighi et al. 2019 (arXiv:1902.09630); the offsets (dx, dy, dw,
dh) follow Girshick et al. 2014 (R-CNN), with unit weights and torchvision's clamp of log(1000/16).
"""

import math

import torch
from torch import Tensor

MAX_LOG_SCALE = math.log(1000.0 / 16)
"""Maximum predicted log ratio of box to anchor, so that exp() cannot overflow."""


def area(boxes: Tensor) -> Tensor:
    """Return the areas [...] of boxes [..., 4]."""
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def to_center(boxes: Tensor) -> Tensor:
    """Convert boxes [..., 4] to center and size."""
    return torch.cat([(boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]], dim=-1)


def to_corners(boxes: Tensor) -> Tensor:
    """Convert boxes [..., 4] from center and size to x1 y1 x2 y2."""
    half = boxes[..., 2:] / 2
    return torch.cat([boxes[..., :2] - half, boxes[..., :2] + half], dim=-1)


def pairwise_iou(boxes: Tensor, anchors: Tensor) -> Tensor:
    """Return the IoU of every box with every anchor: [B, M, 4] x [N, 4] or [B, N, 4] -> [B, M, N]."""
    # One coordinate at a time, so that memory is accessed in order.
    x1, y1, x2, y2 = (part[..., None] for part in boxes.unbind(dim=-1))
    left, top, right, bottom = (part[..., None, :] for part in anchors.unbind(dim=-1))
    width = torch.minimum(x2, right).sub_(torch.maximum(x1, left)).clamp_(min=0)
    height = torch.minimum(y2, bottom).sub_(torch.maximum(y1, top)).clamp_(min=0)
    intersection = width.mul_(height)
    union = (area(boxes)[..., None] + area(anchors)[..., None, :]).sub_(intersection)
    return intersection.div_(union)


def encode(boxes: Tensor, anchors: Tensor) -> Tensor:
    """Return the offsets [..., 4] that turn anchors [..., 4] into boxes [..., 4]."""
    anchor_size = anchors[..., 2:] - anchors[..., :2]
    box_size = boxes[..., 2:] - boxes[..., :2]
    anchor_center = anchors[..., :2] + 0.5 * anchor_size
    box_center = boxes[..., :2] + 0.5 * box_size
    return torch.cat([(box_center - anchor_center) / anchor_size, torch.log(box_size / anchor_size)], dim=-1)


def decode(offsets: Tensor, anchors: Tensor) -> Tensor:
    """Return the boxes [..., 4] for predicted offsets [..., 4] and anchors [..., 4] (broadcast)."""
    anchor_size = anchors[..., 2:] - anchors[..., :2]
    center = offsets[..., :2] * anchor_size + (anchors[..., :2] + 0.5 * anchor_size)
    half = 0.5 * torch.exp(offsets[..., 2:].clamp(max=MAX_LOG_SCALE)) * anchor_size
    return torch.cat([center - half, center + half], dim=-1)


def giou_loss(predicted: Tensor, target: Tensor, eps: float = 1e-7) -> Tensor:
    """Return 1 - generalized IoU of pairs of boxes: [..., 4] x [..., 4] -> [...]."""
    overlap_min = torch.maximum(predicted[..., :2], target[..., :2])
    overlap_max = torch.minimum(predicted[..., 2:], target[..., 2:])
    overlap = (overlap_max - overlap_min).clamp(min=0)
    intersection = overlap[..., 0] * overlap[..., 1]
    union = area(predicted) + area(target) - intersection
    hull = torch.maximum(predicted[..., 2:], target[..., 2:]) - torch.minimum(
        predicted[..., :2], target[..., :2]
    )
    hull_area = hull[..., 0] * hull[..., 1]
    return 1 - (intersection / (union + eps) - (hull_area - union) / (hull_area + eps))
