"""Options of D-FINE and RT-DETRv2, their published sizes, and recipes of D-FINE."""

import re
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from trainer.config.schema import Config, DataConfig, EvaluationConfig, LoaderConfig, ModelConfig, TrainConfig
from trainer.config.types import STRICT, Count, Fraction, Positive

_UNIT = 8  # channels of a narrower network are multiples of it; the queries' of four times that, for 8 heads
_HUB = "hf:"
_NAMES = {"nano": "n", "small": "s", "medium": "m", "large": "l", "xlarge": "x"}
"""Sizes in the names of the hub."""


class _HgNet(NamedTuple):
    """PPHGNetV2: channels of the stem and stages, blocks of each stage, layers of each block.

    `affine`: a learnt scale and shift follows each activation.
    """

    stem: list[int]
    inward: list[int]
    middle: list[int]
    outward: list[int]
    blocks: list[int]
    layers: int
    affine: bool


_B0 = _HgNet([16, 16], [16, 64, 256, 512], [16, 32, 64, 128], [64, 256, 512, 1024], [1, 1, 2, 1], 3, True)
_B2 = _HgNet([24, 32], [32, 96, 384, 768], [32, 64, 128, 256], [96, 384, 768, 1536], [1, 1, 3, 1], 4, True)
_B4 = _HgNet(
    [32, 48], [48, 128, 512, 1024], [48, 96, 192, 384], [128, 512, 1024, 2048], [1, 1, 3, 1], 6, False
)
_B5 = _HgNet(
    [32, 64], [64, 128, 512, 1024], [64, 128, 256, 512], [128, 512, 1024, 2048], [1, 2, 5, 2], 6, False
)


class _Size(NamedTuple):
    """Encoder and decoder of a published size; the defaults are D-FINE-L's and RT-DETRv2-R50's."""

    backbone: _HgNet = _B4
    resnet_blocks: tuple[int, ...] = (3, 4, 6, 3)
    """Blocks of each stage of RT-DETRv2's ResNet-vd; `basic` ones or bottlenecks."""
    basic: bool = False
    hidden: int = 256
    """Width of the encoder."""
    feed_forward: int = 1024
    """Width between the two layers of a feed-forward network of the decoder."""
    encoder_feed_forward: int = 1024
    points: tuple[int, ...] = (3, 6, 3)
    """Points that a query samples on each level."""
    layers: int = 6
    """Layers of the decoder."""
    expansion: float = 1.0
    """Width of the pyramid's blocks, and their depth."""
    depth: float = 1.0
    scale: float = 4.0
    """Scale of D-FINE's distributions."""


_SIZES = {
    "dfine": {
        "n": _Size(
            _B0, hidden=128, feed_forward=512, encoder_feed_forward=512, points=(6, 6), layers=3,
            expansion=0.34, depth=0.5,
        ),
        "s": _Size(_B0, layers=3, expansion=0.5, depth=0.34),
        "m": _Size(_B2, layers=4, depth=0.67),
        "l": _Size(_B4),
        "x": _Size(_B5, hidden=384, encoder_feed_forward=2048, scale=8.0),
    },
    "rtdetr": {
        "r18": _Size(resnet_blocks=(2, 2, 2, 2), basic=True, layers=3, expansion=0.5),
        "r34": _Size(basic=True, layers=4, expansion=0.5),
        "r50": _Size(),
        "r101": _Size(resnet_blocks=(3, 4, 23, 3), hidden=384, encoder_feed_forward=2048),
    },
}  # fmt: skip
"""D-FINE: `configs/dfine/dfine_hgnetv2_{n,s,m,l,x}_coco.yml` of github.com/Peterande/D-FINE (4a1f73a).
RT-DETRv2: `rtdetrv2_pytorch/configs/rtdetrv2` of github.com/lyuwenyu/RT-DETR (068dfde). Both Apache-2.0."""


@dataclass(config=STRICT, frozen=True)
class DetrOptions(ModelConfig):
    """Options of both."""

    stride: ClassVar[int] = 32
    library: ClassVar[str] = "transformers"
    federated: ClassVar[bool] = True

    size: str = ""
    """Published size."""
    width: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Channels relative to the published size; below 1 no published weights fit."""
    queries: Positive = 300
    """Queries of an image; it can have no more detections of a class."""
    denoising: Count = 100
    """Approximate number of pairs of denoising queries of an image in training; 0 trains without."""
    frozen_norm: bool = False
    """Keep the backbone's BatchNorm of the pretrained weights, as the authors trained D-FINE-L and X and
    RT-DETRv2 on ResNet50 and 101."""
    frozen_stem: bool = False
    """Keep the backbone's first convolutions of the pretrained weights; as above."""
    backbone_lr: Fraction = 0.1
    """Learning rate of the backbone, relative to train.lr."""

    def misfit(self) -> str:
        """Say whether published weights are of another size or width, by their name alone."""
        words = re.split(r"[-_/:@]", self.weights.lower()) if self.weights.startswith(_HUB) else []
        words = [_NAMES.get(word, word.removesuffix("vd")) for word in words]
        for architecture in set(words) & _SIZES.keys():
            after = words[words.index(architecture) + 1 :]
            size = next((word for word in after if word in _SIZES[architecture]), "")
            if size and (architecture, size) != (self.architecture, self.size):
                return (
                    f"{self.weights} are of model.architecture={architecture} and model.size={size}, not of "
                    f"{self.architecture} and {self.size}"
                )
            if size and self.width != 1:
                return f"{self.weights} are of the published width, not {self.width:g} of it (model.width)"
        return ""

    def freezing(self) -> dict[str, Any]:
        """Return the options that keep loaded weights, each with the value that trains them."""
        return {key: False for key in ("frozen_norm", "frozen_stem") if getattr(self, key)}


@dataclass(config=STRICT, frozen=True)
class DFineOptions(DetrOptions):
    """D-FINE: decoder of distributions on PPHGNetV2, by transformers (`pip install 'kubedet[detr]'`)."""

    architecture: Literal["dfine"] = "dfine"
    """Kind of detector. Each has its own options: those of another are refused."""
    size: Literal["n", "s", "m", "l", "x"] = "s"
    """Published size; nano has 4, s 10, m 20, l 31 and x 63 million parameters."""


@dataclass(config=STRICT, frozen=True)
class RTDetrOptions(DetrOptions):
    """RT-DETRv2 on ResNet-vd, by transformers (`pip install 'kubedet[detr]'`)."""

    architecture: Literal["rtdetr"] = "rtdetr"
    """Kind of detector. Each has its own options: those of another are refused."""
    size: Literal["r18", "r34", "r50", "r101"] = "r50"
    """Published backbone; with r18 20, r34 31, r50 43 and r101 77 million parameters."""


def library_arguments(config: DetrOptions) -> dict[str, Any]:
    """Arguments of transformers' DFineConfig or RTDetrV2Config for a size and width."""
    size, width = _SIZES[config.architecture][config.size], config.width
    (hidden,) = _scaled([size.hidden], width, 4 * _UNIT)
    if config.architecture == "dfine":
        net, levels = size.backbone, len(size.points)
        outward, stem = _scaled(net.outward, width), _scaled(net.stem, width)
        # Two levels of D-FINE-N, three of the others: the last ones of the backbone.
        arguments = {
            "backbone_config": {
                "model_type": "hgnet_v2",
                "out_indices": [2, 3, 4][-levels:],
                "hidden_sizes": outward,
                "embedding_size": stem[-1],
                "stem_channels": [3, *stem],
                "stage_in_channels": _scaled(net.inward, width),
                "stage_mid_channels": _scaled(net.middle, width),
                "stage_out_channels": outward,
                "stage_num_blocks": net.blocks,
                "stage_numb_of_layers": [net.layers] * 4,
                "use_learnable_affine_block": net.affine,
            },
            "encoder_in_channels": outward[-levels:],
            "feat_strides": [8, 16, 32][-levels:],
            "encode_proj_layers": [levels - 1],
            "num_feature_levels": levels,
            "decoder_n_points": list(size.points),
            "depth_mult": size.depth,
            "reg_scale": size.scale,
        }
    else:
        levels = 3
        outward = _scaled([64, 128, 256, 512] if size.basic else [256, 512, 1024, 2048], width)
        arguments = {
            "backbone_config": {
                "model_type": "rt_detr_resnet",
                "out_indices": [2, 3, 4],
                "embedding_size": _scaled([64], width, 2 * _UNIT)[0],
                "hidden_sizes": outward,
                "depths": list(size.resnet_blocks),
                "layer_type": "basic" if size.basic else "bottleneck",
            },
            "encoder_in_channels": outward[1:],
        }
    return {
        **arguments,
        "hidden_expansion": size.expansion,
        "decoder_layers": size.layers,
        # The queries of X and R101 are 256 wide although the encoder is 384 wide.
        "d_model": min(hidden, 256),
        "encoder_hidden_dim": hidden,
        "decoder_in_channels": [hidden] * levels,
        "encoder_ffn_dim": _scaled([size.encoder_feed_forward], width)[0],
        "decoder_ffn_dim": _scaled([size.feed_forward], width)[0],
        "num_queries": config.queries,
        "num_denoising": config.denoising,
        "freeze_backbone_batch_norms": config.frozen_norm,
    }


def _scaled(channels: list[int], width: float, unit: int = _UNIT) -> list[int]:
    """Channels times `width`, in whole units, one at least; unchanged at width 1."""
    if width == 1:
        return channels
    return [max(unit, round(count * width / unit) * unit) for count in channels]


def dfine_small() -> Config:
    """A narrow D-FINE-N from scratch, for a set of a few hundred images on a CPU.

    In fp32, since bf16 slows its many small operations down, and with fewer queries than published.
    """
    return Config(
        recipe="dfine_small",
        data=DataConfig(shard_bytes=8 * 1024 * 1024),
        loader=LoaderConfig(
            image_size=320, workers=1, scale=[0.8, 1.25],
            brightness=0.2, contrast=0.2, saturation=0.2, hue=0.02,
        ),
        model=DFineOptions(size="n", width=0.5, queries=60, denoising=30, backbone_lr=1.0),
        train=TrainConfig(
            epochs=45, minutes=30.0, batch_size=4, optimizer="adamw", lr=1e-3, weight_decay=1e-4,
            warmup_steps=50, clip_norm=0.1, ema_decay=0.99, validate_every=9, checkpoint_minutes=1.0,
            compile="off", precision="fp32",
        ),
        evaluation=EvaluationConfig(gate=["coco/AP50 >= 0.1"]),
    )  # fmt: skip


def dfine_s() -> Config:
    """D-FINE-S on COCO by its authors' schedule: 48.5 AP with theirs, on 8 GPUs.

    github.com/Peterande/D-FINE (4a1f73a), configs/dfine/dfine_hgnetv2_s_coco.yml and its README: 132 epochs,
    the last 12 plain, 32 images a step. Theirs resets to the best weights before the plain epochs, changes
    the aspect of images, and draws 640 more often than other sizes.
    """
    return Config(
        recipe="dfine_s",
        loader=_dfine_views([576, 608, 640, 672, 704], plain_epochs=12),
        model=DFineOptions(
            size="s", weights="hf:timm/hgnetv2_b0.ssld_stage1_in22k_in1k", backbone_lr=0.5,
            sync_batchnorm=True, score_threshold=0.001,
        ),
        train=_dfine_training(epochs=132, lr=2e-4, weight_decay=1e-4),
    )  # fmt: skip


def dfine_l() -> Config:
    """D-FINE-L on COCO by its authors' schedule: 54.0 AP with theirs, on 8 GPUs.

    github.com/Peterande/D-FINE (4a1f73a), configs/dfine/dfine_hgnetv2_l_coco.yml and its README: 80 epochs,
    the last 8 plain, 32 images a step; the differences are those of dfine_s.
    """
    return Config(
        recipe="dfine_l",
        loader=_dfine_views([480, 544, 608, 640, 672, 736, 800], plain_epochs=8),
        model=DFineOptions(
            size="l", weights="hf:timm/hgnetv2_b4.ssld_stage1_in22k_in1k", backbone_lr=0.05,
            frozen_norm=True, frozen_stem=True, sync_batchnorm=True, score_threshold=0.001,
        ),
        train=_dfine_training(epochs=80, lr=2.5e-4, weight_decay=1.25e-4),
    )  # fmt: skip


def dfine_finetune() -> Config:
    """Fine-tune D-FINE-S's weights of Objects365 and COCO on your data, on one or a few GPUs."""
    return Config(
        recipe="dfine_finetune",
        loader=LoaderConfig(
            image_size=640, scale=[0.7, 1.4], brightness=0.1, contrast=0.1, saturation=0.1, plain_epochs=4
        ),
        model=DFineOptions(size="s", weights="hf:ustc-community/dfine-small-obj2coco", backbone_lr=0.5),
        train=TrainConfig(
            epochs=30, minutes=240.0, batch_size=8, global_batch=16, optimizer="adamw", lr=1e-4,
            weight_decay=1e-4, warmup_steps=200, clip_norm=0.1, ema_decay=0.999, compile="off",
        ),
        evaluation=EvaluationConfig(gate=["coco/AP50 >= 0.1"]),
    )  # fmt: skip


def _dfine_views(sizes: list[int], plain_epochs: int) -> LoaderConfig:
    """The augmentation of D-FINE's authors, approximately: zoom out, crop, colours, sizes."""
    return LoaderConfig(
        image_size=640, scale=[0.5, 2.0], brightness=0.125, contrast=0.5, saturation=0.5, hue=0.05,
        sizes=sizes, plain_epochs=plain_epochs,
    )  # fmt: skip


def _dfine_training(epochs: int, lr: float, weight_decay: float) -> TrainConfig:
    """A constant learning rate, whose noise averaged weights reduce."""
    return TrainConfig(
        epochs=epochs, batch_size=4, global_batch=32, lr_batch=32, optimizer="adamw", lr=lr,
        weight_decay=weight_decay, schedule="multistep", milestones=[1.0], warmup_steps=500, clip_norm=0.1,
        ema_decay=0.9999, compile="off",
    )  # fmt: skip
