"""What detectors on a residual network with a feature pyramid share, in torchvision's layout."""

from typing import Protocol, Self, cast

import torch
from torch import Tensor
from torchvision.models.detection.backbone_utils import BackboneWithFPN

from trainer.data.batch import PADDING
from trainer.model.architecture import Architecture
from trainer.model.backbone_options import PyramidOptions
from trainer.model.batchnorm_folding import TORCHVISION, fold

MEAN = (0.485, 0.456, 0.406)
"""Mean of the ImageNet images, RGB in 0..1 (torchvision's presets)."""
STD = (0.229, 0.224, 0.225)
"""Standard deviation of the same."""


class _Suppressing(Protocol):
    """Options of a detector that ends with non-maximum suppression."""

    score_threshold: float
    nms_threshold: float
    detections_per_image: int


class PyramidDetector(Architecture):
    """A detector whose features are `backbone`'s, of images normalised as torchvision does it."""

    config: PyramidOptions
    backbone: BackboneWithFPN
    mean: Tensor
    std: Tensor

    def __init__(self, config: PyramidOptions, num_classes: int) -> None:
        super().__init__(config, num_classes)
        self.register_buffer("mean", torch.tensor(MEAN).view(1, 3, 1, 1) * 255, persistent=False)
        self.register_buffer("std", torch.tensor(STD).view(1, 3, 1, 1) * 255, persistent=False)

    def normalize(self, images: Tensor, color: Tensor | None = None) -> Tensor:
        """fp32 network input from uint8 images, in the memory format of the weights."""
        values = images.float()
        if color is not None:
            # In fp32: autocast would leave eight bits of a colour's precision.
            with torch.autocast(images.device.type, enabled=False):
                mapped = color[:, :, :3] @ values.flatten(2) + color[:, :, 3:] * 255
            values = mapped.clamp_(0, 255).view_as(values)
        values = (values - self.mean) / self.std
        if self.backbone.body.conv1.weight.is_contiguous(memory_format=torch.channels_last):
            values = values.contiguous(memory_format=torch.channels_last)
        return values

    @property
    def thresholds(self) -> dict[str, float]:
        """Of scores, and of overlaps within a class."""
        config = cast(_Suppressing, self.config)
        return {
            "score": config.score_threshold,
            "nms": config.nms_threshold,
            "detections_per_image": config.detections_per_image,
        }

    def blank(self, image_size: int) -> Tensor:
        """An image without content, uint8 [1, 3, S, S], from which a graph learns its levels."""
        return torch.zeros(1, 3, image_size, image_size, dtype=torch.uint8, device=self.mean.device)

    def folded(self) -> Self:
        """Its batch normalisation is in the convolutions; see `batchnorm_folding.fold`."""
        fold(self.backbone.body, TORCHVISION)
        return self


def unpadded(boxes: Tensor, labels: Tensor, first: int) -> list[dict[str, Tensor]]:
    """Targets as torchvision takes them, without padding.

    Args:
        boxes: fp32 [B, M, 4].
        labels: int64 [B, M]; PADDING where a row is padding.
        first: label of the first class.
    """
    real = labels != PADDING
    return [
        {"boxes": rows[kept], "labels": names[kept] + first}
        for rows, names, kept in zip(boxes, labels, real, strict=True)
    ]
