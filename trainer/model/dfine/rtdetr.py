"""RT-DETRv2 (Lv et al. 2024)."""

from typing import Any

import torch
from torch import Tensor
from transformers import RTDetrV2ForObjectDetection
from transformers.models.rt_detr_v2 import modeling_rt_detr_v2 as rt_detr

from trainer.model.batchnorm_folding import TRANSFORMERS_PAIRS, apply_in_convolutions
from trainer.model.detr.criterion import Criterion
from trainer.model.detr.detector import Detr
from trainer.model.detr.modules import XAVIER, draw_first_weights
from trainer.model.detr.tensor_names import TensorRules
from trainer.model.dfine import tensor_names
from trainer.model.dfine.options import RTDetrOptions

_XAVIER = XAVIER + r"|decoder_input_proj\.\d+\.0"  # D-FINE's authors leave these to PyTorch


class RTDetr(Detr):
    """RT-DETRv2."""

    config: RTDetrOptions
    upstream = RTDetrV2ForObjectDetection
    label = "RT-DETRv2"
    checking = (rt_detr.RTDetrV2EncoderLayer,)

    def compose(self, whole: Any) -> None:
        # Without the outer model, which has the heads a second time under other names.
        self.model = whole.model
        draw_first_weights(self.model, self.backbone, _XAVIER)
        apply_in_convolutions(self.backbone, (rt_detr.RTDetrV2FrozenBatchNorm2d,), TRANSFORMERS_PAIRS)
        if self.config.frozen_stem:
            self.backbone.model.embedder.requires_grad_(False)

    @property
    def tensor_rules(self) -> TensorRules:
        return tensor_names.RTDETR

    def make_criterion(self) -> Criterion:
        return Criterion()

    def connect_layers(self, boxes: Tensor) -> Tensor:
        """Let each layer's box also train the box of the layer before, which transformers detaches.

        Only gradients change. Source: `TransformerDecoder` in
        rtdetrv2_pytorch/src/zoo/rtdetr/rtdetrv2_decoder.py of github.com/lyuwenyu/RT-DETR (068dfde).
        """
        if not torch.is_grad_enabled():
            return boxes
        later, before = boxes[:, 1:], rt_detr.inverse_sigmoid(boxes[:, :-1])
        slope = (later * (1 - later)).detach()
        return torch.cat([boxes[:, :1], later + slope * (before - before.detach())], dim=1)
