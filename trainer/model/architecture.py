"""The detector interface that training, evaluation and export use.

A detector is a subclass of `Architecture` with a line in `trainer/config/architectures.py`; all other modules
work with any detector. docs/detectors.md explains how to add one.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from trainer.config import architectures
from trainer.config.schema import ModelConfig, TrainConfig

INPUT = "images"
OUTPUTS = ("boxes", "scores", "labels", "num")
RAW_OUTPUTS = ("boxes", "scores")
"""Names of the input and the outputs of exported graphs."""
MEAN = (0.485, 0.456, 0.406)  # mean of the ImageNet images, RGB in 0..1 (torchvision's presets)
STD = (0.229, 0.224, 0.225)  # standard deviation of the ImageNet images
ParameterGroups = list[dict[str, Any]]  # the argument of an optimizer


class Detections(NamedTuple):
    """Detections of a batch, best first, padded to K = detections_per_image rows."""

    boxes: Tensor  # [B, K, 4] in pixels of the network's input; zeros where padded
    scores: Tensor  # [B, K] fp32; zero where padded
    labels: Tensor  # [B, K] int64 contiguous labels; -1 where padded
    num: Tensor  # [B] int64: rows that are not padding


class Graph(nn.Module):
    """A detector with pre- and postprocessing; no shape depends on the data.

    The input is uint8 [B, 3, S, S]; the outputs are the tensors of `Detections`, or `RAW_OUTPUTS`.
    """

    output_names: tuple[str, ...] = OUTPUTS  # names of the outputs
    image_size: int  # S, in pixels
    rows: int  # K, the number of rows in the padded outputs

    @abstractmethod
    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs for a batch of images."""


class UpstreamWeights(NamedTuple):
    """Weights in the layout of the architecture's library."""

    state: dict[str, Tensor]  # tensors by name
    num_classes: int  # number of classes to build the library's model with
    files: Mapping[str, bytes] = {}
    """Other files that the library reads, by name. With them the weights are a folder, else a single file."""


class Architecture(nn.Module, ABC):
    """A detector, which computes losses in training and detections otherwise.

    Images are uint8 [B, 3, S, S]; boxes are [x1, y1, x2, y2] in pixels of these images; labels are contiguous
    from 0. The detector normalizes the images. `state_dict()` contains all state that training changes, under
    the names of the architecture's library.
    """

    config: ModelConfig  # options of the architecture
    loss_names: tuple[str, ...]
    """Names of the losses, in the order in which they are summed; instances may override it."""
    needs_batch_context: ClassVar[bool] = False
    """Whether `forward` takes an argument `context` (`global_batch.BatchContext`)."""
    needs_global_matches: bool = False
    """Whether the losses depend on predictions for the whole global batch. A step of several passes then
    first calls `match_targets` for each batch, at the cost of an additional forward pass."""

    def __init__(self, config: ModelConfig, num_classes: int) -> None:
        """Build with random weights; `num_classes` does not count the background."""
        super().__init__()
        self.config = config
        self.num_classes = num_classes

    @abstractmethod
    def forward(
        self, images: Tensor, boxes: Tensor, labels: Tensor, color: Tensor | None = None
    ) -> Mapping[str, Tensor]:
        """Return the losses of a batch. Call it under autocast.

        Args:
            images: uint8 [B, 3, S, S].
            boxes: fp32 [B, M, 4].
            labels: int64 [B, M]; PADDING where a row is padding.
            color: fp32 [B, 3, 4], an affine map of RGB in 0..1 for each image (photometric
                augmentation), or None.

        Returns:
            A scalar for each of `loss_names`: a mean over the images. Training minimizes their sum.
        """

    def match_targets(
        self, images: Tensor, boxes: Tensor, labels: Tensor, color: Tensor | None, context: Any
    ) -> tuple[Any, Tensor]:
        """Return `context.matches` for this batch's `forward`, and a scalar that is summed over all batches.

        Called with the arguments of `forward`, without gradients and without updating running statistics.
        """
        raise NotImplementedError

    @abstractmethod
    def predict(self, images: Tensor) -> Detections:
        """Detect objects in uint8 images [B, 3, S, S], without gradients. Thread-safe."""

    @abstractmethod
    def deployment_graph(self, image_size: int) -> Graph:
        """Return the graph to export for this input size, with the outputs of `predict` in fp32."""

    @abstractmethod
    def raw_graph(self, image_size: int) -> Graph:
        """Return the graph of all boxes [B, N, 4] or [B, N, C, 4] and scores [B, N, C], in fp32."""

    @abstractmethod
    def load_upstream(self, state: dict[str, Tensor], source: str) -> str:
        """Load weights of a detector or backbone in the library's layout in place; return a log message."""

    @abstractmethod
    def upstream_weights(self, class_names: Sequence[str]) -> UpstreamWeights:
        """Return the weights in the library's layout; `class_names` are in label order."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Human-readable name, e.g. `RetinaNet v2 on resnet50`."""

    @property
    def thresholds(self) -> dict[str, float]:
        """Postprocessing limits: `score`, `detections_per_image`, and `nms` if the detector uses NMS."""
        config = self.config
        return {"score": config.score_threshold, "detections_per_image": config.detections_per_image}

    def compile_network(self, mode: str) -> bool:
        """Compile the network for training, in a mode of torch.compile, without renaming its weights.

        Return whether anything was compiled.
        """
        return False

    def parameter_groups(self, config: TrainConfig) -> ParameterGroups:
        """Return the parameter groups for the optimizer.

        If a group has `lr_scale`, it multiplies the learning rate; if it has `weight_decay`, it replaces the
        three configured values.
        """
        return [{"params": [p for p in self.parameters() if p.requires_grad]}]

    def fold_batchnorm(self) -> Self:
        """Fold BatchNorm into convolutions for faster inference. The result cannot be trained or saved."""
        return self


def apply_color(pixels: Tensor, color: Tensor | None, white: int) -> Tensor:
    """Apply the color map of `Architecture.forward` to pixels [B, 3, S, S] in 0..white."""
    if color is None:
        return pixels
    # Autocast would reduce the precision of colors to eight bits.
    with torch.autocast(pixels.device.type, enabled=False):
        mapped = color[:, :, :3].to(pixels.dtype) @ pixels.flatten(2) + color[:, :, 3:] * white
    return mapped.clamp_(0, white).view_as(pixels)


def build(config: ModelConfig, num_classes: int) -> Architecture:
    """Build the detector of a configuration with random weights; `num_classes` excludes the background."""
    detector: Architecture = architectures.network_class(config.architecture)(config, num_classes)
    distributed = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    if config.sync_batchnorm and distributed:
        detector = nn.SyncBatchNorm.convert_sync_batchnorm(detector)
    return detector
