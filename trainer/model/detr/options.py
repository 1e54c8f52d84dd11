"""Options that all DETRs have."""

from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from trainer.config.schema import ModelConfig
from trainer.config.types import STRICT, DetectionCount

Arguments = dict[str, Any]  # arguments of a configuration class of transformers
UNIT = 8  # channels of a narrower network are multiples of this


@dataclass(config=STRICT, frozen=True)
class DetrOptions(ModelConfig):
    """Options of all DETRs."""

    stride: ClassVar[int] = 32
    library: ClassVar[str] = "transformers"

    size: str = ""
    """Published size."""
    width: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Channels relative to the published size. Published weights only fit 1."""
    queries: DetectionCount = 300
    """Number of queries per image, which is the maximum number of detections per class."""

    def arguments(self) -> Arguments:
        """Return the arguments of transformers' configuration, without the number of classes."""
        raise NotImplementedError


def scale_channels(channels: list[int], width: float, unit: int = UNIT) -> list[int]:
    """Scale channels by `width` to multiples of `unit`, at least one unit; width 1 changes nothing."""
    if width == 1:
        return channels
    return [max(unit, round(count * width / unit) * unit) for count in channels]


def hgnet_arguments(
    stem: list[int], outward: list[int], blocks: list[int], layers: int, width: float, **more: Any
) -> Arguments:
    """Return transformers' arguments for a PPHGNetV2; `stem` and `outward` are channels at width 1."""
    within = scale_channels([stem[-1] * 2**stage for stage in range(len(outward))], width)
    stem, outward = scale_channels(stem, width), scale_channels(outward, width)
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
