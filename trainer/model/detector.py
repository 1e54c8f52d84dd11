"""The detector as one module: uint8 squares in; losses in training, detections otherwise."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops.misc import Conv2dNormActivation, FrozenBatchNorm2d

from trainer.config import ModelConfig
from trainer.data.batch import PADDING
from trainer.model.backbone import build_backbone, group_norm
from trainer.model.fused_functions import guarded
from trainer.model.loss import Losses, retinanet_loss
from trainer.model.postprocess import Detections, postprocess

MEAN = (0.485, 0.456, 0.406)
"""Mean of the ImageNet images, RGB in 0..1 (torchvision's presets)."""
STD = (0.229, 0.224, 0.225)
"""Standard deviation of the same."""
LEVELS = 5

_EPS_FREE_WEIGHTS = "torchvision:RetinaNet_ResNet50_FPN_Weights.COCO_V1"


class Detector(nn.Module):
    """RetinaNet in torchvision's state-dict layout (backbone.*, head.*).

    Images are uint8 [B, 3, S, S]; boxes are [x1, y1, x2, y2] in pixels of that square;
    labels are contiguous from 0. Normalisation happens inside.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: ModelConfig, num_classes: int) -> None:
        super().__init__()
        self.config = config
        self.num_classes = num_classes
        self.label_offset = int(config.background_class)
        self.backbone = build_backbone(config)
        self.head = _build_head(config, num_classes + self.label_offset)
        self.box_loss = _box_loss_kind(config)
        sizes = tuple(
            tuple(int(size * scale) for scale in config.anchor_scales) for size in config.anchor_sizes
        )
        self.anchor_generator = AnchorGenerator(sizes, (tuple(config.aspect_ratios),) * LEVELS)
        self.register_buffer("mean", torch.tensor(MEAN).view(1, 3, 1, 1) * 255, persistent=False)
        self.register_buffer("std", torch.tensor(STD).view(1, 3, 1, 1) * 255, persistent=False)
        self._compiled_trunk: Callable[[Tensor], tuple[list[Tensor], Tensor]] | None = None
        self._anchors: dict[tuple[tuple[int, int], torch.device], list[Tensor]] = {}
        if config.weights == _EPS_FREE_WEIGHTS:
            # These weights were trained with an epsilon of 0; torchvision resets it as well.
            for module in self.modules():
                if isinstance(module, FrozenBatchNorm2d):
                    module.eps = 0.0

    def forward(self, images: Tensor, boxes: Tensor, labels: Tensor, color: Tensor | None = None) -> Losses:
        """Losses of a batch.

        Args:
            images: uint8 [B, 3, S, S].
            boxes: fp32 [B, M, 4].
            labels: int64 [B, M]; PADDING where a row is padding.
            color: fp32 [B, 3, 4], an affine map of RGB in 0..1 for each image (photometric
                augmentation), or None.
        """
        features, offsets = (self._compiled_trunk or self.trunk)(self.normalize(images, color))
        anchors = self.anchors([(level.shape[-2], level.shape[-1]) for level in features], _size(images))
        return retinanet_loss(
            self.box_loss,
            features,
            self.head.classification_head.cls_logits,
            offsets,
            anchors,
            boxes,
            torch.where(labels == PADDING, PADDING, labels + self.label_offset),
        )

    def trunk(self, images: Tensor) -> tuple[list[Tensor], Tensor]:
        """The network up to the last classification convolution, for the loss.

        Args:
            images: normalised, [B, 3, S, S].

        Returns:
            The class head's features [B, fpn_channels, h, w] of each level, and the offsets [B, N, 4].
        """
        features = self.features(images)
        class_head = self.head.classification_head
        return [class_head.conv(level) for level in features], self.head.regression_head(features)

    def compile_trunk(self, mode: str) -> None:
        """Compile `trunk` for training, in one of torch.compile's modes; one shape, one graph."""
        compiled = guarded(torch.compile(self.trunk, mode=mode, dynamic=False, fullgraph=True), self.trunk)

        def run(images: Tensor) -> tuple[list[Tensor], Tensor]:
            # CUDA graphs reuse their outputs' memory from here on.
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(images)

        self._compiled_trunk = run

    @torch.inference_mode()
    def predict(self, images: Tensor) -> Detections:
        """Detections in uint8 images [B, 3, S, S]."""
        logits, offsets, shapes = self.outputs(self.normalize(images))
        size = _size(images)
        return self.detections(logits, offsets, self.anchors(shapes, size), size)

    def detections(
        self, logits: list[Tensor], offsets: list[Tensor], anchors: list[Tensor], image_size: tuple[int, int]
    ) -> Detections:
        """Detections from the heads' outputs of each level, with the background output left out."""
        classes = [level[:, :, self.label_offset :] for level in logits]
        return postprocess(classes, offsets, anchors, image_size, self.config)

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

    def features(self, images: Tensor) -> list[Tensor]:
        """Pyramid P3..P7 of normalised images [B, 3, S, S], each [B, fpn_channels, h, w]."""
        return list(self.backbone(images).values())

    def outputs(self, images: Tensor) -> tuple[list[Tensor], list[Tensor], list[tuple[int, int]]]:
        """Class logits [B, n, C], offsets [B, n, 4] and shape of each level, of normalised images.

        Level by level: a concatenation would copy the largest tensor of all.
        """
        features = self.features(images)
        head, rows = self.head.classification_head, len(images)
        logits = [
            head.cls_logits(head.conv(level)).permute(0, 2, 3, 1).reshape(rows, -1, head.num_classes)
            for level in features
        ]
        offsets = self.head.regression_head(features).split([level.shape[1] for level in logits], dim=1)
        return logits, list(offsets), [(level.shape[-2], level.shape[-1]) for level in features]

    def anchors(self, shapes: list[tuple[int, int]], image_size: tuple[int, int]) -> list[Tensor]:
        """Anchors [n, 4] of each level, fp32, built once for an input size and device.

        Always fp32: in bf16 they would move by up to 6 pixels at 800 px.
        """
        device = self.mean.device
        key = (image_size, device)
        if key not in self._anchors:
            self.anchor_generator.set_cell_anchors(torch.float32, device)
            strides = [
                [torch.tensor(image_size[axis] // shape[axis], device=device) for axis in (0, 1)]
                for shape in shapes
            ]
            with torch.inference_mode(False):
                self._anchors[key] = self.anchor_generator.grid_anchors([list(s) for s in shapes], strides)
        return self._anchors[key]


def build(config: ModelConfig, num_classes: int) -> Detector:
    """Build a detector with random weights for `num_classes` classes (background not counted)."""
    detector = Detector(config, num_classes)
    if (
        config.sync_batchnorm
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        return nn.SyncBatchNorm.convert_sync_batchnorm(detector)
    return detector


def _size(images: Tensor) -> tuple[int, int]:
    return images.shape[-2], images.shape[-1]


def _box_loss_kind(config: ModelConfig) -> str:
    if config.box_loss != "default":
        return config.box_loss
    return "giou" if config.version == "v2" else "l1"


def _build_head(config: ModelConfig, outputs: int) -> RetinaNetHead:
    anchors = len(config.anchor_scales) * len(config.aspect_ratios)
    norm_layer = group_norm if config.version == "v2" else None
    head = RetinaNetHead(config.fpn_channels, anchors, outputs, norm_layer=norm_layer)
    for branch in (head.classification_head, head.regression_head):
        branch.conv = nn.Sequential(*(_head_layer(config, norm_layer) for _ in range(config.head_depth)))
    return head


def _head_layer(config: ModelConfig, norm_layer: object) -> nn.Module:
    layer = Conv2dNormActivation(config.fpn_channels, config.fpn_channels, norm_layer=norm_layer)
    nn.init.normal_(layer[0].weight, std=0.01)
    if layer[0].bias is not None:
        nn.init.zeros_(layer[0].bias)
    return layer
