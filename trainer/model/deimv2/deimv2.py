"""DEIMv2 (arXiv:2509.20787): transformers' network with its authors' selection of queries and losses."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import Deimv2ForObjectDetection
from transformers.models.deimv2.modeling_deimv2 import Deimv2EncoderLayer

from trainer.model.architecture import UpstreamWeights
from trainer.model.deimv2 import tensor_names
from trainer.model.deimv2.network import Decoder, adapt_dino, adapt_layers
from trainer.model.deimv2.options import Deimv2Options
from trainer.model.detr.criterion import Criterion, mal
from trainer.model.detr.detector import Detr
from trainer.model.detr.modules import adapt_types, draw_first_weights
from trainer.model.detr.tensor_names import TensorRules

_WEIGHTS = {"mal": 1.0, "bbox": 5.0, "giou": 2.0, "fgl": 0.15, "ddf": 1.5}


class Deimv2(Detr):
    """DEIMv2 (Huang et al. 2025)."""

    config: Deimv2Options
    upstream = Deimv2ForObjectDetection
    label = "DEIMv2"
    unfolds_boxes = True
    checking = (Deimv2EncoderLayer,)

    def __init__(self, config: Deimv2Options, num_classes: int) -> None:
        self.pixel_scale = config.dino
        super().__init__(config, num_classes)
        self.needs_global_matches = not config.lite

    def compose(self, whole: Any) -> None:
        self.model = whole.model
        self.model.decoder = Decoder(self.library_config, self.model.decoder)
        draw_first_weights(self.model, self.backbone)
        # The authors' `DEIMTransformer` selects queries among the locations themselves.
        self.model.enc_output = nn.Identity()
        adapt_layers(self.model)
        adapt_types(self.model)
        if self.config.dino:
            adapt_dino(self.backbone)

    @property
    def backbone(self) -> Any:
        return self.model.conv_encoder.backbone if self.config.dino else self.model.conv_encoder.model

    @property
    def tensor_rules(self) -> TensorRules:
        if self.config.dino:
            return tensor_names.DINO_SIZES
        return tensor_names.LITE_SIZES if self.config.lite else tensor_names.HGNET_SIZES

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
