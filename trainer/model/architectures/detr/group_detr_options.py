"""Options of RF-DETR, its published sizes, and its recipes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from trainer.config.schema import Config, EvaluationConfig, LoaderConfig, TrainConfig
from trainer.config.types import STRICT, Depth, Fraction
from trainer.model.architectures.detr.detr_options import Arguments, SetOptions, scaled

_RF: Arguments = {
    "model_type": "rf_detr_dinov2", "patch_size": 16, "num_attention_heads": 6, "num_windows": 2,
    "out_indices": [3, 6, 9, 12],
}  # fmt: skip
_SIZES: dict[str, tuple[int, int]] = {
    "nano": (384, 2), "small": (512, 3), "medium": (576, 4), "large": (704, 4)
}  # fmt: skip
"""Input size in pixels and layers of the decoder: `rfdetr/config.py` of github.com/roboflow/rf-detr (35ac6ab,
Apache-2.0)."""
_CHANNELS, _HIDDEN = 384, 256  # of the vision transformer and of the decoder
_STORAGE = "https://storage.googleapis.com/rfdetr/"
"""Weights of RF-DETR's authors: `rfdetr/main.py`."""
_HEAD = 32  # channels of an attention head of the decoder; half of it when a query attends to places


@dataclass(config=STRICT, frozen=True)
class RFDetrOptions(SetOptions):
    """RF-DETR on DINOv2 with windows, by transformers (extra `detr`)."""

    architecture: Literal["rfdetr"] = "rfdetr"
    size: Literal["nano", "small", "medium", "large"] = "nano"
    """Published size: 30, 32, 34 and 34 million parameters, at 384, 512, 576 and 704 pixels."""
    groups: Depth = 13
    """Groups of queries in training, each matched separately (Group DETR, arXiv:2207.13085); predictions use
    the first."""
    backbone_lr: Annotated[float, Field(ge=0)] = 1.5
    """Learning rate of the vision transformer after its last block, relative to train.lr."""
    layer_decay: Fraction = 0.8
    """Learning rate of each block of the vision transformer relative to the next one's."""
    component_decay: Fraction = 0.7
    """Learning rate of the decoder relative to the rest; twice a factor of the vision transformer's."""

    def implied(self, described: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> Arguments:
        """The queries and groups of a detector's weights; groups are as set if no config.json has them."""
        rows = next((sides[0] for name, sides in shapes.items() if name.endswith("query_feat.weight")), 0)
        groups = described.get("group_detr") or self.groups
        return {"groups": groups, "queries": rows // groups} if rows else {}

    def arguments(self) -> Arguments:
        """Arguments of transformers' RfDetrConfig for a size and width."""
        side, layers = _SIZES[self.size]
        (hidden,) = scaled([_HIDDEN], self.width, _HEAD)
        return {
            "decoder_n_points": 2,
            "decoder_layers": layers,
            # transformers' own epsilon is 1e-5; rfdetr/models/backbone/projector.py has 1e-6.
            "layer_norm_eps": 1e-6,
            # 12 heads divide the channels, or 6.
            "backbone_config": _RF
            | {
                "image_size": side,
                "hidden_size": scaled([_CHANNELS], self.width, 24)[0],
            },
            "d_model": hidden,
            "dropout": 0.0,
            "decoder_ffn_dim": scaled([2048], self.width)[0],
            "decoder_self_attention_heads": hidden // _HEAD,
            "decoder_cross_attention_heads": 2 * hidden // _HEAD,
            "num_queries": self.queries,
            "group_detr": self.groups,
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
            size=size,
            weights=f"{_STORAGE}{size}_coco/checkpoint_best_regular.pth",
            score_threshold=0.0,
            detections_per_image=300,
        ),
        train=TrainConfig(
            epochs=100,
            batch_size=4,
            global_batch=16,
            optimizer="adamw",
            lr=1e-4,
            weight_decay=1e-4,
            norm_weight_decay=1e-4,
            bias_weight_decay=1e-4,
            schedule="multistep",
            milestones=[],
            warmup_steps=0,
            clip_norm=0.1,
            ema_decay=0.993,
            ema_ramp="exponential",
            ema_steps=100,
            compile="off",
        ),
    )
