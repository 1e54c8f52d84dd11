"""Options of DEIMv2, its published sizes, and a recipe."""

from dataclasses import replace
from typing import Literal, NamedTuple

from pydantic.dataclasses import dataclass

from trainer.config.schema import Config
from trainer.config.types import STRICT, Count, Fraction
from trainer.model.architectures.detr.detr_options import (
    Arguments,
    SetOptions,
    published_training,
    published_views,
    scaled,
)


class _Size(NamedTuple):
    """A published size; the defaults are those with the lightest encoder."""

    hidden: int
    """Width of encoder and decoder."""
    feed_forward: int
    """Width of the decoder's feed-forward networks, both halves together."""
    net: tuple[int, ...]
    """PPHGNetV2: channels of the last stages, and blocks and kernel of the third. DINOv3: its channels, and
    those of the first convolution beside it."""
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
    "s": _Size(192, 512, (192, 16), 4, (3, 6, 3), 512, 0.34, 0.67),
    "m": _Size(256, 512, (256, 16), 4, (3, 6, 3), 512, 0.67, 1.0),
    "l": _Size(224, 1792, (384, 32), 4, (3, 6, 3), 896, 1.0, 1.0),
    "x": _Size(256, 2048, (384, 64), 6, (3, 6, 3), 1024, 1.25, 1.37),
}  # fmt: skip
"""`configs/deimv2/*.yml` of github.com/Intellindust-AI-Lab/DEIMv2 (0fff8d4), Apache-2.0."""


@dataclass(config=STRICT, frozen=True)
class Deimv2Options(SetOptions):
    """DEIMv2 on PPHGNetV2 or DINOv3, by transformers (`pip install 'kubedet[detr]'`)."""

    architecture: Literal["deimv2"] = "deimv2"
    """Kind of detector. Each has its own options: those of another are refused."""
    size: Literal["atto", "femto", "pico", "n", "s", "m", "l", "x"] = "n"
    """Published size: 0.5, 1, 1.5, 3.6, 10, 18, 32 and 50 million parameters. The authors train the first
    three with 100, 150 and 200 queries at 320, 416 and 640 pixels. s to x are on DINOv3: their weights are
    under Meta's DINOv3 License, which binds what you train from them (docs/weights.md)."""
    denoising: Count = 100
    """Approximate number of pairs of denoising queries of an image in training; 0 trains without."""
    backbone_lr: Fraction = 0.5
    """Learning rate of the backbone, relative to train.lr."""

    @property
    def lite(self) -> bool:
        """Whether the encoder is the lightest one, whose losses are fewer."""
        return self.size in ("atto", "femto", "pico")

    @property
    def dino(self) -> bool:
        """Whether the backbone is a vision transformer, with convolutions beside it."""
        return self.size in ("s", "m", "l", "x")


def library_arguments(config: Deimv2Options) -> Arguments:
    """Arguments of transformers' Deimv2Config for a size and width."""
    size, width = _SIZES[config.size], config.width
    # Eight heads divide it; halves of the embedding of places are even.
    (hidden,) = scaled([size.hidden], width, 16)
    levels = len(size.points)
    inward = [hidden] * levels
    further: Arguments = {}
    if config.dino:
        heads = size.net[0] // 64
        # L and X have Meta's own network, the others a smaller one without register tokens.
        meta, gated = heads == 6, config.size == "x"
        (channels,) = scaled([size.net[0]], width, 8 * heads)
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
        further = {
            "spatial_tuning_adapter_inplanes": scaled([size.net[1]], width)[0],
            "encoder_has_trailing_conv": False,
        }
    else:
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
    return {
        **further,
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


def deimv2_s() -> Config:
    """DEIMv2-S from its authors' weights (under the DINOv3 License), by their settings: 50.9 AP on COCO."""
    return Config(
        recipe="deimv2_s",
        loader=replace(published_views(640, draws=20, plain_epochs=12), mosaic=0.5, mixup=0.5),
        model=Deimv2Options(
            size="s", weights="hf:Intellindust/DEIMv2_DINOv3_S_COCO", backbone_lr=0.05, sync_batchnorm=True,
            score_threshold=0.0, detections_per_image=300,
        ),
        train=replace(published_training(132, 5e-4, warmup=2000), milestones=[92 / 132], gamma=0.5),
    )  # fmt: skip
