"""Options of DEIMv2, and its published sizes with PPHGNetV2."""

from typing import Literal, NamedTuple

from pydantic.dataclasses import dataclass

from trainer.config.types import STRICT, Count, Fraction
from trainer.model.architectures.detr.detr_options import Arguments, SetOptions, scaled


class _Size(NamedTuple):
    """A published size; the defaults are those with the lightest encoder."""

    hidden: int
    """Width of encoder and decoder."""
    feed_forward: int
    """Width of the decoder's feed-forward networks, both halves together."""
    net: tuple[int, ...]
    """PPHGNetV2: channels of the last stages, and blocks and kernel of the third."""
    layers: int = 3
    points: tuple[int, ...] = (4, 2)
    """Points that a query samples on each level."""
    encoder_feed_forward: int = 512
    expansion: float = 0.34
    """Width of the pyramid's blocks, and their depth."""
    depth: float = 0.5


_SIZES = {
    "atto": _Size(64, 160, net=(256, 1, 3)),
    "femto": _Size(96, 256, net=(512, 1, 5)),
    "pico": _Size(112, 320, net=(512, 2, 5)),
    "n": _Size(128, 512, net=(512, 2, 5, 1024), points=(6, 6)),
}  # fmt: skip
"""`configs/deimv2/*.yml` of github.com/Intellindust-AI-Lab/DEIMv2 (0fff8d4), Apache-2.0."""
_LITE = ("atto", "femto", "pico")


@dataclass(config=STRICT, frozen=True)
class Deimv2Options(SetOptions):
    """DEIMv2 on PPHGNetV2, by transformers (`pip install 'kubedet[detr]'`)."""

    architecture: Literal["deimv2"] = "deimv2"
    """Kind of detector. Each has its own options: those of another are refused."""
    size: Literal["atto", "femto", "pico", "n"] = "n"
    """Published size: 0.5, 1, 1.5 and 3.6 million parameters. The authors train the first three with 100, 150
    and 200 queries at 320, 416 and 640 pixels."""
    denoising: Count = 100
    """Approximate number of pairs of denoising queries of an image in training; 0 trains without."""
    backbone_lr: Fraction = 0.5
    """Learning rate of the backbone, relative to train.lr."""

    @property
    def lite(self) -> bool:
        """Whether the encoder is the lightest one, whose losses are fewer."""
        return self.size in _LITE


def library_arguments(config: Deimv2Options) -> Arguments:
    """Arguments of transformers' Deimv2Config for a size and width."""
    size, width = _SIZES[config.size], config.width
    # Eight heads divide it; halves of the embedding of places are even.
    (hidden,) = scaled([size.hidden], width, 16)
    last, blocks, kernel, *fourth = size.net
    outward = scaled([64, 256, last, *fourth], width)
    stem = scaled([16, 16], width)
    inward = outward[2:]
    backbone = {
        "model_type": "hgnet_v2",
        "out_indices": [3, 4][: len(inward)],
        "hidden_sizes": outward,
        "depths": [3] * len(outward),
        "embedding_size": stem[-1],
        "stem_channels": [3, *stem],
        "stage_in_channels": [stem[-1], *outward[:-1]],
        "stage_mid_channels": scaled([16, 32, 64, 128], width)[: len(outward)],
        "stage_out_channels": outward,
        "stage_num_blocks": [1, 1, blocks, 1][: len(outward)],
        "stage_downsample": [False, True, True, True][: len(outward)],
        "stage_light_block": [False, False, True, True][: len(outward)],
        "stage_kernel_size": [3, 3, kernel, kernel][: len(outward)],
        "stage_numb_of_layers": [3] * len(outward),
        "use_learnable_affine_block": True,
    }
    levels = len(size.points)
    return {
        "backbone_config": backbone,
        "freeze_backbone_batch_norms": False,
        "encoder_type": "lite" if config.lite else "hybrid",
        "encoder_layers": 0 if config.lite else 1,
        "encoder_in_channels": inward,
        "encoder_hidden_dim": hidden,
        "encoder_ffn_dim": scaled([size.encoder_feed_forward], width)[0],
        "encode_proj_layers": [levels - 1],
        "feat_strides": [8, 16, 32][-levels:],
        "hidden_expansion": size.expansion,
        "depth_mult": size.depth,
        "d_model": hidden,
        "decoder_in_channels": [hidden] * levels,
        "decoder_ffn_dim": scaled([size.feed_forward], width, 16)[0],
        "decoder_layers": size.layers,
        "decoder_n_points": list(size.points),
        "decoder_activation_function": "silu",
        "num_feature_levels": levels,
        "share_bbox_head": config.lite,
        "use_gateway": not config.lite,
        "num_queries": config.queries,
        "num_denoising": config.denoising,
    }
