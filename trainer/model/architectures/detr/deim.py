"""DEIMv2 (arXiv:2509.20787): transformers' network with its authors' selection of queries and losses."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import Deimv2ForObjectDetection
from transformers.models.deimv2.modeling_deimv2 import Deimv2EncoderLayer, Deimv2MLP, Deimv2RMSNorm
from transformers.models.dinov3_vit.modeling_dinov3_vit import DINOv3ViTLayerScale

from trainer.model.architecture import UpstreamWeights
from trainer.model.architectures.detr.deim_options import Deimv2Options
from trainer.model.architectures.detr.detr import DFine
from trainer.model.architectures.detr.detr_criterion import Criterion, mal

_WEIGHTS = {"mal": 1.0, "bbox": 5.0, "giou": 2.0, "fgl": 0.15, "ddf": 1.5}


class Deimv2(DFine):
    """DEIMv2 (Huang et al. 2025)."""

    config: Any  # Deimv2Options
    upstream: Any = Deimv2ForObjectDetection
    label = "DEIMv2"
    checking = (Deimv2EncoderLayer,)
    moves_positions = False

    def __init__(self, config: Deimv2Options, num_classes: int) -> None:
        self.pixel_scale = config.dino
        super().__init__(config, num_classes)
        self.needs_survey = not config.lite

    @property
    def backbone(self) -> Any:
        return self.model.conv_encoder.backbone if self.config.dino else self.model.conv_encoder.model

    @property
    def layout(self) -> str:
        return "deimv2 dino" if self.config.dino else "deimv2 lite" if self.config.lite else "deimv2"

    def take(self, whole: Any) -> None:
        super().take(whole)
        # The authors' `DEIMTransformer` selects queries among the places themselves.
        self.model.enc_output = nn.Identity()
        for name, module in list(self.model.named_modules()):
            if isinstance(module, Deimv2RMSNorm):
                self.model.set_submodule(name, _Norm(len(module.weight), module.variance_epsilon))
            elif isinstance(module, Deimv2MLP) and not name.startswith("encoder."):
                # The authors' heads have another activation (`mlp_act` in configs/base/deimv2.yml).
                module.act = nn.SiLU()
        if self.config.dino:
            _as_the_authors(self.backbone)

    def make_criterion(self) -> Criterion:
        bins = 0 if self.config.lite else self.library_config.max_num_bins
        return Criterion(bins, self.library_config.reg_scale, weights=_WEIGHTS, classification=mal)

    def features(self, pixels: Tensor) -> list[Tensor]:
        encoded = self.model.encoder(inputs_embeds=self.backbone_levels(pixels)).feature_maps
        return [project(level) for project, level in zip(self.model.decoder_input_proj, encoded, strict=True)]

    def _levels(self, pixels: Tensor) -> list[Tensor]:
        return list(self.model.conv_encoder(pixels))

    def upstream_weights(self, names: Sequence[str]) -> UpstreamWeights:
        """Weights under the names of transformers' modules, some of which the network does not have."""
        return UpstreamWeights(self.state_dict(), len(names))


class _Norm(nn.RMSNorm):
    """In the precision of the weights: transformers' computes in fp32, also of fp64."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def _as_the_authors(backbone: Any) -> None:
    """Remove, in place, what DINOv3 has and the authors' vision transformer has not.

    Source: `VisionTransformer` in engine/backbone/vit_tiny.py and `DinoVisionTransformer` in
    engine/backbone/dinov3 of github.com/Intellindust-AI-Lab/DEIMv2 (0fff8d4).
    """
    del backbone.embeddings.mask_token  # nothing depends on it
    if not backbone.config.num_register_tokens:
        backbone.norm = nn.Identity()
        tokens = backbone.embeddings.register_tokens
        del backbone.embeddings.register_tokens
        backbone.embeddings.register_buffer("register_tokens", tokens.detach(), persistent=False)
        for name, module in list(backbone.named_modules()):
            if isinstance(module, DINOv3ViTLayerScale):
                backbone.set_submodule(name, nn.Identity())
