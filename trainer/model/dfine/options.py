"""Options of D-FINE and RT-DETRv2, and their published sizes."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from trainer.config.types import STRICT, Count, Fraction
from trainer.model.detr.options import UNIT, Arguments, DetrOptions, hgnet_arguments, scale_channels

_BACKBONES = {
    "b0": ([16, 16], 64, [1, 1, 2, 1], 3),
    "b2": ([24, 32], 96, [1, 1, 3, 1], 4),
    "b4": ([32, 48], 128, [1, 1, 3, 1], 6),
    "b5": ([32, 64], 128, [1, 2, 5, 2], 6),
}
"""PPHGNetV2: channels of the stem and after the first stage, blocks of each stage, layers of each block. In
b0 and b2 a learned scale and shift follow each activation."""
_DFINE: dict[str, tuple[str, Arguments]] = {
    "n": (
        "b0",
        {
            "encoder_hidden_dim": 128,
            "encoder_ffn_dim": 512,
            "decoder_ffn_dim": 512,
            "decoder_n_points": [6, 6],
            "decoder_layers": 3,
            "hidden_expansion": 0.34,
            "depth_mult": 0.5,
        },
    ),
    "s": ("b0", {"decoder_layers": 3, "hidden_expansion": 0.5, "depth_mult": 0.34}),
    "m": ("b2", {"decoder_layers": 4, "depth_mult": 0.67}),
    "l": ("b4", {}),
    "x": ("b5", {"encoder_hidden_dim": 384, "encoder_ffn_dim": 2048, "reg_scale": 8.0}),
}
"""Backbone of each size, and transformers' arguments that differ from those of D-FINE-L. Source:
`configs/dfine/dfine_hgnetv2_{n,s,m,l,x}_coco.yml` of github.com/Peterande/D-FINE (4a1f73a, Apache-2.0)."""
_RTDETR: dict[str, tuple[Arguments, Arguments]] = {
    "r18": ({"depths": [2, 2, 2, 2], "layer_type": "basic"}, {"decoder_layers": 3, "hidden_expansion": 0.5}),
    "r34": ({"layer_type": "basic"}, {"decoder_layers": 4, "hidden_expansion": 0.5}),
    "r50": ({}, {}),
    "r101": ({"depths": [3, 4, 23, 3]}, {"encoder_hidden_dim": 384, "encoder_ffn_dim": 2048}),
}
"""Arguments of backbone and detector of each size that differ from those of RT-DETRv2-R50. Source:
`rtdetrv2_pytorch/configs/rtdetrv2` of github.com/lyuwenyu/RT-DETR (068dfde, Apache-2.0)."""


@dataclass(config=STRICT, frozen=True)
class HybridEncoderOptions(DetrOptions):
    """Options of D-FINE and RT-DETRv2, which have the same encoder."""

    denoising: Annotated[Count, Field(le=10_000)] = 100
    """Approximate number of pairs of denoising queries per image in training; 0 disables them."""
    frozen_norm: bool = False
    """Freeze the BatchNorm layers of the pretrained backbone, as the authors do for D-FINE-L and X and for
    RT-DETRv2 on ResNet50 and 101."""
    frozen_stem: bool = False
    """Freeze the first convolutions of the pretrained backbone, as the authors do for the same models."""
    backbone_lr: Fraction = 0.1
    """Learning rate of the backbone, relative to train.lr."""

    def unfreezing_options(self) -> Arguments:
        """Return the freezing options in use, with values that train all weights."""
        return {key: False for key in ("frozen_norm", "frozen_stem") if getattr(self, key)}

    def encoder_and_decoder_arguments(self, size: Arguments, backbone: Arguments, levels: int) -> Arguments:
        """Return transformers' arguments for encoder and decoder of a published size on a backbone."""
        widths = {"encoder_hidden_dim": 256, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024, **size}
        # The width is divided among eight heads.
        (hidden,) = scale_channels([widths["encoder_hidden_dim"]], self.width, 4 * UNIT)
        return {
            **size,
            "backbone_config": backbone,
            "encoder_in_channels": backbone["hidden_sizes"][-levels:],
            # The queries of X and R101 are 256 wide although the encoder is 384 wide.
            "d_model": min(hidden, 256),
            "encoder_hidden_dim": hidden,
            "decoder_in_channels": [hidden] * levels,
            **{
                key: scale_channels([widths[key]], self.width)[0]
                for key in ("encoder_ffn_dim", "decoder_ffn_dim")
            },
            "num_queries": self.queries,
            "num_denoising": self.denoising,
            "freeze_backbone_batch_norms": self.frozen_norm,
        }


@dataclass(config=STRICT, frozen=True)
class DFineOptions(HybridEncoderOptions):
    """D-FINE on PPHGNetV2, implemented by transformers (extra `detr`)."""

    architecture: Literal["dfine"] = "dfine"
    size: Literal["n", "s", "m", "l", "x"] = "s"
    """Published size: n has 4, s 10, m 20, l 31 and x 63 million parameters."""

    def arguments(self) -> Arguments:
        """Return the arguments of transformers' DFineConfig for this size and width."""
        net, size = _DFINE[self.size]
        size = {"decoder_n_points": [3, 6, 3], **size}
        # D-FINE-N uses the last two levels of the backbone; other sizes use three.
        levels = len(size["decoder_n_points"])
        stem, first, blocks, layers = _BACKBONES[net]
        backbone = hgnet_arguments(
            stem,
            [first * factor for factor in (1, 4, 8, 16)],
            blocks,
            layers,
            self.width,
            out_indices=[2, 3, 4][-levels:],
            use_learnable_affine_block=net in ("b0", "b2"),
        )
        return self.encoder_and_decoder_arguments(size, backbone, levels) | {
            "feat_strides": [8, 16, 32][-levels:],
            "encode_proj_layers": [levels - 1],
            "num_feature_levels": levels,
        }


@dataclass(config=STRICT, frozen=True)
class RTDetrOptions(HybridEncoderOptions):
    """RT-DETRv2 on ResNet-vd, implemented by transformers (extra `detr`)."""

    architecture: Literal["rtdetr"] = "rtdetr"
    size: Literal["r18", "r34", "r50", "r101"] = "r50"
    """Published backbone: the detector has 20 (r18), 31 (r34), 43 (r50) or 77 (r101) million parameters."""

    def arguments(self) -> Arguments:
        """Return the arguments of transformers' RTDetrV2Config for this size and width."""
        backbone, size = _RTDETR[self.size]
        basic = backbone.get("layer_type") == "basic"
        outward = [64, 128, 256, 512] if basic else [256, 512, 1024, 2048]
        backbone = {
            **backbone,
            "model_type": "rt_detr_resnet",
            "out_indices": [2, 3, 4],
            "embedding_size": scale_channels([64], self.width, 2 * UNIT)[0],
            "hidden_sizes": scale_channels(outward, self.width),
        }
        return self.encoder_and_decoder_arguments(size, backbone, levels=3)
