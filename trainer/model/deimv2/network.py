"""Parts of DEIMv2 as its authors compute them, where transformers' differ.

Sources: `DEIMTransformer` and `TransformerDecoder` in engine/deim, `VisionTransformer` in
engine/backbone/vit_tiny.py and `DinoVisionTransformer` in engine/backbone/dinov3 of
github.com/Intellindust-AI-Lab/DEIMv2 (0fff8d4).
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deimv2 import modeling_deimv2 as deimv2
from transformers.models.dinov3_vit.modeling_dinov3_vit import DINOv3ViTEmbeddings, DINOv3ViTLayerScale

from trainer.model.detr.criterion import at_least_fp32
from trainer.model.detr.modules import replace_modules


class DecoderLayer(deimv2.Deimv2DecoderLayer):
    """A layer that knows a query's location from its first box, not from the box of the layer before."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: Tensor | None = None,
        *,
        first_position: Tensor,
        **inputs: Any,
    ) -> Tensor:
        return super().forward(hidden_states, first_position, **inputs)


class Decoder(deimv2.Deimv2Decoder):
    """The decoder with such layers, and the heads of transformers' own."""

    def __init__(self, config: Any, part: deimv2.Deimv2Decoder) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.class_embed, self.bbox_embed = part.class_embed, part.bbox_embed
        self.integral = _ExactIntegral(config)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, *, reference_points: Tensor, **inputs: Any) -> Any:
        position = self.query_pos_head(reference_points.sigmoid()).clamp(min=-10, max=10)
        return super().forward(reference_points=reference_points, first_position=position, **inputs)


class _ExactIntegral(deimv2.Deimv2Integral):
    """Mean distances of distributions in fp32: in bf16 boxes would have a precision of eight bits."""

    def forward(self, pred_corners: Tensor, project: Tensor) -> Tensor:
        with torch.autocast(pred_corners.device.type, enabled=False):
            return super().forward(at_least_fp32(pred_corners), project)


class _RMSNorm(nn.RMSNorm):
    """In the precision of the weights: transformers' computes in fp32, also of fp64."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def adapt_layers(model: nn.Module) -> None:
    """Replace norms, and the activation of heads and decoder, in place."""
    replace_modules(
        model, deimv2.Deimv2RMSNorm, lambda norm: _RMSNorm(len(norm.weight), norm.variance_epsilon)
    )
    for name, module in model.named_modules():
        if isinstance(module, deimv2.Deimv2MLP) and not name.startswith("encoder."):
            module.act = nn.SiLU()  # `mlp_act` in configs/base/deimv2.yml


class PatchEmbeddings(nn.Module):
    """Class token, register tokens if there are any, and patches of an image; without a mask token."""

    def __init__(self, part: DINOv3ViTEmbeddings) -> None:
        super().__init__()
        self.cls_token, self.patch_embeddings = part.cls_token, part.patch_embeddings
        self.register_tokens = part.register_tokens if part.config.num_register_tokens else None

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embeddings(pixels).flatten(2).transpose(1, 2)
        tokens = [token for token in (self.cls_token, self.register_tokens) if token is not None]
        return torch.cat([*(token.expand(patches.shape[0], -1, -1) for token in tokens), patches], dim=1)


def adapt_dino(backbone: Any) -> None:
    """Replace what DINOv3 has and the authors' vision transformers have not, in place."""
    backbone.embeddings = PatchEmbeddings(backbone.embeddings)
    if not backbone.config.num_register_tokens:
        # The authors' smaller network has neither a last norm nor scales of layers.
        backbone.norm = nn.Identity()
        replace_modules(backbone, DINOv3ViTLayerScale, lambda scale: nn.Identity())
