"""Options of D-FINE and RT-DETRv2, their published sizes, and their recipes."""

import re
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from trainer.config.schema import Config, DataConfig, EvaluationConfig, LoaderConfig, ModelConfig, TrainConfig
from trainer.config.types import STRICT, Count, Fraction, Positive

_UNIT = 8  # channels of a narrower network are multiples of it; the queries' of four times that, for 8 heads
_HUB = "hf:"
_STORAGE = "https://github.com/lyuwenyu/storage/releases/download/v0.1/"
"""Backbones of RT-DETR's authors: `src/nn/backbone/presnet.py`."""
_NAMES = {"nano": "n", "small": "s", "medium": "m", "large": "l", "xlarge": "x"}
"""Sizes in the names of the hub."""
_PUBLISHED = {
    "dfine": "n s m l x", "rtdetr": "r18 r34 r50 r101", "rfdetr": "nano small medium large",
    "lwdetr": "tiny small medium large xlarge", "deimv2": "atto femto pico n s m l x",
}  # fmt: skip
"""Published sizes of each architecture."""


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
Arguments = dict[str, Any]  # of a configuration of transformers


@dataclass(config=STRICT, frozen=True)
class SetOptions(ModelConfig):
    """Options of all detectors that predict a set of boxes with transformers' networks."""

    stride: ClassVar[int] = 32
    library: ClassVar[str] = "transformers"
    federated: ClassVar[bool] = True

    size: str = ""
    """Published size."""
    width: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Channels relative to the published size; below 1 no published weights fit."""
    queries: Positive = 300
    """Queries of an image; it can have no more detections of a class."""

    def misfit(self) -> str:
        """Say whether published weights are of another size or width, by their name alone."""
        named = self.weights.lower().replace("rf-detr", "rfdetr") if self.weights.startswith(_HUB) else ""
        words = [_NAMES.get(word, word.removesuffix("vd")) for word in re.split(r"[-_/:@]", named)]
        for architecture in set(words) & _PUBLISHED.keys():
            after = words[words.index(architecture) + 1 :]
            sizes = {_NAMES.get(size, size): size for size in _PUBLISHED[architecture].split()}
            size = next((sizes[word] for word in after if word in sizes), "")
            if size and (architecture, size) != (self.architecture, self.size):
                return (
                    f"{self.weights} are of model.architecture={architecture} and model.size={size}, not of "
                    f"{self.architecture} and {self.size}"
                )
            if size and self.width != 1:
                return f"{self.weights} are of the published width, not {self.width:g} of it (model.width)"
        return ""


@dataclass(config=STRICT, frozen=True)
class DetrOptions(SetOptions):
    """Options of D-FINE and RT-DETRv2."""

    denoising: Count = 100
    """Approximate number of pairs of denoising queries of an image in training; 0 trains without."""
    frozen_norm: bool = False
    """Keep the backbone's BatchNorm of the pretrained weights, as the authors trained D-FINE-L and X and
    RT-DETRv2 on ResNet50 and 101."""
    frozen_stem: bool = False
    """Keep the backbone's first convolutions of the pretrained weights; as above."""
    backbone_lr: Fraction = 0.1
    """Learning rate of the backbone, relative to train.lr."""

    def freezing(self) -> Arguments:
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


def library_arguments(config: DetrOptions) -> Arguments:
    """Arguments of transformers' DFineConfig or RTDetrV2Config for a size and width."""
    size, width = _SIZES[config.architecture][config.size], config.width
    (hidden,) = scaled([size.hidden], width, 4 * _UNIT)
    if config.architecture == "dfine":
        net, levels = size.backbone, len(size.points)
        outward, stem = scaled(net.outward, width), scaled(net.stem, width)
        # Two levels of D-FINE-N, three of the others: the last ones of the backbone.
        arguments = {
            "backbone_config": {
                "model_type": "hgnet_v2",
                "out_indices": [2, 3, 4][-levels:],
                "hidden_sizes": outward,
                "embedding_size": stem[-1],
                "stem_channels": [3, *stem],
                "stage_in_channels": scaled(net.inward, width),
                "stage_mid_channels": scaled(net.middle, width),
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
        outward = scaled([64, 128, 256, 512] if size.basic else [256, 512, 1024, 2048], width)
        arguments = {
            "backbone_config": {
                "model_type": "rt_detr_resnet",
                "out_indices": [2, 3, 4],
                "embedding_size": scaled([64], width, 2 * _UNIT)[0],
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
        "encoder_ffn_dim": scaled([size.encoder_feed_forward], width)[0],
        "decoder_ffn_dim": scaled([size.feed_forward], width)[0],
        "num_queries": config.queries,
        "num_denoising": config.denoising,
        "freeze_backbone_batch_norms": config.frozen_norm,
    }


def scaled(channels: list[int], width: float, unit: int = _UNIT) -> list[int]:
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


def dfine_n() -> Config:
    """D-FINE-N on COCO by its authors' schedule for 8 GPUs (42.8 AP, published)."""
    return _dfine("n", epochs=160, plain=12, draws=0, lr=8e-4, backbone_lr=0.5, images=128)


def dfine_s() -> Config:
    """D-FINE-S on COCO by its authors' schedule for 8 GPUs (48.5 AP, published)."""
    return _dfine("s", epochs=132, plain=12, draws=20, lr=2e-4, backbone_lr=0.5)


def dfine_m() -> Config:
    """D-FINE-M on COCO by its authors' schedule for 8 GPUs (52.3 AP, published)."""
    return _dfine("m", epochs=132, plain=12, draws=6, lr=2e-4, backbone_lr=0.1)


def dfine_l() -> Config:
    """D-FINE-L on COCO by its authors' schedule for 8 GPUs (54.0 AP, published)."""
    return _dfine("l", epochs=80, plain=8, draws=4, lr=2.5e-4, backbone_lr=0.05, frozen=True)


def dfine_x() -> Config:
    """D-FINE-X on COCO by its authors' schedule for 8 GPUs (55.8 AP, published)."""
    return _dfine("x", epochs=80, plain=8, draws=3, lr=2.5e-4, backbone_lr=0.01, frozen=True)


def dfine_finetune() -> Config:
    """Fine-tune D-FINE-S's weights of Objects365 and COCO on your data, on one or a few GPUs."""
    return Config(
        recipe="dfine_finetune",
        loader=published_views(640, draws=10, plain_epochs=8),
        model=DFineOptions(
            size="s", weights="hf:ustc-community/dfine-small-obj2coco", backbone_lr=0.5,
            detections_per_image=300,
        ),
        train=replace(
            published_training(64, 2.5e-4, weight_decay=1.25e-4),
            minutes=240.0, batch_size=8, warmup_steps=0, ema_ramp="inverse",
        ),
        evaluation=EvaluationConfig(gate=["coco/AP50 >= 0.1"]),
    )  # fmt: skip


def rtdetr_r18() -> Config:
    """RT-DETRv2-S on COCO by its authors' schedule for 4 GPUs (48.1 AP, published)."""
    return _rtdetr("r18", "ResNet18_vd_pretrained", epochs=120, plain=3, draws=0, backbone_lr=1.0)


def rtdetr_r34() -> Config:
    """RT-DETRv2-M* on COCO by its authors' schedule for 4 GPUs (49.9 AP, published)."""
    return _rtdetr("r34", "ResNet34_vd_pretrained", epochs=120, plain=3, backbone_lr=0.5, bias_decay=0.0)


def rtdetr_r50() -> Config:
    """RT-DETRv2-L on COCO by its authors' schedule for 4 GPUs (53.4 AP, published)."""
    return _rtdetr("r50", "ResNet50_vd_ssld_v2_pretrained", epochs=72, plain=1, backbone_lr=0.1, frozen=True)


def rtdetr_r101() -> Config:
    """RT-DETRv2-X on COCO by its authors' schedule for 4 GPUs (54.3 AP, published)."""
    return _rtdetr("r101", "ResNet101_vd_ssld_pretrained", epochs=72, plain=1, backbone_lr=0.01, frozen=True)


def published_views(size: int, draws: int, plain_epochs: int) -> LoaderConfig:
    """Return the augmentation of D-FINE's and RT-DETR's authors.

    `draws` is the number of draws of `size` among the ten other sides, from 3/4 to 5/4 of it; 0 is one side
    only. docs/weights.md lists the sources.
    """
    around = [*range(int(size * 0.75 / 32) * 32, int(size * 1.25 / 32) * 32 + 1, 32)]
    return LoaderConfig(
        image_size=size, resize="squash", fill=0, zoom_out=0.5, iou_crop=0.8, brightness=0.125, contrast=0.5,
        saturation=0.5, hue=0.05, color_probability=0.5, channel_shuffle=0.5, plain_epochs=plain_epochs,
        sizes=[*around, *[size] * (draws - 1)] if draws else [],
    )  # fmt: skip


def published_training(
    epochs: int, lr: float, *, weight_decay: float = 1e-4, bias_decay: float = 0.0, images: int = 32,
    warmup: int = 500, ema: int = 1000,
) -> TrainConfig:  # fmt: skip
    """Return the training of the same authors: a constant learning rate and averaged weights."""
    return TrainConfig(
        epochs=epochs, batch_size=max(4, images // 8), global_batch=images, lr_batch=images,
        lr_scaling="linear", scale_steps=True, optimizer="adamw", lr=lr, weight_decay=weight_decay,
        bias_weight_decay=bias_decay, schedule="multistep", milestones=[], warmup_steps=warmup, clip_norm=0.1,
        ema_decay=0.9999, ema_ramp="exponential", ema_steps=ema, compile="off",
    )  # fmt: skip


def _dfine(
    size: Literal["n", "s", "m", "l", "x"], *, epochs: int, plain: int, draws: int, lr: float,
    backbone_lr: float, images: int = 32, frozen: bool = False,
) -> Config:  # fmt: skip
    net = {"n": "b0", "s": "b0", "m": "b2", "l": "b4", "x": "b5"}[size]
    decay = 1.25e-4 if frozen else 1e-4
    return Config(
        recipe=f"dfine_{size}",
        loader=published_views(640, draws, plain),
        model=DFineOptions(
            size=size, weights=f"hf:timm/hgnetv2_{net}.ssld_stage1_in22k_in1k", backbone_lr=backbone_lr,
            frozen_norm=frozen, frozen_stem=frozen, sync_batchnorm=True, score_threshold=0.0,
            detections_per_image=300,
        ),
        train=published_training(
            epochs, lr, weight_decay=decay, bias_decay=decay if frozen else 0.0, images=images
        ),
    )  # fmt: skip


def _rtdetr(
    size: Literal["r18", "r34", "r50", "r101"], weights: str, *, epochs: int, plain: int, backbone_lr: float,
    draws: int = 3, bias_decay: float = 1e-4, frozen: bool = False,
) -> Config:  # fmt: skip
    return Config(
        recipe=f"rtdetr_{size}",
        loader=published_views(640, draws, plain),
        model=RTDetrOptions(
            size=size, weights=f"{_STORAGE}{weights}_from_paddle.pth", backbone_lr=backbone_lr,
            frozen_norm=frozen, frozen_stem=frozen, sync_batchnorm=True, score_threshold=0.0,
            detections_per_image=300,
        ),
        train=published_training(epochs, 1e-4, bias_decay=bias_decay, images=16, warmup=2000, ema=2000),
    )  # fmt: skip
