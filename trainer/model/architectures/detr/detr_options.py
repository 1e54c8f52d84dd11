"""Options of D-FINE and RT-DETRv2."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from trainer.config.schema import ModelConfig
from trainer.config.types import STRICT, Count, Fraction, Positive
from trainer.model.architectures.detr.detr_sizes import STRIDE, published_size


@dataclass(config=STRICT, frozen=True)
class DetrOptions(ModelConfig):
    """What both have in common."""

    stride: ClassVar[int] = STRIDE
    left_out_formats: ClassVar[tuple[str, ...]] = ("raw",)
    library: ClassVar[str] = "transformers"
    federated: ClassVar[bool] = True

    size: str = ""
    """Published size."""
    width: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Channels relative to the published size; below 1 no published weights fit."""
    queries: Positive = 300
    """Objects that are looked for at once; no image can have more detections of a class."""
    denoising: Count = 100
    """Pairs of denoising queries that an image gets in training, about; 0 trains without."""
    frozen_norm: bool = False
    """Leave the backbone's BatchNorm as it is in the pretrained weights, as D-FINE-L, X and RT-DETRv2 on
    ResNet50 and 101 were trained."""
    frozen_stem: bool = False
    """Leave the backbone's first convolutions as they are in the pretrained weights; as above."""
    backbone_lr: Fraction = 0.1
    """Learning rate of the backbone, relative to train.lr."""

    def misfit(self) -> str:
        """Tell what published weights are of, by their name alone, where it is another size or width."""
        named = published_size(self.weights)
        if named and named != (self.architecture, self.size):
            architecture, size = named
            return (
                f"{self.weights} are of model.architecture={architecture} and model.size={size}, not of "
                f"{self.architecture} and {self.size}"
            )
        if named and self.width != 1:
            return f"{self.weights} are of the published width, not {self.width:g} of it (model.width)"
        return ""

    def freezing(self) -> dict[str, Any]:
        """Return the options that keep weights as they were loaded, each with the value that does not."""
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
