"""DEIMv2 (Huang et al. 2025, arXiv:2509.20787): transformers' network with the authors' losses, selection of
queries, and other parts that differ in transformers.

Sources: `DEIMTransformer` and `TransformerDecoder` in engine/deim, `VisionTransformer` in
engine/backbone/vit_tiny.py and `DinoVisionTransformer` in engine/backbone/dinov3 of
github.com/Intellindust-AI-Lab/DEIMv2 (0fff8d4), and `state_dict` of these networks for the tensor names.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Deimv2ForObjectDetection
from transformers.models.deimv2 import modeling_deimv2 as library
from transformers.models.dinov3_vit.modeling_dinov3_vit import DINOv3ViTEmbeddings, DINOv3ViTLayerScale

from trainer.model.architecture import UpstreamWeights
from trainer.model.deimv2.options import Deimv2Options
from trainer.model.detr.criterion import Criterion, mal_loss
from trainer.model.detr.detector import Detr
from trainer.model.detr.modules import (
    Fp32Integral,
    initialize_weights,
    replace_modules,
    use_fast_dtype_modules,
)
from trainer.model.detr.tensor_names import DFINE_MLP, HGNET, HYBRID, RenameRules, TensorRules

_WEIGHTS = {"mal": 1.0, "bbox": 5.0, "giou": 2.0, "fgl": 0.15, "ddf": 1.5}
_DEIM_DINO: RenameRules = (
    (r"^.*(mask_token|rope_embed\.periods|bias_mask)$", ""),  # constants
    (r"^(dinov3\.)?(_model\.)?(?=(cls_token|storage_tokens|patch_embed|blocks|norm)\b)", "backbone."),
    (r"^backbone\.blocks\.", "backbone.model.layer."),
    (r"^backbone\.cls_token$", "backbone.embeddings.cls_token"),
    (r"^backbone\.storage_tokens$", "backbone.embeddings.register_tokens"),
    (r"^backbone\.patch_embed\.proj\.", "backbone.embeddings.patch_embeddings."),
    (r"\.attn\.proj\.", ".attention.o_proj."),
    (r"\.attn\.", ".attention."),
    (r"\.ls(\d)\.gamma$", r".layer_scale\1.lambda1"),
    (r"\.mlp\.w1\.", ".mlp.gate_proj."),
    (r"\.mlp\.(fc1|w2)\.", ".mlp.up_proj."),
    (r"\.mlp\.(fc2|w3)\.", ".mlp.down_proj."),
    (r"^(conv|norm)s\.(\d)\.", r"fusion_proj.\2.\1."),
    (r"^sta\.(stem\.0|conv2\.0|conv[34]\.1)\.", r"sta.\1.conv."),
    (r"^sta\.(stem\.1|conv2\.1|conv[34]\.2)\.", r"sta.\1.norm."),
    (r"^sta\.stem\.\d\.", "spatial_tuning_adapter.stem_conv."),
    (r"^sta\.conv(\d)\.\d\.", r"spatial_tuning_adapter.conv\1."),
)
"""Rules for the backbone of DEIMv2 on DINOv3, and for Meta's DINOv3."""
_DEIM_LITE: RenameRules = (
    (r"(_blocks?(?:\.\d+)?)\.cv1\.", r"\1.conv1."),
    (r"(_blocks?(?:\.\d+)?)\.cv2\.0\.", r"\1.csp_rep1."),
    (r"(_blocks?(?:\.\d+)?)\.cv2\.1\.", r"\1.csp_rep1.conv2."),
    (r"(_blocks?(?:\.\d+)?)\.cv3\.0\.", r"\1.csp_rep2."),
    (r"(_blocks?(?:\.\d+)?)\.cv3\.1\.", r"\1.csp_rep2.conv2."),
    (r"(_blocks?(?:\.\d+)?)\.cv4\.", r"\1.conv2."),
    (r"^encoder\.down_sample(\d)\.1\.", r"encoder.down_conv\1.conv."),
    (r"^encoder\.down_sample(\d)\.2\.", r"encoder.down_conv\1.norm."),
    (r"^encoder\.bi_fusion\.cv\.", "encoder.bi_fusion_conv."),
    (r"^encoder\.input_proj\.(?=\d)", "encoder.input+proj."),
    (r"^(decoder\..*)\.scale$", r"\1.weight"),
    (r"\.swish_ffn\.w3\.", ".mlp.down_proj."),
    *HYBRID,
    *DFINE_MLP,
    (r"\+", "_"),
)
"""Rules for encoder and decoder of the sizes with `LiteEncoder`, which contains the input projections."""
_DEIM: RenameRules = ((r"^encoder\.input_proj\.", "conv_encoder.encoder_input_proj."), *_DEIM_LITE)
_HGNET = TensorRules("model.conv_encoder.model.", HGNET, _DEIM)
_LITE = TensorRules("model.conv_encoder.model.", HGNET, _DEIM_LITE)
_DINO = TensorRules("model.conv_encoder.", _DEIM_DINO, _DEIM)


class Deimv2(Detr):
    """DEIMv2."""

    config: Deimv2Options
    upstream = Deimv2ForObjectDetection
    label = "DEIMv2"
    reorders_corners = True
    checking_layers = (library.Deimv2EncoderLayer,)

    def __init__(self, config: Deimv2Options, num_classes: int) -> None:
        self.normalizes_pixels = config.uses_dino
        self.tensor_rules = _DINO if config.uses_dino else _LITE if config.is_lite else _HGNET
        super().__init__(config, num_classes)
        self.needs_global_matches = not config.is_lite

    def build_network(self, whole: Any) -> None:
        self.model = whole.model
        self.model.decoder = Decoder(self.library_config, self.model.decoder)
        initialize_weights(self.model, self.backbone)
        # The authors' `DEIMTransformer` selects queries among the locations themselves.
        self.model.enc_output = nn.Identity()
        adapt_layers(self.model)
        use_fast_dtype_modules(self.model)
        if self.config.uses_dino:
            adapt_dino(self.backbone)

    @property
    def backbone(self) -> Any:
        return self.model.conv_encoder.backbone if self.config.uses_dino else self.model.conv_encoder.model

    def make_criterion(self) -> Criterion:
        bins = 0 if self.config.is_lite else self.library_config.max_num_bins
        return Criterion(bins, self.library_config.reg_scale, weights=_WEIGHTS, classification=mal_loss)

    def features(self, pixels: Tensor) -> list[Tensor]:
        encoded = self.model.encoder(inputs_embeds=self.backbone_levels(pixels)).feature_maps
        return [project(level) for project, level in zip(self.model.decoder_input_proj, encoded, strict=True)]

    def _levels(self, pixels: Tensor) -> list[Tensor]:
        return list(self.model.conv_encoder(pixels))

    def upstream_weights(self, class_names: Sequence[str]) -> UpstreamWeights:
        """Return the weights under transformers' names, including modules that this network lacks."""
        return UpstreamWeights(self.state_dict(), len(class_names))


class DecoderLayer(library.Deimv2DecoderLayer):
    """A layer that embeds the location of a query's first box instead of the previous layer's box."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: Tensor | None = None,
        *,
        first_position: Tensor,
        **inputs: Any,
    ) -> Tensor:
        return super().forward(hidden_states, first_position, **inputs)


class Decoder(library.Deimv2Decoder):
    """transformers' decoder and heads, with layers of the class `DecoderLayer`."""

    def __init__(self, config: Any, part: library.Deimv2Decoder) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.class_embed, self.bbox_embed = part.class_embed, part.bbox_embed
        self.integral = Fp32Integral(config)  # type: ignore[assignment]  # A copy of D-FINE's in transformers.
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, *, reference_points: Tensor, **inputs: Any) -> Any:
        position = self.query_pos_head(reference_points.sigmoid()).clamp(min=-10, max=10)
        return super().forward(reference_points=reference_points, first_position=position, **inputs)


class _RMSNorm(nn.RMSNorm):
    """Computes in the precision of the weights, unlike transformers' norm, which always uses fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def adapt_layers(model: nn.Module) -> None:
    """Replace the norms, and the activation of heads and decoder, in place."""
    replace_modules(
        model, library.Deimv2RMSNorm, lambda norm: _RMSNorm(len(norm.weight), norm.variance_epsilon)
    )
    for name, module in model.named_modules():
        if isinstance(module, library.Deimv2MLP) and not name.startswith("encoder."):
            module.act = nn.SiLU()  # `mlp_act` in configs/base/deimv2.yml


class PatchEmbeddings(nn.Module):
    """Embeds an image as class token, optional register tokens and patches, without a mask token."""

    def __init__(self, part: DINOv3ViTEmbeddings) -> None:
        super().__init__()
        self.cls_token, self.patch_embeddings = part.cls_token, part.patch_embeddings
        self.register_tokens = part.register_tokens if part.config.num_register_tokens else None

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embeddings(pixels).flatten(2).transpose(1, 2)
        tokens = [token for token in (self.cls_token, self.register_tokens) if token is not None]
        return torch.cat([*(token.expand(patches.shape[0], -1, -1) for token in tokens), patches], dim=1)


def adapt_dino(backbone: Any) -> None:
    """Remove parts of DINOv3 that the authors' vision transformers lack, in place."""
    backbone.embeddings = PatchEmbeddings(backbone.embeddings)
    if not backbone.config.num_register_tokens:
        # The authors' smaller network has neither a final norm nor layer scales.
        backbone.norm = nn.Identity()
        replace_modules(backbone, DINOv3ViTLayerScale, lambda scale: nn.Identity())
