"""D-FINE (Peng et al. 2024, arXiv:2410.13842) and RT-DETRv2 (Lv et al. 2024, arXiv:2407.17140).

Sources of the tensor names: `state_dict` of the networks in src/zoo/dfine of github.com/Peterande/D-FINE
(4a1f73a) and in rtdetrv2_pytorch/src/zoo/rtdetr of github.com/lyuwenyu/RT-DETR (068dfde).
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DFineForObjectDetection, RTDetrV2ForObjectDetection
from transformers.models.d_fine import modeling_d_fine as d_fine
from transformers.models.rt_detr_v2 import modeling_rt_detr_v2 as rt_detr

from trainer.model.batchnorm_folding import TRANSFORMERS_PAIRS, apply_in_convolutions
from trainer.model.detr.criterion import Criterion
from trainer.model.detr.detector import Detr
from trainer.model.detr.modules import XAVIER, Fp32Integral, initialize_weights, use_fast_dtype_modules
from trainer.model.detr.tensor_names import DFINE_MLP, HGNET, HYBRID, RenameRules, TensorRules
from trainer.model.dfine.deformable_attention import sample_features
from trainer.model.dfine.options import DFineOptions, RTDetrOptions

_XAVIER = XAVIER + r"|decoder_input_proj\.\d+\.0"  # for D-FINE these layers use PyTorch's default
_RESNET: RenameRules = (
    *((rf"^conv1\.conv1_{place + 1}\.", f"embedder.embedder.{place}.") for place in range(3)),
    (r"^res_layers\.(\d+)\.blocks\.", r"encoder.stages.\1.layers."),
    *((rf"\.branch2{letter}\.", f".layer.{place}.") for place, letter in enumerate("abc")),
    (r"\.short\.conv\.(?=conv|norm)", ".shortcut.1."),
    (r"\.short\.", ".shortcut."),
    (r"\.conv\.", ".convolution."),
    (r"\.norm\.", ".normalization."),
)
"""Rules for ResNet-vd."""
_RTDETR_MLP: RenameRules = (
    (r"\.num_points_scale$", ".n_points_scale"),
    (r"(?<!\.mlp)\.(?:linear|fc)([12])\.", r".mlp.fc\1."),
)
_DFINE = TensorRules("model.backbone.model.", HGNET, (*HYBRID, *DFINE_MLP))
_RTDETR = TensorRules("model.backbone.model.", _RESNET, (*HYBRID, *_RTDETR_MLP))


class DFine(Detr):
    """D-FINE."""

    config: DFineOptions
    needs_global_matches = True
    upstream = DFineForObjectDetection
    label = "D-FINE"
    reorders_corners = True
    checking_layers = (d_fine.DFineEncoderLayer,)
    tensor_rules = _DFINE

    def build_network(self, whole: Any) -> None:
        # Without the outer model, which has the heads a second time under other names.
        self.model = whole.model
        initialize_weights(self.model, self.backbone)
        use_fast_dtype_modules(self.model)
        apply_in_convolutions(self.backbone, (d_fine.DFineFrozenBatchNorm2d,), TRANSFORMERS_PAIRS)
        decoder = self.model.decoder
        decoder.integral = Fp32Integral(self.library_config)
        for layer in decoder.layers:
            layer.encoder_attn.ms_deformable_attn_core = sample_features
        if self.config.frozen_stem:
            self.backbone.model.embedder.requires_grad_(False)

    def make_criterion(self) -> Criterion:
        return Criterion(self.library_config.max_num_bins, self.library_config.reg_scale)


class RTDetr(Detr):
    """RT-DETRv2."""

    config: RTDetrOptions
    upstream = RTDetrV2ForObjectDetection
    label = "RT-DETRv2"
    checking_layers = (rt_detr.RTDetrV2EncoderLayer,)
    tensor_rules = _RTDETR

    def build_network(self, whole: Any) -> None:
        # Without the outer model, which has the heads a second time under other names.
        self.model = whole.model
        initialize_weights(self.model, self.backbone, _XAVIER)
        apply_in_convolutions(self.backbone, (rt_detr.RTDetrV2FrozenBatchNorm2d,), TRANSFORMERS_PAIRS)
        if self.config.frozen_stem:
            self.backbone.model.embedder.requires_grad_(False)

    def make_criterion(self) -> Criterion:
        return Criterion()

    def connect_box_gradients(self, boxes: Tensor) -> Tensor:
        """Propagate gradients from each layer's box to the previous layer's box, which transformers detaches.

        Values do not change. Source: `TransformerDecoder` in
        rtdetrv2_pytorch/src/zoo/rtdetr/rtdetrv2_decoder.py of github.com/lyuwenyu/RT-DETR (068dfde).
        """
        if not torch.is_grad_enabled():
            return boxes
        later, before = boxes[:, 1:], rt_detr.inverse_sigmoid(boxes[:, :-1])
        slope = (later * (1 - later)).detach()
        return torch.cat([boxes[:, :1], later + slope * (before - before.detach())], dim=1)
