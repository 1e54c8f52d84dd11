"""What autocast gets wrong in transformers' networks: 32 bits where 16 do, and 16 where 32 are needed."""

from typing import Any

import torch
from torch import Tensor
from transformers.models.d_fine.modeling_d_fine import DFineFrozenBatchNorm2d, DFineIntegral
from transformers.models.hgnet_v2.modeling_hgnet_v2 import HGNetV2LearnableAffineBlock
from transformers.models.rt_detr_v2.modeling_rt_detr_v2 import RTDetrV2FrozenBatchNorm2d

from trainer.model.architectures.detr.detr_criterion import at_least_fp32
from trainer.model.batchnorm_folding import TRANSFORMERS, apply_in_convolutions


def mend(model: Any, library_config: Any) -> None:
    """Replace the parts of a detector whose type depends on their weights', in place.

    Their parameters, buffers and names stay, and without autocast their results, but for rounding.

    Args:
        model: transformers' model without heads of its own.
        library_config: the configuration that it was made from.
    """
    apply_in_convolutions(model.backbone, (DFineFrozenBatchNorm2d, RTDetrV2FrozenBatchNorm2d), TRANSFORMERS)
    for parent in list(model.modules()):
        for name, part in list(parent.named_children()):
            if isinstance(part, HGNetV2LearnableAffineBlock):
                setattr(parent, name, _Affine(part))
            elif isinstance(part, DFineIntegral):
                setattr(parent, name, _ExactIntegral(library_config))


class _Affine(HGNetV2LearnableAffineBlock):
    """A scale and a shift for all channels, in the type of what they change.

    With 16 bits in, the fp32 parameters would give 32, which the next convolution casts back.
    """

    def __init__(self, part: HGNetV2LearnableAffineBlock) -> None:
        super().__init__()
        self.scale, self.bias = part.scale, part.bias

    def forward(self, hidden_state: Tensor) -> Tensor:
        scale, shift = self.scale.to(hidden_state.dtype), self.bias.to(hidden_state.dtype)
        # One operation, which rounds once.
        return torch.addcmul(shift, hidden_state, scale)


class _ExactIntegral(DFineIntegral):
    """Distances from distributions, in fp32: in bf16 a side would move by pixels."""

    def forward(self, pred_corners: Tensor, project: Tensor) -> Tensor:
        with torch.autocast(pred_corners.device.type, enabled=False):
            return super().forward(at_least_fp32(pred_corners), at_least_fp32(project))
