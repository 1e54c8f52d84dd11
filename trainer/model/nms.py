"""Suppression within each class (NMS) as an operator that exported graphs contain.

In PyTorch it runs torchvision's NMS; in ONNX it becomes NonMaxSuppression over per-class scores, which is
exact; class offsets in fp32 are not.
"""

import torch
from torch import Tensor
from torchvision.ops import nms

_BOXES_AT_ONCE = 2**16  # boxes in a call of the suppression on a GPU, where each pair takes a bit


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
