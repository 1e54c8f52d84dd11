"""Deployment graphs of detectors: their inputs and outputs, and a custom operator for suppression.

In PyTorch the operator runs torchvision's NMS; in ONNX it becomes NonMaxSuppression over per-class scores
(exact; class offsets in fp32 are not).
"""

from abc import abstractmethod

import torch
from torch import Tensor, nn
from torchvision.ops import nms

INPUT = "images"
OUTPUTS = ("boxes", "scores", "labels", "num")
RAW_OUTPUTS = ("boxes", "scores")
_BOXES_AT_ONCE = 2**16  # boxes in a call of the suppression on a GPU, where each pair takes a bit


class Graph(nn.Module):
    """A detector with pre- and postprocessing, no shape of which depends on data.

    uint8 [B, 3, S, S] in; the tensors of `postprocess.Detections` out, or `RAW_OUTPUTS` of a raw graph.
    """

    names: tuple[str, ...] = OUTPUTS  # names of the outputs
    image_size: int  # S, pixels
    rows: int  # K, the rows of the padded outputs

    @abstractmethod
    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Outputs for a batch of uint8 squares."""


@torch.library.custom_op("kubedet::nms_keep", mutates_args=())
def nms_keep(
    boxes: Tensor, scores: Tensor, labels: Tensor, classes: int, overlap: float, threshold: float
) -> Tensor:
    """Suppress candidates within their class (NMS): fp32 [B, T], 1 for those kept, else 0.

    It drops the weaker of two boxes with a larger IoU than `overlap`, and scores up to `threshold`.
    """
    # Boxes of other images and classes are shifted apart; in fp64, where a shift does not round them.
    group = labels + classes * torch.arange(len(labels), device=labels.device)[:, None]
    shifted = boxes.double() + (group * (boxes.amax().double() + 1))[:, :, None]
    kept = torch.zeros_like(scores)
    # Each call waits for a GPU; on a CPU its time grows with the square of the boxes.
    images = max(1, _BOXES_AT_ONCE // scores.shape[1]) if scores.is_cuda else 1
    for part, score, mark in zip(*(each.split(images) for each in (shifted, scores, kept)), strict=True):
        candidates = torch.nonzero(score.flatten() > threshold).flatten()
        survivors = nms(part.flatten(0, 1)[candidates], score.flatten()[candidates].double(), overlap)
        mark.view(-1)[candidates[survivors]] = 1.0
    return kept


@nms_keep.register_fake
def _(
    boxes: Tensor, scores: Tensor, labels: Tensor, classes: int, overlap: float, threshold: float
) -> Tensor:
    return torch.empty_like(scores)


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
        # In memory order, so that values of a class are fetched from neighbouring places.
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


def served(boxes: Tensor, scores: Tensor, labels: Tensor, rows: int) -> tuple[Tensor, ...]:
    """The `rows` best of T candidates as a graph's outputs; suppressed ones have the score 0."""
    best, index = torch.topk(scores, rows, dim=1)
    real = best > 0
    chosen = boxes.gather(1, index[:, :, None].expand(-1, -1, 4)) * real[:, :, None]
    return chosen, best, torch.where(real, labels.gather(1, index), -1), real.sum(dim=1)
