"""From the heads' outputs to detections: top candidates of each level, then suppression.

A whole batch at once, and exact. Two stages find the best pairs of anchor and class: a pair among
the best k has an anchor whose best class is among the best k, so only k anchors' classes are
sorted. One suppression serves all images and classes, whose boxes are shifted apart.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torchvision.ops import nms

from trainer.model import boxes as box_ops

_FIRST_PREFIX = 4
"""Candidates that the suppression tries first, as a multiple of detections_per_image."""


class Limits(Protocol):
    """Thresholds and limits, as the options of architectures have them."""

    @property
    def score_threshold(self) -> float: ...
    @property
    def nms_threshold(self) -> float: ...
    @property
    def topk_candidates(self) -> int: ...
    @property
    def detections_per_image(self) -> int: ...


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


class _Candidates(NamedTuple):
    """Pairs of anchor and class, best first."""

    boxes: Tensor
    """[B, T, 4] fp32 pixels."""
    scores: Tensor
    """[B, T]."""
    labels: Tensor
    """[B, T] int64."""


def postprocess(
    logits: list[Tensor],
    offsets: list[Tensor],
    anchors: list[Tensor],
    image_size: tuple[int, int],
    config: Limits,
) -> Detections:
    """Turn outputs into detections, equal to torchvision's RetinaNet.

    Args:
        logits: [B, n, C] class logits of each level.
        offsets: [B, n, 4] box offsets of each level.
        anchors: [n, 4] of each level.
        image_size: height and width of the input, pixels.
        config: thresholds and limits.
    """
    levels = [
        _best_pairs(*level, image_size, config.topk_candidates)
        for level in zip(logits, offsets, anchors, strict=True)
    ]
    boxes, scores, labels = (torch.cat(part, dim=1) for part in zip(*levels, strict=True))
    # Stable, as in torchvision: among equal scores the finer level comes first.
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    candidates = _Candidates(boxes.gather(1, _rows(order)), scores, labels.gather(1, order))
    kept = _suppress(candidates, logits[0].shape[2], image_size, config)
    return _select(candidates, kept, config.detections_per_image)


def padded(images: Sequence[Mapping[str, Tensor]], rows: int, first: int) -> Detections:
    """Detections of a batch from torchvision's lists.

    Args:
        images: `boxes` [n, 4], `scores` [n] and `labels` [n] of each image, best first, n at most `rows`.
        rows: K.
        first: label of the first class.
    """
    device = images[0]["scores"].device
    batch = Detections(
        torch.zeros(len(images), rows, 4, device=device), torch.zeros(len(images), rows, device=device),
        torch.full((len(images), rows), -1, device=device),
        torch.tensor([len(one["scores"]) for one in images], device=device),
    )  # fmt: skip
    for row, one in enumerate(images):
        count = len(one["scores"])
        batch.boxes[row, :count], batch.scores[row, :count] = one["boxes"], one["scores"]
        batch.labels[row, :count] = one["labels"] - first
    return batch


def _best_pairs(
    logits: Tensor, offsets: Tensor, anchors: Tensor, image_size: tuple[int, int], limit: int
) -> _Candidates:
    """The `limit` best pairs of anchor and class of one level."""
    batch, count, classes = logits.shape
    place = torch.arange(count, device=logits.device).expand(batch, -1)
    if count > limit:
        place = logits.amax(dim=2).topk(limit, dim=1).indices
        logits = logits.gather(1, place[:, :, None].expand(-1, -1, classes))
    scores = torch.sigmoid(logits.float()).flatten(1)
    scores, pair = scores.topk(min(limit, scores.shape[1]), dim=1)
    anchor = place.gather(1, torch.div(pair, classes, rounding_mode="floor"))
    boxes = box_ops.decode(offsets.gather(1, _rows(anchor)).float(), anchors[anchor])
    boxes[..., 0::2].clamp_(0, image_size[1])
    boxes[..., 1::2].clamp_(0, image_size[0])
    return _Candidates(boxes, scores, pair % classes)


def _suppress(candidates: _Candidates, classes: int, image_size: tuple[int, int], config: Limits) -> Tensor:
    """NMS: [B, T] bool, which candidates are kept; exact for the first `detections_per_image` of them.

    Whether a candidate is kept depends on better ones only, so a prefix is enough if it yields enough
    detections; if an image has too few, all candidates are tried.
    """
    batch, total = candidates.scores.shape
    possible = candidates.scores > config.score_threshold
    # In fp64, where a shift does not round the boxes.
    span = max(image_size) + 1
    image = torch.arange(batch, device=candidates.labels.device)[:, None]
    shifted = candidates.boxes.double() + ((image * classes + candidates.labels) * span)[:, :, None]
    kept = torch.zeros_like(possible)
    for prefix in (min(total, _FIRST_PREFIX * config.detections_per_image), total):
        tried = possible[:, :prefix].flatten().nonzero()[:, 0]
        survivors = nms(
            shifted[:, :prefix].flatten(0, 1)[tried],
            candidates.scores[:, :prefix].flatten()[tried].double(),
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


def _select(candidates: _Candidates, kept: Tensor, rows: int) -> Detections:
    """The first `rows` survivors of each image, padded."""
    batch, total = kept.shape
    num = kept.sum(dim=1).clamp(max=rows)
    places = torch.arange(total, device=kept.device)
    first = torch.where(kept, places, total).sort(dim=1).values[:, :rows]
    first = torch.cat([first, first.new_full((batch, rows - first.shape[1]), total)], dim=1)
    real = first < total
    index = torch.where(real, first, 0)
    return Detections(
        boxes=torch.where(real[:, :, None], candidates.boxes.gather(1, _rows(index)), 0.0),
        scores=torch.where(real, candidates.scores.gather(1, index), 0.0),
        labels=torch.where(real, candidates.labels.gather(1, index), -1),
        num=num,
    )


def _rows(index: Tensor) -> Tensor:
    """An index of rows [B, K] as one of their four coordinates, [B, K, 4]."""
    return index[:, :, None].expand(-1, -1, 4)
