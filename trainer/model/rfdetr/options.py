"""Options of RF-DETR, and its published sizes."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from trainer.config.types import STRICT, Depth, Fraction, Shapes
from trainer.model.detr.options import Arguments, DetrOptions, scale_channels

_RF: Arguments = {
    "model_type": "rf_detr_dinov2", "patch_size": 16, "num_attention_heads": 6, "num_windows": 2,
    "out_indices": [3, 6, 9, 12],
}  # fmt: skip
_SIZES: dict[str, tuple[int, int]] = {
    "nano": (384, 2), "small": (512, 3), "medium": (576, 4), "large": (704, 4)
}  # fmt: skip
"""Input size in pixels and number of decoder layers. Source: `rfdetr/config.py` of
github.com/roboflow/rf-detr (35ac6ab, Apache-2.0)."""
_CHANNELS, _HIDDEN = 384, 256  # width of the vision transformer and of the decoder
_HEAD = 32  # channels of a self-attention head of the decoder; cross-attention heads have half


@dataclass(config=STRICT, frozen=True)
class RFDetrOptions(DetrOptions):
    """RF-DETR on DINOv2 with windowed attention, implemented by transformers (extra `detr`)."""

    architecture: Literal["rfdetr"] = "rfdetr"
    size: Literal["nano", "small", "medium", "large"] = "nano"
    """Published size: 30, 32, 34 and 34 million parameters, at 384, 512, 576 and 704 pixels."""
    groups: Depth = 13
    """Number of groups of queries in training, each matched separately (Group DETR, arXiv:2207.13085).
    Predictions use the first group."""
    backbone_lr: Annotated[float, Field(ge=0)] = 1.5
    """Learning rate of the vision transformer after its last block, relative to train.lr."""
    layer_decay: Fraction = 0.8
    """Learning rate of each block of the vision transformer, relative to the next block."""

    def options_from_weights(self, config_json: Mapping[str, Any], shapes: Shapes) -> Arguments:
        """Return `queries` and `groups` of a detector's weights; without config.json `groups` is kept."""
        rows = next((sides[0] for name, sides in shapes.items() if name.endswith("query_feat.weight")), 0)
        groups = config_json.get("group_detr") or self.groups
        return {"groups": groups, "queries": rows // groups} if rows else {}

    def arguments(self) -> Arguments:
        """Return the arguments of transformers' RfDetrConfig for this size and width."""
        side, layers = _SIZES[self.size]
        (hidden,) = scale_channels([_HIDDEN], self.width, _HEAD)
        return {
            "decoder_n_points": 2,
            "decoder_layers": layers,
            # As in rfdetr/models/backbone/projector.py; transformers' default is 1e-5.
            "layer_norm_eps": 1e-6,
            # Channels must be divisible by 6 or 12 heads.
            "backbone_config": _RF
            | {
                "image_size": side,
                "hidden_size": scale_channels([_CHANNELS], self.width, 24)[0],
            },
            "d_model": hidden,
            "dropout": 0.0,
            "decoder_ffn_dim": scale_channels([2048], self.width)[0],
            "decoder_self_attention_heads": hidden // _HEAD,
            "decoder_cross_attention_heads": 2 * hidden // _HEAD,
            "num_queries": self.queries,
            "group_detr": self.groups,
        }
