"""Selects detections and applies NMS for a whole batch at once, with the same results as torchvision."""

import torch
from torch import Tensor
from torchvision.ops import nms

from trainer.model.architecture import Detections
from trainer.model.retinanet.options import RetinaNetOptions

_BOXES_AT_ONCE = 2**16  # boxes in one NMS call on a GPU, which stores a bit for each pair
_FIRST_PREFIX = 4  # candidates that NMS tries first, as a multiple of detections_per_image


def best_anchor_class_pairs(logits: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best pairs of anchor and class of a level: logits, anchors, labels, each [B, k], best first.

    The selection has two exact stages: the best k pairs only use the k anchors with the highest logits, so
    only those anchors' classes are sorted. The logits keep the convolution's memory order, because
    transposing hundreds of classes costs more than the rest. `logits` are [B, A, C, P], with A anchors at
    each of P locations; anchors are numbered by location and then by scale.
    """
    _, each, classes, places = logits.shape
    total = each * places
    if total > limit:
        # Sort in memory order, so that the values of a class are read from nearby addresses.
        column = torch.topk(logits.amax(dim=2).flatten(1), limit, dim=1).indices.sort(dim=1).values
    else:
        column = torch.arange(total, device=logits.device).expand(logits.shape[0], -1)
    scale, place = torch.div(column, places, rounding_mode="floor"), column % places
    rows = torch.arange(classes, device=logits.device)[:, None] * places
    candidate_logits = logits.flatten(1).gather(
        1, ((scale * (classes * places) + place)[:, None, :] + rows).flatten(1)
    )
    best, pair = torch.topk(candidate_logits, min(limit, candidate_logits.shape[1]), dim=1)
    candidates = column.shape[1]
    anchor = (place * each + scale).gather(1, pair % candidates)
    return best, anchor, torch.div(pair, candidates, rounding_mode="floor")


def top_detections(boxes: Tensor, scores: Tensor, labels: Tensor, rows: int) -> tuple[Tensor, ...]:
    """Return the best `rows` of T candidates as graph outputs; suppressed candidates have score 0."""
    best, index = torch.topk(scores, rows, dim=1)
    real = best > 0
    chosen = boxes.gather(1, _expand_to_boxes(index)) * real[:, :, None]
    return chosen, best, torch.where(real, labels.gather(1, index), -1), real.sum(dim=1)


def postprocess(
    boxes: Tensor, scores: Tensor, labels: Tensor, classes: int, image_size: int, config: RetinaNetOptions
) -> Detections:
    """Apply NMS to T candidates of each image and keep the best ones, as torchvision does.

    Boxes are fp32 [B, T, 4] in pixels of a square of `image_size`.
    """
    # A stable sort, as in torchvision: among equal scores the first candidate wins.
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    boxes, labels = boxes.gather(1, _expand_to_boxes(order)), labels.gather(1, order)
    # Shift boxes of different images and classes apart, in fp64, where a shift does not round them.
    image = torch.arange(len(labels), device=labels.device)[:, None]
    shifted = boxes.double() + ((image * classes + labels) * (image_size + 1))[:, :, None]
    kept = _nms_mask(shifted, scores, config)
    rows, total = config.detections_per_image, kept.shape[1]
    places = torch.arange(total, device=kept.device)
    first = torch.where(kept, places, total).sort(dim=1).values[:, :rows]
    first = torch.cat([first, first.new_full((len(first), rows - first.shape[1]), total)], dim=1)
    real = first < total
    index = torch.where(real, first, 0)
    return Detections(
        boxes=torch.where(real[:, :, None], boxes.gather(1, _expand_to_boxes(index)), 0.0),
        scores=torch.where(real, scores.gather(1, index), 0.0),
        labels=torch.where(real, labels.gather(1, index), -1),
        num=real.sum(dim=1),
    )


def _nms_mask(boxes: Tensor, scores: Tensor, config: RetinaNetOptions) -> Tensor:
    """Return which candidates NMS keeps, bool [B, T]; exact for the first `detections_per_image` kept.

    Whether a candidate is kept depends only on better candidates, so a prefix suffices if it yields enough
    detections. If an image has too few, all candidates are tried.
    """
    batch, total = scores.shape
    possible = scores > config.score_threshold
    kept = torch.zeros_like(possible)
    for prefix in (min(total, _FIRST_PREFIX * config.detections_per_image), total):
        tried = possible[:, :prefix].flatten().nonzero()[:, 0]
        survivors = nms(
            boxes[:, :prefix].flatten(0, 1)[tried],
            scores[:, :prefix].flatten()[tried].double(),
            config.nms_threshold,
        )
        kept[:, :prefix] = (
            torch.zeros(batch * prefix, dtype=torch.bool, device=kept.device)
            .index_fill_(0, tried[survivors], True)
            .view(batch, prefix)
        )
        lacking = (kept.sum(dim=1) < config.detections_per_image) & possible[:, prefix:].any(dim=1)
        if not lacking.any():
            break
    return kept


def _expand_to_boxes(index: Tensor) -> Tensor:
    """Expand an index of rows [B, K] to their four coordinates, [B, K, 4]."""
    return index[:, :, None].expand(-1, -1, 4)


@torch.library.custom_op("kubedet::nms_keep", mutates_args=())
def nms_keep(
    boxes: Tensor, scores: Tensor, labels: Tensor, classes: int, iou_threshold: float, score_threshold: float
) -> Tensor:
    """Run NMS within each class; return fp32 [B, T], 1 for a kept candidate and 0 otherwise.

    If the IoU of two boxes exceeds `iou_threshold`, the box with the lower score is suppressed. Candidates
    with scores up to `score_threshold` are dropped. Exported graphs contain this operator. PyTorch runs
    torchvision's NMS; ONNX runs NonMaxSuppression over per-class scores, which is exact, unlike class offsets
    in fp32.
    """
    # Shift boxes of different images and classes apart, in fp64, where a shift does not round them.
    group = labels + classes * torch.arange(len(labels), device=labels.device)[:, None]
    shifted = boxes.double() + (group * (boxes.amax().double() + 1))[:, :, None]
    kept = torch.zeros_like(scores)
    # Each call of `nms` waits for a GPU; on a CPU its time grows with the square of the number of boxes.
    images = max(1, _BOXES_AT_ONCE // scores.shape[1]) if scores.is_cuda else 1
    for part, score, mark in zip(*(tensor.split(images) for tensor in (shifted, scores, kept)), strict=True):
        candidates = torch.nonzero(score.flatten() > score_threshold).flatten()
        survivors = nms(part.flatten(0, 1)[candidates], score.flatten()[candidates].double(), iou_threshold)
        mark.view(-1)[candidates[survivors]] = 1.0
    return kept


@nms_keep.register_fake
def _(
    boxes: Tensor, scores: Tensor, labels: Tensor, classes: int, iou_threshold: float, score_threshold: float
) -> Tensor:
    return torch.empty_like(scores)
