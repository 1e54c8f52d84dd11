"""Selection and suppression of detections, for a whole batch at once and equal to torchvision's."""

import torch
from torch import Tensor
from torchvision.ops import nms

from trainer.model.architecture import Detections
from trainer.model.retinanet.options import RetinaNetOptions

_BOXES_AT_ONCE = 2**16  # boxes in a call of the suppression on a GPU, where each pair takes a bit
_FIRST_PREFIX = 4  # candidates that the suppression tries first, as a multiple of detections_per_image


def best_pairs(logits: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Best pairs of anchor and class of one level: logits, anchors and labels, each [B, k], best first.

    Exact in two stages: a pair among the best k has an anchor whose best class is among the best k, so only
    the classes of k anchors are sorted. The logits keep the convolution's order: with hundreds of classes a
    transposition costs more than the rest. `logits` are [B, A, C, P], with A anchors at each of P places;
    anchors are numbered by place and then by scale.
    """
    _, each, classes, places = logits.shape
    total = each * places
    if total > limit:
        # In memory order, so that values of a class are fetched from neighboring places.
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
    """The `rows` best of T candidates as a graph's outputs; suppressed ones have the score 0."""
    best, index = torch.topk(scores, rows, dim=1)
    real = best > 0
    chosen = boxes.gather(1, _rows(index)) * real[:, :, None]
    return chosen, best, torch.where(real, labels.gather(1, index), -1), real.sum(dim=1)


def postprocess(
    boxes: Tensor, scores: Tensor, labels: Tensor, classes: int, image_size: int, config: RetinaNetOptions
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


def _suppress(boxes: Tensor, scores: Tensor, config: RetinaNetOptions) -> Tensor:
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


def _rows(index: Tensor) -> Tensor:
    """An index of rows [B, K] as one of their four coordinates, [B, K, 4]."""
    return index[:, :, None].expand(-1, -1, 4)


@torch.library.custom_op("kubedet::nms_keep", mutates_args=())
def nms_keep(
    boxes: Tensor, scores: Tensor, labels: Tensor, classes: int, overlap: float, threshold: float
) -> Tensor:
    """Suppress candidates within their class (NMS): fp32 [B, T], 1 for those kept, else 0.

    Exported graphs contain this operator: in PyTorch it runs torchvision's NMS, in ONNX it becomes
    NonMaxSuppression over per-class scores, which is exact; class offsets in fp32 are not.
    It drops the weaker of two boxes with a larger IoU than `overlap`, and scores up to `threshold`.
    """
    # Boxes of other images and classes are shifted apart; in fp64, where a shift does not round them.
    group = labels + classes * torch.arange(len(labels), device=labels.device)[:, None]
    shifted = boxes.double() + (group * (boxes.amax().double() + 1))[:, :, None]
    kept = torch.zeros_like(scores)
    # Each call waits for a GPU; on a CPU its time grows with the square of the boxes.
    images = max(1, _BOXES_AT_ONCE // scores.shape[1]) if scores.is_cuda else 1
    for part, score, mark in zip(*(tensor.split(images) for tensor in (shifted, scores, kept)), strict=True):
        candidates = torch.nonzero(score.flatten() > threshold).flatten()
        survivors = nms(part.flatten(0, 1)[candidates], score.flatten()[candidates].double(), overlap)
        mark.view(-1)[candidates[survivors]] = 1.0
    return kept


@nms_keep.register_fake
def _(
    boxes: Tensor, scores: Tensor, labels: Tensor, classes: int, overlap: float, threshold: float
) -> Tensor:
    return torch.empty_like(scores)
