"""DEIMv2 (arXiv:2509.20787): transformers' network with its authors' selection of queries and losses."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Deimv2ForObjectDetection
from transformers.models.deimv2.modeling_deimv2 import Deimv2MLP

from trainer.model.architecture import UpstreamWeights
from trainer.model.architectures.detr.deim_options import Deimv2Options, library_arguments
from trainer.model.architectures.detr.detr import Detr, narrowed
from trainer.model.architectures.detr.detr_criterion import Criterion
from trainer.model.architectures.detr.detr_losses import mal
from trainer.model.architectures.detr.detr_options import Arguments

_WEIGHTS = {"mal": 1.0, "bbox": 5.0, "giou": 2.0, "fgl": 0.15, "ddf": 1.5}


class Deimv2(Detr):
    """DEIMv2 (Huang et al. 2025)."""

    config: Deimv2Options
    upstream = Deimv2ForObjectDetection
    unfolds_boxes = True

    def __init__(self, config: Deimv2Options, num_classes: int) -> None:
        super().__init__(config, num_classes)
        self.needs_survey = not config.lite

    @property
    def backbone(self) -> Any:
        return self.model.conv_encoder.model

    @property
    def layout(self) -> str:
        return "deimv2 lite" if self.config.lite else "deimv2"

    def arguments(self) -> Arguments:
        return library_arguments(self.config)

    def take(self, whole: Any) -> None:
        super().take(whole)
        # The authors' `DEIMTransformer` selects queries among the places themselves.
        self.model.enc_output = nn.Identity()
        # Their heads have another activation than transformers' (`mlp_act` in configs/base/deimv2.yml).
        for name, module in self.model.named_modules():
            if isinstance(module, Deimv2MLP) and not name.startswith("encoder."):
                module.act = nn.SiLU()

    def make_criterion(self) -> Criterion:
        bins = 0 if self.config.lite else self.library_config.max_num_bins
        return Criterion(bins, self.library_config.reg_scale, weights=_WEIGHTS, classification=mal)

    def features(self, pixels: Tensor) -> list[Tensor]:
        compiled = self._compiled if self.training and torch.is_grad_enabled() else None
        encoded = self.model.encoder(inputs_embeds=(compiled or self._levels)(pixels)).feature_maps
        return [project(level) for project, level in zip(self.model.decoder_input_proj, encoded, strict=True)]

    def _levels(self, pixels: Tensor) -> list[Tensor]:
        return list(self.model.conv_encoder(pixels))

    def upstream_weights(self, names: Sequence[str]) -> UpstreamWeights:
        """Weights under the names of transformers' modules, whose `enc_output` the network does not have."""
        return UpstreamWeights(self.state_dict(), len(names))

    @property
    def title(self) -> str:
        return f"DEIMv2 {self.config.size}{narrowed(self.config)}"
