"""From candidates to detections: suppression within each class, for a whole batch at once and exact."""

from typing import NamedTuple

import torch
from torch import Tensor
from torchvision.ops import nms

from trainer.model.pyramid_options import PyramidOptions

_FIRST_PREFIX = 4  # candidates that the suppression tries first, as a multiple of detections_per_image


class Detections(NamedTuple):
    """Detections of a batch, best first, padded to K = detections_per_image rows."""

    boxes: Tensor  # [B, K, 4] in pixels of the network's input; zeros where padded
    scores: Tensor  # [B, K] fp32; zero where padded
    labels: Tensor  # [B, K] int64 contiguous labels; -1 where padded
    num: Tensor  # [B] int64: rows that are not padding


def postprocess(
    boxes: Tensor, scores: Tensor, labels: Tensor, classes: int, image_size: int, config: PyramidOptions
) -> Detections:
    """Suppress T candidates of each image and keep the best, equal to torchvision.

    Boxes are fp32 [B, T, 4] in pixels of a square of `image_size`.
    """
    # Stable, as in torchvision: among equal scores the first candidate wins.
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    boxes, labels = boxes.gather(1, _rows(order)), labels.gather(1, order)
    # Boxes of other images and classes are shifted apart; in fp64, where a shift does not round them.
    image = torch.arange(len(labels), device=labels.device)[:, None]
    shifted = boxes.double() + ((image * classes + labels) * (image_size + 1))[:, :, None]
    kept = _suppress(shifted, scores, config)
    rows, total = config.detections_per_image, kept.shape[1]
    places = torch.arange(total, device=kept.device)
    first = torch.where(kept, places, total).sort(dim=1).values[:, :rows]
    first = torch.cat([first, first.new_full((len(first), rows - first.shape[1]), total)], dim=1)
    real = first < total
    index = torch.where(real, first, 0)
    return Detections(
        boxes=torch.where(real[:, :, None], boxes.gather(1, _rows(index)), 0.0),
        scores=torch.where(real, scores.gather(1, index), 0.0),
        labels=torch.where(real, labels.gather(1, index), -1),
        num=real.sum(dim=1),
    )


def _suppress(boxes: Tensor, scores: Tensor, config: PyramidOptions) -> Tensor:
    """NMS: [B, T] bool, which candidates are kept; exact for the first `detections_per_image` of them.

    Whether a candidate is kept depends only on better ones, so a prefix is enough if it yields enough
    detections. If an image has too few, all candidates are tried.
    """
    batch, total = scores.shape
    possible = scores > config.score_threshold
    kept = torch.zeros_like(possible)
    for prefix in (min(total, _FIRST_PREFIX * config.detections_per_image), total):
        tried = possible[:, :prefix].flatten().nonzero()[:, 0]
        survivors = nms(
            boxes[:, :prefix].flatten(0, 1)[tried], scores[:, :prefix].flatten()[tried].double(),
            config.nms_threshold,
        )  # fmt: skip
        kept[:, :prefix] = (
            torch.zeros(batch * prefix, dtype=torch.bool, device=kept.device)
            .index_fill_(0, tried[survivors], True)
            .view(batch, prefix)
        )
        lacking = (kept.sum(dim=1) < config.detections_per_image) & possible[:, prefix:].any(dim=1)
        if not lacking.any():
            break
    return kept


def _rows(index: Tensor) -> Tensor:
    """An index of rows [B, K] as one of their four coordinates, [B, K, 4]."""
    return index[:, :, None].expand(-1, -1, 4)
