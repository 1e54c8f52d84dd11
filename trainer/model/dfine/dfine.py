"""D-FINE (Peng et al. 2024)."""

from typing import Any

import torch
from torch import Tensor
from transformers import DFineForObjectDetection
from transformers.models.d_fine import modeling_d_fine as d_fine

from trainer.model.batchnorm_folding import TRANSFORMERS_PAIRS, apply_in_convolutions
from trainer.model.detr.criterion import Criterion, at_least_fp32
from trainer.model.detr.detector import Detr
from trainer.model.detr.modules import adapt_types, draw_first_weights
from trainer.model.detr.tensor_names import TensorRules
from trainer.model.dfine import tensor_names
from trainer.model.dfine.deformable_attention import sample_features
from trainer.model.dfine.options import DFineOptions


class DFine(Detr):
    """D-FINE."""

    config: DFineOptions
    needs_global_matches = True
    upstream = DFineForObjectDetection
    label = "D-FINE"
    unfolds_boxes = True
    checking = (d_fine.DFineEncoderLayer,)

    def compose(self, whole: Any) -> None:
        # Without the outer model, which has the heads a second time under other names.
        self.model = whole.model
        draw_first_weights(self.model, self.backbone)
        adapt_types(self.model)
        apply_in_convolutions(self.backbone, (d_fine.DFineFrozenBatchNorm2d,), TRANSFORMERS_PAIRS)
        decoder = self.model.decoder
        decoder.integral = _ExactIntegral(self.library_config)
        for layer in decoder.layers:
            layer.encoder_attn.ms_deformable_attn_core = sample_features
        if self.config.frozen_stem:
            self.backbone.model.embedder.requires_grad_(False)

    @property
    def tensor_rules(self) -> TensorRules:
        return tensor_names.DFINE

    def make_criterion(self) -> Criterion:
        return Criterion(self.library_config.max_num_bins, self.library_config.reg_scale)


class _ExactIntegral(d_fine.DFineIntegral):
    """Mean distances of distributions in fp32: in bf16 boxes would have a precision of eight bits."""

    def forward(self, pred_corners: Tensor, project: Tensor) -> Tensor:
        with torch.autocast(pred_corners.device.type, enabled=False):
            return super().forward(at_least_fp32(pred_corners), project)
