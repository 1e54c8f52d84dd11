"""Options of RF-DETR and LW-DETR, their published sizes, and recipes of RF-DETR."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from trainer.config.schema import Config, EvaluationConfig, LoaderConfig, TrainConfig
from trainer.config.types import STRICT, Fraction, Positive
from trainer.model.architectures.detr.detr_options import Arguments, SetOptions, scaled


class _Size(NamedTuple):
    """A published size; the defaults are RF-DETR's and those that LW-DETR-S and M share."""

    channels: int = 384
    """Width of the vision transformer."""
    layers: int = 3
    """Layers of the decoder."""
    positions: int = 14
    """Patches on a side for which positions were learnt."""
    depth: int = 12
    """Blocks of the vision transformer."""
    windows: tuple[int, ...] = ()
    """Blocks with attention within windows; of RF-DETR all but those that are read."""
    read: tuple[int, ...] = (3, 6, 9, 12)
    """Blocks whose outputs the decoder attends to, counted from 1."""
    levels: tuple[float, ...] = (1.0,)
    """Their size relative to the patches."""
    hidden: int = 256
    """Width of the decoder."""
    points: int = 2
    """Points that a query samples on each level."""


_LW = _Size(192, depth=10, windows=(0, 1, 3, 6, 7, 9), read=(3, 5, 6, 10))
_LW_LARGE = _LW._replace(channels=384, levels=(2.0, 0.5), hidden=384, points=4)
_SIZES = {
    "rfdetr": {
        "nano": _Size(layers=2, positions=24),
        "small": _Size(layers=3, positions=32),
        "medium": _Size(layers=4, positions=36),
        "large": _Size(layers=4, positions=44),
    },
    "lwdetr": {
        "tiny": _Size(192, depth=6, windows=(0, 2, 4), read=(2, 4, 6)),
        "small": _LW,
        "medium": _LW._replace(channels=384),
        "large": _LW_LARGE,
        "xlarge": _LW_LARGE._replace(channels=768),
    },
}
"""RF-DETR: `rfdetr/config.py` of github.com/roboflow/rf-detr (35ac6ab). LW-DETR: `scripts/*_coco_train.sh` of
github.com/Atten4Vis/LW-DETR (d5e6e6c). Both Apache-2.0."""
_STORAGE = "https://storage.googleapis.com/rfdetr/"
"""Weights of RF-DETR's authors: `rfdetr/main.py`."""
_HEAD = 32  # channels of an attention head of the decoder; half of it when a query attends to places


@dataclass(config=STRICT, frozen=True)
class GroupOptions(SetOptions):
    """Options of both."""

    groups: Positive = 13
    """Groups of queries in training, each matched for itself (Group DETR, arXiv:2207.13085); predictions use
    the first."""
    backbone_lr: Annotated[float, Field(ge=0)] = 1.5
    """Learning rate of the vision transformer behind its last block, relative to train.lr."""
    layer_decay: Fraction = 0.8
    """Learning rate of each block of the vision transformer relative to the next one's."""
    component_decay: Fraction = 0.7
    """Learning rate of the decoder relative to the rest; twice a factor of the vision transformer's."""

    def implied(self, described: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> Arguments:
        """The queries and groups of a detector's weights; groups are as set if no config.json has them."""
        rows = next((sides[0] for name, sides in shapes.items() if name.endswith("query_feat.weight")), 0)
        groups = described.get("group_detr") or self.groups
        return {"groups": groups, "queries": rows // groups} if rows else {}


@dataclass(config=STRICT, frozen=True)
class RFDetrOptions(GroupOptions):
    """RF-DETR on DINOv2 with windows, by transformers (`pip install 'kubedet[detr]'`)."""

    architecture: Literal["rfdetr"] = "rfdetr"
    """Kind of detector. Each has its own options: those of another are refused."""
    size: Literal["nano", "small", "medium", "large"] = "nano"
    """Published size: 30, 32, 34 and 34 million parameters, at 384, 512, 576 and 704 pixels."""


@dataclass(config=STRICT, frozen=True)
class LWDetrOptions(GroupOptions):
    """LW-DETR on a plain vision transformer, by transformers (`pip install 'kubedet[detr]'`)."""

    stride: ClassVar[int] = 64

    architecture: Literal["lwdetr"] = "lwdetr"
    """Kind of detector. Each has its own options: those of another are refused."""
    size: Literal["tiny", "small", "medium", "large", "xlarge"] = "tiny"
    """Published size: 12, 15, 28, 47 and 118 million parameters, at 640 pixels. The authors train tiny with
    100 queries."""


def library_arguments(config: GroupOptions) -> Arguments:
    """Arguments of transformers' RfDetrConfig or LwDetrConfig for a size and width."""
    size, width = _SIZES[config.architecture][config.size], config.width
    # 12 heads divide it, or 6.
    (channels,) = scaled([size.channels], width, 24)
    (hidden,) = scaled([size.hidden], width, _HEAD)
    further: Arguments
    backbone: Arguments = {"hidden_size": channels, "patch_size": 16, "num_hidden_layers": size.depth}
    if config.architecture == "rfdetr":
        backbone |= {
            "model_type": "rf_detr_dinov2",
            "num_attention_heads": 6,
            "num_windows": 2,
            "image_size": 16 * size.positions,
            "out_indices": list(size.read),
        }
        # transformers' own value is 1e-5; rfdetr/models/backbone/projector.py has 1e-6.
        further = {"layer_norm_eps": 1e-6}
    else:
        backbone |= {
            "model_type": "lw_detr_vit",
            "num_attention_heads": 12,
            "window_block_indices": list(size.windows),
            "pretrain_image_size": 16 * size.positions,
            "image_size": 1024,  # only checked
            "out_indices": list(size.read),
        }
        further = {"projector_scale_factors": list(size.levels)}
    return {
        **further,
        "backbone_config": backbone,
        "d_model": hidden,
        "dropout": 0.0,
        "decoder_ffn_dim": scaled([2048], width)[0],
        "decoder_layers": size.layers,
        "decoder_n_points": size.points,
        "decoder_self_attention_heads": hidden // _HEAD,
        "decoder_cross_attention_heads": 2 * hidden // _HEAD,
        "num_queries": config.queries,
        "group_detr": config.groups,
    }


def rfdetr_finetune() -> Config:
    """Fine-tune RF-DETR nano's weights of COCO on your data, on one or a few GPUs."""
    config = _rfdetr("nano", 384)
    return replace(
        config,
        recipe="rfdetr_finetune",
        model=replace(config.model, score_threshold=0.05),
        train=replace(config.train, minutes=240.0),
        evaluation=EvaluationConfig(gate=["coco/AP50 >= 0.1"]),
    )


def rfdetr_m() -> Config:
    """RF-DETR medium from its authors' weights, by their settings: 54.7 AP on COCO with theirs."""
    return replace(_rfdetr("medium", 576), recipe="rfdetr_m")


def _rfdetr(size: Literal["nano", "medium"], side: int) -> Config:
    return Config(
        loader=LoaderConfig(
            image_size=side, resize="squash", sizes=[*range(side - 160, side + 161, 32)], plain_epochs=0
        ),
        model=RFDetrOptions(
            size=size, weights=f"{_STORAGE}{size}_coco/checkpoint_best_regular.pth", score_threshold=0.0,
            detections_per_image=300,
        ),
        train=TrainConfig(
            epochs=100, batch_size=4, global_batch=16, optimizer="adamw", lr=1e-4, weight_decay=1e-4,
            schedule="multistep", milestones=[], warmup_steps=0, clip_norm=0.1, ema_decay=0.993,
            ema_ramp="exponential", ema_steps=100, compile="off",
        ),
    )  # fmt: skip
