"""Options of D-FINE and RT-DETRv2, their published sizes, and their recipes."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from trainer.config.schema import Config, EvaluationConfig, LoaderConfig, ModelConfig, TrainConfig
from trainer.config.types import STRICT, Count, Detected, Fraction
from trainer.model.architectures.retinanet.retinanet_options import small

_UNIT = 8  # channels of a narrower network are multiples of it; the queries' of four times that, for 8 heads
_HUB = "hf:"
_STORAGE = "https://github.com/lyuwenyu/storage/releases/download/v0.1/"
"""Backbones of RT-DETR's authors: `src/nn/backbone/presnet.py`."""
_NAMES = {"nano": "n", "small": "s", "medium": "m", "large": "l", "xlarge": "x"}
"""Sizes in the names of the hub."""
_PUBLISHED = {
    "dfine": "n s m l x", "rtdetr": "r18 r34 r50 r101", "rfdetr": "nano small medium large",
    "deimv2": "atto femto pico n s m l x",
}  # fmt: skip
"""Published sizes of each architecture."""


Arguments = dict[str, Any]  # of a configuration of transformers
_NETS = {
    "b0": ([16, 16], 64, [1, 1, 2, 1], 3),
    "b2": ([24, 32], 96, [1, 1, 3, 1], 4),
    "b4": ([32, 48], 128, [1, 1, 3, 1], 6),
    "b5": ([32, 64], 128, [1, 2, 5, 2], 6),
}
"""PPHGNetV2: channels of the stem and behind the first stage, blocks of each stage, layers of each block. In
the first two a learnt scale and shift follows each activation."""
_SIZES: dict[str, dict[str, tuple[Arguments, Arguments]]] = {
    "dfine": {
        "n": (
            {"net": "b0"},
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
        "s": ({"net": "b0"}, {"decoder_layers": 3, "hidden_expansion": 0.5, "depth_mult": 0.34}),
        "m": ({"net": "b2"}, {"decoder_layers": 4, "depth_mult": 0.67}),
        "l": ({"net": "b4"}, {}),
        "x": ({"net": "b5"}, {"encoder_hidden_dim": 384, "encoder_ffn_dim": 2048, "reg_scale": 8.0}),
    },
    "rtdetr": {
        "r18": (
            {"depths": [2, 2, 2, 2], "layer_type": "basic"},
            {"decoder_layers": 3, "hidden_expansion": 0.5},
        ),
        "r34": ({"layer_type": "basic"}, {"decoder_layers": 4, "hidden_expansion": 0.5}),
        "r50": ({}, {}),
        "r101": ({"depths": [3, 4, 23, 3]}, {"encoder_hidden_dim": 384, "encoder_ffn_dim": 2048}),
    },
}
"""Backbone of each size, and the rest, as transformers' arguments: only what differs from D-FINE-L and
RT-DETRv2-R50. D-FINE: `configs/dfine/dfine_hgnetv2_{n,s,m,l,x}_coco.yml` of github.com/Peterande/D-FINE
(4a1f73a). RT-DETRv2: `rtdetrv2_pytorch/configs/rtdetrv2` of github.com/lyuwenyu/RT-DETR (068dfde). Both
Apache-2.0."""


@dataclass(config=STRICT, frozen=True)
class SetOptions(ModelConfig):
    """Options of all detectors that predict a set of boxes with transformers' networks."""

    stride: ClassVar[int] = 32
    library: ClassVar[str] = "transformers"

    size: str = ""
    """Published size."""
    width: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Channels relative to the published size; below 1 no published weights fit."""
    queries: Detected = 300
    """Number of queries per image, and so the maximum number of detections of a class."""

    def arguments(self) -> Arguments:
        """Arguments of transformers' configuration for this size and width, without the number of classes."""
        raise NotImplementedError

    def misfit(self) -> str:
        """Return whether published weights have a different size or width, judging by their name."""
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

    denoising: Annotated[Count, Field(le=10_000)] = 100
    """Approximate number of pairs of denoising queries per image in training; 0 disables them."""
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

    def arguments(self) -> Arguments:
        """Arguments of transformers' DFineConfig or RTDetrV2Config for a size and width."""
        (backbone, size), width = _SIZES[self.architecture][self.size], self.width
        widths = {"encoder_hidden_dim": 256, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024, **size}
        (hidden,) = scaled([widths["encoder_hidden_dim"]], width, 4 * _UNIT)
        if self.architecture == "dfine":
            size = {"decoder_n_points": [3, 6, 3], **size}
            levels = len(size["decoder_n_points"])
            stem, first, blocks, layers = _NETS[backbone["net"]]
            affine = backbone["net"] in ("b0", "b2")
            # Two levels of D-FINE-N, three of the others: the last ones of the backbone.
            net = hgnet(
                stem,
                [first * factor for factor in (1, 4, 8, 16)],
                blocks,
                layers,
                width,
                out_indices=[2, 3, 4][-levels:],
                use_learnable_affine_block=affine,
            )
            size |= {
                "feat_strides": [8, 16, 32][-levels:],
                "encode_proj_layers": [levels - 1],
                "num_feature_levels": levels,
            }
        else:
            levels, basic = 3, backbone.get("layer_type") == "basic"
            outward = scaled([64, 128, 256, 512] if basic else [256, 512, 1024, 2048], width)
            net = {
                **backbone,
                "model_type": "rt_detr_resnet",
                "out_indices": [2, 3, 4],
                "embedding_size": scaled([64], width, 2 * _UNIT)[0],
                "hidden_sizes": outward,
            }
        return {
            **size,
            "backbone_config": net,
            "encoder_in_channels": net["hidden_sizes"][-levels:],
            # The queries of X and R101 are 256 wide although the encoder is 384 wide.
            "d_model": min(hidden, 256),
            "encoder_hidden_dim": hidden,
            "decoder_in_channels": [hidden] * levels,
            **{key: scaled([widths[key]], width)[0] for key in ("encoder_ffn_dim", "decoder_ffn_dim")},
            "num_queries": self.queries,
            "num_denoising": self.denoising,
            "freeze_backbone_batch_norms": self.frozen_norm,
        }


@dataclass(config=STRICT, frozen=True)
class DFineOptions(DetrOptions):
    """D-FINE: decoder of distributions on PPHGNetV2, by transformers (extra `detr`)."""

    architecture: Literal["dfine"] = "dfine"
    size: Literal["n", "s", "m", "l", "x"] = "s"
    """Published size; nano has 4, s 10, m 20, l 31 and x 63 million parameters."""


@dataclass(config=STRICT, frozen=True)
class RTDetrOptions(DetrOptions):
    """RT-DETRv2 on ResNet-vd, by transformers (extra `detr`)."""

    architecture: Literal["rtdetr"] = "rtdetr"
    size: Literal["r18", "r34", "r50", "r101"] = "r50"
    """Published backbone; with r18 20, r34 31, r50 43 and r101 77 million parameters."""


def hgnet(
    stem: list[int], outward: list[int], blocks: list[int], layers: int, width: float, **more: Any
) -> Arguments:
    """Arguments of a PPHGNetV2 by the channels of its stem and behind each stage, at width 1."""
    within = scaled([stem[-1] * 2**stage for stage in range(len(outward))], width)
    stem, outward = scaled(stem, width), scaled(outward, width)
    return {
        "model_type": "hgnet_v2",
        "stem_channels": [3, *stem],
        "embedding_size": stem[-1],
        "stage_in_channels": [stem[-1], *outward[:-1]],
        "stage_mid_channels": within,
        "stage_out_channels": outward,
        "hidden_sizes": outward,
        "stage_num_blocks": blocks,
        "stage_numb_of_layers": [layers] * len(outward),
        **more,
    }


def scaled(channels: list[int], width: float, unit: int = _UNIT) -> list[int]:
    """Channels times `width`, in whole units, one at least; unchanged at width 1."""
    if width == 1:
        return channels
    return [max(unit, round(count * width / unit) * unit) for count in channels]


def dfine_small() -> Config:
    """A narrow D-FINE-N from scratch, for a set of a few hundred images on a CPU.

    With the views and schedule of `small`; in fp32, since bf16 slows its many small operations down, and with
    fewer queries than published.
    """
    slim = small()
    return replace(
        slim,
        recipe="dfine_small",
        model=DFineOptions(size="n", width=0.5, queries=60, denoising=30, backbone_lr=1.0),
        train=replace(slim.train, lr=1e-3, weight_decay=1e-4, clip_norm=0.1, precision="fp32"),
    )


def dfine_finetune() -> Config:
    """Fine-tune D-FINE-S's weights of Objects365 and COCO on your data, on one or a few GPUs."""
    return Config(
        recipe="dfine_finetune",
        loader=published_views(640, draws=10, plain_epochs=8),
        model=DFineOptions(
            size="s",
            weights="hf:ustc-community/dfine-small-obj2coco",
            backbone_lr=0.5,
            detections_per_image=300,
        ),
        train=replace(
            published_training(64, 2.5e-4, weight_decay=1.25e-4),
            minutes=240.0,
            batch_size=8,
            warmup_steps=0,
            ema_ramp="inverse",
        ),
        evaluation=EvaluationConfig(gate=["coco/AP50 >= 0.1"]),
    )


def published_views(size: int, draws: int, plain_epochs: int) -> LoaderConfig:
    """Return the augmentation of D-FINE's and RT-DETR's authors.

    `draws` is the number of draws of `size` among the ten other sides, from 3/4 to 5/4 of it; 0 is one side
    only. docs/published.md lists the sources.
    """
    around = [*range(int(size * 0.75 / 32) * 32, int(size * 1.25 / 32) * 32 + 1, 32)]
    return LoaderConfig(
        image_size=size,
        resize="squash",
        fill=0,
        zoom_out=0.5,
        iou_crop=0.8,
        brightness=0.125,
        contrast=0.5,
        saturation=0.5,
        hue=0.05,
        color_probability=0.5,
        channel_shuffle=0.5,
        plain_epochs=plain_epochs,
        sizes=[*around, *[size] * (draws - 1)] if draws else [],
    )


def published_training(
    epochs: int,
    lr: float,
    *,
    weight_decay: float = 1e-4,
    bias_decay: float = 0.0,
    images: int = 32,
    warmup: int = 500,
    ema: int = 1000,
) -> TrainConfig:
    """Return the training of the same authors: a constant learning rate and averaged weights."""
    return TrainConfig(
        epochs=epochs,
        batch_size=max(4, images // 8),
        global_batch=images,
        lr_batch=images,
        lr_scaling="linear",
        scale_steps=True,
        optimizer="adamw",
        lr=lr,
        weight_decay=weight_decay,
        bias_weight_decay=bias_decay,
        schedule="multistep",
        milestones=[],
        warmup_steps=warmup,
        clip_norm=0.1,
        ema_decay=0.9999,
        ema_ramp="exponential",
        ema_steps=ema,
        compile="off",
    )


def _published(
    options: Any,
    size: str,
    title: str,
    net: str,
    *,
    epochs: int,
    plain: int,
    draws: int,
    backbone_lr: float,
    frozen: bool = False,
    **training: Any,
) -> Callable[[], Config]:
    """Return the recipe of a size by its authors' schedule, from their backbone."""
    if options is DFineOptions:
        place, gpus = f"hf:timm/hgnetv2_{net}.ssld_stage1_in22k_in1k", 8
    else:
        place, gpus = f"{_STORAGE}{net}_from_paddle.pth", 4
        training = {"lr": 1e-4, "bias_decay": 1e-4, "images": 16, "warmup": 2000, "ema": 2000} | training

    def recipe() -> Config:
        return Config(
            recipe=recipe.__name__,
            loader=published_views(640, draws, plain),
            model=options(
                size=size,
                weights=place,
                backbone_lr=backbone_lr,
                frozen_norm=frozen,
                frozen_stem=frozen,
                sync_batchnorm=True,
                score_threshold=0.0,
                detections_per_image=300,
            ),
            train=published_training(epochs, **training),
        )

    name, _, score = title.partition(", ")
    recipe.__name__ = f"{options.architecture}_{size}"
    recipe.__doc__ = f"{name} on COCO by its authors' schedule for {gpus} GPUs ({score} AP, published)."
    return recipe


_DECAY: Arguments = {"weight_decay": 1.25e-4, "bias_decay": 1.25e-4}
_dfine, _rtdetr = partial(_published, DFineOptions), partial(_published, RTDetrOptions)
PUBLISHED = (
    _dfine("n", "D-FINE-N, 42.8", "b0", epochs=160, plain=12, draws=0, backbone_lr=0.5, lr=8e-4, images=128),
    _dfine("s", "D-FINE-S, 48.5", "b0", epochs=132, plain=12, draws=20, backbone_lr=0.5, lr=2e-4),
    _dfine("m", "D-FINE-M, 52.3", "b2", epochs=132, plain=12, draws=6, backbone_lr=0.1, lr=2e-4),
    _dfine(
        "l",
        "D-FINE-L, 54.0",
        "b4",
        epochs=80,
        plain=8,
        draws=4,
        backbone_lr=0.05,
        frozen=True,
        lr=2.5e-4,
        **_DECAY,
    ),
    _dfine(
        "x",
        "D-FINE-X, 55.8",
        "b5",
        epochs=80,
        plain=8,
        draws=3,
        backbone_lr=0.01,
        frozen=True,
        lr=2.5e-4,
        **_DECAY,
    ),
    _rtdetr(
        "r18", "RT-DETRv2-S, 48.1", "ResNet18_vd_pretrained", epochs=120, plain=3, draws=0, backbone_lr=1.0
    ),
    _rtdetr(
        "r34",
        "RT-DETRv2-M*, 49.9",
        "ResNet34_vd_pretrained",
        epochs=120,
        plain=3,
        draws=3,
        backbone_lr=0.5,
        bias_decay=0.0,
    ),
    _rtdetr(
        "r50",
        "RT-DETRv2-L, 53.4",
        "ResNet50_vd_ssld_v2_pretrained",
        epochs=72,
        plain=1,
        draws=3,
        backbone_lr=0.1,
        frozen=True,
    ),
    _rtdetr(
        "r101",
        "RT-DETRv2-X, 54.3",
        "ResNet101_vd_ssld_pretrained",
        epochs=72,
        plain=1,
        draws=3,
        backbone_lr=0.01,
        frozen=True,
    ),
)
"""Recipes of the published trainings; docs/published.md lists the sources."""
