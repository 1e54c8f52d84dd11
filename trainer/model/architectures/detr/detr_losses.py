"""Further losses of the classes; `detr_criterion.Criterion` calls them like its `varifocal`."""

import torch
import torch.nn.functional as F
from torch import Tensor

_ALPHA = 0.25  # share of the score in the goal of a pair; the rest is the overlap's
_LEAST = 0.01  # least goal of a pair
_GAMMA = 1.5  # exponent of the overlap, and of a negative's score


def ia_bce(logits: Tensor, goal: Tensor) -> Tensor:
    """Binary cross-entropy aware of the overlap (arXiv:2310.15961) of each query and class, [B, S, Q, C].

    Source: `loss_labels` with `ia_bce_loss` in rfdetr/models/lwdetr.py of github.com/roboflow/rf-detr
    (35ac6ab), which equals that in models/lwdetr.py of github.com/Atten4Vis/LW-DETR (d5e6e6c).
    """
    matched, chance = goal >= 0, logits.sigmoid()
    aim = (chance.detach() ** _ALPHA * goal.clamp(min=0) ** (1 - _ALPHA)).clamp(min=_LEAST)
    positive = torch.where(matched, aim, 0.0)
    negative = torch.where(matched, 1 - aim, chance**2)
    return negative * logits - F.logsigmoid(logits) * (positive + negative)


def mal(logits: Tensor, goal: Tensor) -> Tensor:
    """Matchability-aware loss (arXiv:2412.04234) of each query and class, [B, S, Q, C].

    Source: `loss_labels_mal` in engine/deim/deim_criterion.py and configs/base/deimv2.yml of
    github.com/Intellindust-AI-Lab/DEIMv2 (0fff8d4).
    """
    weight = torch.where(goal < 0, logits.detach().sigmoid() ** _GAMMA, 1.0)
    return F.binary_cross_entropy_with_logits(logits, goal.clamp(min=0) ** _GAMMA, weight, reduction="none")
