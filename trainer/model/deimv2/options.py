"""Options of DEIMv2, and its published sizes."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from trainer.config.types import STRICT, Count, Fraction
from trainer.model.detr.options import Arguments, DetrOptions, hgnet_arguments, scale_channels

_NARROW: Arguments = {
    "decoder_layers": 3, "encoder_ffn_dim": 512, "hidden_expansion": 0.34, "depth_mult": 0.5,
}  # fmt: skip
_LITE: Arguments = _NARROW | {
    "encoder_type": "lite",
    "encoder_layers": 0,
    "share_bbox_head": True,
    "use_gateway": False,
    "decoder_n_points": [4, 2],
}
_DINO: Arguments = {
    "decoder_layers": 4, "encoder_ffn_dim": 512, "decoder_n_points": [3, 6, 3],
    "encoder_has_trailing_conv": False,
}  # fmt: skip
_SIZES: dict[str, tuple[tuple[int, ...], int, int, Arguments]] = {
    "atto": ((256, 1, 3), 64, 160, _LITE),
    "femto": ((512, 1, 5), 96, 256, _LITE),
    "pico": ((512, 2, 5), 112, 320, _LITE),
    "n": ((512, 2, 5, 1024), 128, 512, _NARROW | {"decoder_n_points": [6, 6]}),
    "s": ((192, 16), 192, 512, _DINO | {"hidden_expansion": 0.34, "depth_mult": 0.67}),
    "m": ((256, 16), 256, 512, _DINO | {"hidden_expansion": 0.67}),
    "l": ((384, 32), 224, 1792, _DINO | {"encoder_ffn_dim": 896}),
    "x": (
        (384, 64), 256, 2048,
        _DINO | {"decoder_layers": 6, "encoder_ffn_dim": 1024, "hidden_expansion": 1.25, "depth_mult": 1.37},
    ),
}  # fmt: skip
"""For each size: backbone, width of encoder and decoder, width of the decoder's feed-forward networks, and
arguments that differ from transformers' defaults. The backbone is given for PPHGNetV2 by the channels of the
third stage, its blocks and kernel size, and the channels of the fourth stage if any; for DINOv3 by its
channels and those of the parallel convolutions. Source: `configs/deimv2/*.yml` of
github.com/Intellindust-AI-Lab/DEIMv2 (0fff8d4), Apache-2.0."""


@dataclass(config=STRICT, frozen=True)
class Deimv2Options(DetrOptions):
    """DEIMv2 on PPHGNetV2 or DINOv3, implemented by transformers (extra `detr`)."""

    architecture: Literal["deimv2"] = "deimv2"
    size: Literal["atto", "femto", "pico", "n", "s", "m", "l", "x"] = "n"
    """Published size: 0.5, 1, 1.5, 3.6, 10, 18, 32 and 50 million parameters. The authors train the first
    three with 100, 150 and 200 queries at 320, 416 and 640 pixels. s to x use DINOv3: Meta's DINOv3 License
    applies to their weights and to models trained from them (docs/weights.md)."""
    denoising: Annotated[Count, Field(le=10_000)] = 100
    """Approximate number of pairs of denoising queries per image in training; 0 disables them."""
    backbone_lr: Fraction = 0.5
    """Learning rate of the backbone, relative to train.lr."""

    @property
    def is_lite(self) -> bool:
        """Whether the size uses the lightest encoder, which has fewer losses."""
        return self.size in ("atto", "femto", "pico")

    @property
    def uses_dino(self) -> bool:
        """Whether the backbone is a vision transformer combined with convolutions."""
        return self.size in ("s", "m", "l", "x")

    def arguments(self) -> Arguments:
        """Return the arguments of transformers' Deimv2Config for this size and width."""
        (net, hidden, feed_forward, size), width = _SIZES[self.size], self.width
        # Multiples of 16: the width is divided among eight heads, and position embeddings need even halves.
        hidden, feed_forward = scale_channels([hidden, feed_forward], width, 16)
        levels = len(size["decoder_n_points"])
        if self.uses_dino:
            # L and X use Meta's own network; the others use a smaller one without register tokens.
            heads, meta, gated = net[0] // 64, net[0] == 384, self.size == "x"
            (channels,), inward = scale_channels([net[0]], width, 8 * heads), [hidden] * levels
            backbone: Arguments = {
                "model_type": "dinov3_vit",
                "out_indices": [6, 9, 12] if meta else [4, 8, 12],
                "hidden_size": channels,
                "intermediate_size": 4 * channels,
                "num_attention_heads": heads,
                "num_register_tokens": 4 if meta else 0,
                "key_bias": not meta,
                "layer_norm_eps": 1e-5 if meta else 1e-6,
                "layerscale_value": 1e-5,
                "use_gated_mlp": gated,
                "hidden_act": "silu" if gated else "gelu",
                "pos_embed_rescale": None,
            }
            size = size | {"spatial_tuning_adapter_inplanes": scale_channels([net[1]], width)[0]}
        else:
            last, blocks, kernel, *fourth = net
            outward, stages = [64, 256, last, *fourth], 3 + len(fourth)
            backbone = hgnet_arguments(
                [16, 16],
                outward,
                [1, 1, blocks, 1][:stages],
                3,
                width,
                out_indices=[3, 4][: stages - 2],
                depths=[3] * stages,
                stage_kernel_size=[3, 3, kernel, kernel][:stages],
                stage_downsample=[False, True, True, True][:stages],
                stage_light_block=[False, False, True, True][:stages],
                use_learnable_affine_block=True,
            )
            inward = backbone["hidden_sizes"][2:]
        return {
            **size,
            "backbone_config": backbone,
            "freeze_backbone_batch_norms": False,
            "encoder_in_channels": inward,
            "encoder_hidden_dim": hidden,
            "encoder_ffn_dim": scale_channels([size["encoder_ffn_dim"]], width)[0],
            "encode_proj_layers": [levels - 1],
            "feat_strides": [8, 16, 32][-levels:],
            "d_model": hidden,
            "decoder_in_channels": [hidden] * levels,
            "decoder_ffn_dim": feed_forward,
            "decoder_activation_function": "silu",
            "num_feature_levels": levels,
            "num_queries": self.queries,
            "num_denoising": self.denoising,
        }
