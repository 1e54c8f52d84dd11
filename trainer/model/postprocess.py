"""From the heads' outputs to detections: top candidates of each level, then suppression."""

from typing import NamedTuple

import torch
from torch import Tensor
from torchvision.ops import batched_nms, clip_boxes_to_image

from trainer.config import ModelConfig
from trainer.model import boxes as box_ops


class Detections(NamedTuple):
    """Detections of a batch, best first, padded to K = detections_per_image rows."""

    boxes: Tensor
    """[B, K, 4] in pixels of the network's input; zeros where padded."""
    scores: Tensor
    """[B, K] fp32; zero where padded."""
    labels: Tensor
    """[B, K] int64 contiguous labels; -1 where padded."""
    num: Tensor
    """[B] int64: rows that are not padding."""


def postprocess(
    logits: Tensor, offsets: Tensor, anchors: list[Tensor], image_size: tuple[int, int], config: ModelConfig
) -> Detections:
    """Turn outputs into detections, equal to torchvision's RetinaNet.

    Args:
        logits: [B, N, C] class logits, all levels after one another.
        offsets: [B, N, 4] box offsets.
        anchors: one [n, 4] for each level; the n add up to N.
        image_size: height and width of the input, pixels.
        config: thresholds and limits.
    """
    sizes = [level.shape[0] for level in anchors]
    images = [
        _one_image(level_logits, level_offsets, anchors, image_size, config)
        for level_logits, level_offsets in zip(
            zip(*(part.unbind(0) for part in logits.float().split(sizes, dim=1)), strict=True),
            zip(*(part.unbind(0) for part in offsets.float().split(sizes, dim=1)), strict=True),
            strict=True,
        )
    ]
    return _pad(images, config.detections_per_image)


def _one_image(
    logits: tuple[Tensor, ...],
    offsets: tuple[Tensor, ...],
    anchors: list[Tensor],
    image_size: tuple[int, int],
    config: ModelConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    boxes, scores, labels = [], [], []
    for level_logits, level_offsets, level_anchors in zip(logits, offsets, anchors, strict=True):
        classes = level_logits.shape[1]
        flat = torch.sigmoid(level_logits).flatten()
        count = min(config.topk_candidates, flat.numel())
        level_scores, candidates = flat.topk(count)
        kept = level_scores > config.score_threshold
        level_scores, candidates = level_scores[kept], candidates[kept]
        anchor = torch.div(candidates, classes, rounding_mode="floor")
        decoded = box_ops.decode(level_offsets[anchor], level_anchors[anchor])
        boxes.append(clip_boxes_to_image(decoded, image_size))
        scores.append(level_scores)
        labels.append(candidates % classes)
    all_boxes, all_scores, all_labels = torch.cat(boxes), torch.cat(scores), torch.cat(labels)
    kept = batched_nms(all_boxes, all_scores, all_labels, config.nms_threshold)
    kept = kept[: config.detections_per_image]
    return all_boxes[kept], all_scores[kept], all_labels[kept]


def _pad(images: list[tuple[Tensor, Tensor, Tensor]], rows: int) -> Detections:
    device = images[0][0].device
    boxes = torch.zeros(len(images), rows, 4, device=device)
    scores = torch.zeros(len(images), rows, device=device)
    labels = torch.full((len(images), rows), -1, dtype=torch.int64, device=device)
    for row, (image_boxes, image_scores, image_labels) in enumerate(images):
        count = image_scores.numel()
        boxes[row, :count], scores[row, :count], labels[row, :count] = image_boxes, image_scores, image_labels
    num = torch.tensor([scores.numel() for _, scores, _ in images], device=device)
    return Detections(boxes, scores, labels, num)
