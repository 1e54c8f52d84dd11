"""Detectors on a residual network with a feature pyramid, in torchvision's state-dict layout."""

import itertools
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock
from torchvision.ops.misc import FrozenBatchNorm2d

from trainer.data.batch import PADDING
from trainer.model.architecture import MEAN, STD, Architecture, recolored
from trainer.model.batchnorm_folding import TORCHVISION_PAIRS, apply_in_convolutions, fold
from trainer.model.boxes import pairwise_iou
from trainer.model.deployment import RAW_OUTPUTS, Detections, Graph, best_pairs, nms_keep, postprocess, served
from trainer.model.focal import BACKGROUND, IGNORED
from trainer.model.fused_functions import fused_exactly
from trainer.model.pyramid_options import PyramidOptions

NormLayer = Callable[[int], nn.Module]

_DEPTHS: dict[str, tuple[Any, list[int], int, int]] = {
    # block, blocks of each stage, groups, width of a group
    "resnet18": (BasicBlock, [2, 2, 2, 2], 1, 64),
    "resnet34": (BasicBlock, [3, 4, 6, 3], 1, 64),
    "resnet50": (Bottleneck, [3, 4, 6, 3], 1, 64),
    "resnet101": (Bottleneck, [3, 4, 23, 3], 1, 64),
    "resnext50_32x4d": (Bottleneck, [3, 4, 6, 3], 32, 4),
    "resnext101_32x8d": (Bottleneck, [3, 4, 23, 3], 32, 8),
    "resnext101_64x4d": (Bottleneck, [3, 4, 23, 3], 64, 4),
}
_PUBLISHED_WIDTH = 64
_OVERLAPS_AT_ONCE = 32 * 1024 * 1024
"""Pairs of target and anchor whose overlaps are in memory at the same time."""


class PyramidDetector(Architecture):
    """A detector whose features come from `backbone`, for images normalised like torchvision's."""

    config: PyramidOptions
    backbone: BackboneWithFPN
    anchor_generator: AnchorGenerator
    mean: Tensor
    std: Tensor

    def __init__(self, config: PyramidOptions, num_classes: int) -> None:
        super().__init__(config, num_classes)
        self.register_buffer("mean", torch.tensor(MEAN).view(1, 3, 1, 1) * 255, persistent=False)
        self.register_buffer("std", torch.tensor(STD).view(1, 3, 1, 1) * 255, persistent=False)
        self._anchors: dict[tuple[int, torch.device], list[Tensor]] = {}

    def normalize(self, images: Tensor, color: Tensor | None = None) -> Tensor:
        """fp32 network input from uint8 images, in the memory format of the weights."""
        values = (recolored(images.float(), color, 255) - self.mean) / self.std
        if self.backbone.body.conv1.weight.is_contiguous(memory_format=torch.channels_last):
            values = values.contiguous(memory_format=torch.channels_last)
        return values

    def features(self, images: Tensor) -> list[Tensor]:
        """Levels [B, fpn_channels, h, w] for normalised images [B, 3, S, S], the finest first."""
        return list(self.backbone(images).values())

    def anchors(self, shapes: list[tuple[int, int]], image_size: int) -> list[Tensor]:
        """Anchors [n, 4] of each level; always fp32: in bf16 they would move by up to 6 pixels at 800 px."""
        key = (image_size, self.mean.device)
        if key not in self._anchors:
            self.anchor_generator.set_cell_anchors(torch.float32, self.mean.device)
            strides = [
                [torch.tensor(image_size // side, device=self.mean.device) for side in shape]
                for shape in shapes
            ]
            with torch.inference_mode(False):
                self._anchors[key] = self.anchor_generator.grid_anchors([list(s) for s in shapes], strides)
        return self._anchors[key]

    def located(self, images: Tensor, anchors: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
        """Features of uint8 images, and the anchors [N, 4] of all levels, which are made unless given."""
        features = self.features(self.normalize(images))
        if anchors is None:
            anchors = torch.cat(self.anchors([shape_of(level) for level in features], images.shape[-1]))
        return features, anchors

    @abstractmethod
    def found(self, images: Tensor, anchors: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Boxes [B, T, 4], scores and labels [B, T] that go into the suppression; see `located`."""

    @abstractmethod
    def raw(self, images: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """All boxes [B, N, 4] or [B, N, C, 4] in pixels, and scores [B, N, C]."""

    @torch.inference_mode()
    def predict(self, images: Tensor) -> Detections:
        return postprocess(*self.found(images), self.num_classes, images.shape[-1], self.config)

    def deployment_graph(self, image_size: int) -> Graph:
        return PyramidGraph(self, image_size)

    def raw_graph(self, image_size: int) -> Graph:
        return RawGraph(self, image_size)

    @property
    def thresholds(self) -> dict[str, float]:
        return {**super().thresholds, "nms": self.config.nms_threshold}

    def folded(self) -> Self:
        fold(self.backbone.body, TORCHVISION_PAIRS)
        return self


class DenseDetector(PyramidDetector):
    """A detector that predicts classes and a box for A anchors at each location of each level."""

    @abstractmethod
    def outputs(self, features: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Class outputs [B, A, C, h * w] of each level, and box outputs [B, N, 4] of all levels."""

    @abstractmethod
    def decode(self, offsets: Tensor, anchors: Tensor) -> Tensor:
        """Boxes [..., 4] in pixels from box outputs [..., 4] and anchors [..., 4]."""

    def scores(self, outputs: Tensor) -> Tensor:
        """Scores of class outputs, of any shape, in fp32."""
        return torch.sigmoid(outputs.float())

    def candidates(
        self, outputs: list[Tensor], offsets: Tensor, anchors: Tensor, image_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Boxes [B, T, 4], scores and labels [B, T] of the best pairs of each level, the finest level first.

        `outputs` and `offsets` are those of `outputs()`, `anchors` [N, 4] those of all levels.
        """
        parts, start = [], 0
        for level in outputs:
            best, anchor, label = best_pairs(level, self.config.topk_candidates)
            parts.append((best, anchor + start, label))
            start += level.shape[1] * level.shape[3]
        # Decoded for all levels at once: many small operators cost more than the arithmetic.
        best, anchor, labels = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        chosen = offsets.gather(1, anchor[:, :, None].expand(-1, -1, 4)).float()
        return self.decode(chosen, anchors[anchor]).clamp(0, image_size), self.scores(best), labels

    def found(self, images: Tensor, anchors: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        features, anchors = self.located(images, anchors)
        return self.candidates(*self.outputs(features), anchors, images.shape[-1])

    def raw(self, images: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        outputs, offsets = self.outputs(self.features(self.normalize(images)))
        # [B, A, C, h * w] -> [B, h * w * A, C], the order of the anchors.
        levels = [level.permute(0, 3, 1, 2).flatten(1, 2) for level in outputs]
        boxes = self.decode(offsets, anchors).clamp(0, images.shape[-1])
        return boxes, self.scores(torch.cat(levels, dim=1))


class PyramidGraph(Graph):
    """uint8 [B, 3, S, S] in, detections out; anchors and thresholds are constants of the graph."""

    anchors: Tensor  # fp32 [N, 4] of all levels, x1 y1 x2 y2

    def __init__(self, detector: PyramidDetector, image_size: int) -> None:
        super().__init__()
        self.detector, self.config, self.image_size = detector.eval(), detector.config, image_size
        blank = torch.zeros(1, 3, image_size, image_size, dtype=torch.uint8, device=detector.mean.device)
        # Not in inference mode, whose tensors no exporter can trace.
        with torch.no_grad():
            self.register_buffer("anchors", detector.located(blank)[1])
            candidates = detector.found(blank, self.anchors)[1].shape[1]
        self.rows = min(self.config.detections_per_image, candidates)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        boxes, scores, labels = self.detector.found(images, self.anchors)
        kept = nms_keep(
            boxes, scores, labels, self.detector.num_classes,
            self.config.nms_threshold, self.config.score_threshold,
        )  # fmt: skip
        return served(boxes, scores * kept, labels, self.rows)


class RawGraph(PyramidGraph):
    """uint8 [B, 3, S, S] in; boxes and scores before the suppression out.

    The inputs of TensorRT's EfficientNMS_TRT (box_coding 0, score_activation 0, background_class -1).
    """

    names = RAW_OUTPUTS

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self.detector.raw(images, self.anchors)


class _WidthResNet(ResNet):
    """torchvision's ResNet with `width` instead of 64 channels in its first stage."""

    def __init__(self, width: int, norm_layer: NormLayer, block: Any, *args: Any, **kwargs: Any) -> None:
        self.width = width
        super().__init__(block, *args, norm_layer=norm_layer, **kwargs)
        if width != _PUBLISHED_WIDTH:
            self.conv1 = nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False)
            nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
            self.bn1 = norm_layer(width)

    def _make_layer(self, block: Any, planes: int, *args: Any, **kwargs: Any) -> nn.Sequential:
        if planes == _PUBLISHED_WIDTH:
            self.inplanes = self.width
        return super()._make_layer(block, planes * self.width // _PUBLISHED_WIDTH, *args, **kwargs)


def group_norm(channels: int) -> nn.GroupNorm:
    """GroupNorm with 8 channels a group, at most 32 groups (the published width has 32)."""
    return nn.GroupNorm(max(1, min(32, channels // 8)), channels)


def build_backbone(
    config: PyramidOptions, first: int, extra: Callable[[int, int], ExtraFPNBlock],
    norm_layer: NormLayer | None = None,
) -> BackboneWithFPN:  # fmt: skip
    """Build the backbone and its pyramid: [B, 3, H, W] to an ordered dict of [B, fpn_channels, h, w].

    The pyramid starts at stage C`first` and ends at C5. `extra` makes the coarser levels from the channels
    of C5 and of the pyramid; `norm_layer` is the normalization within the pyramid, if any.
    """
    block, layers, groups, group_width = _DEPTHS[config.backbone]
    norms: dict[str, NormLayer] = {
        "batch": nn.BatchNorm2d, "frozen": FrozenBatchNorm2d, "group": group_norm
    }  # fmt: skip
    body = _WidthResNet(
        config.backbone_width, norms[config.norm], block, layers, groups=groups, width_per_group=group_width
    )
    freeze(body, config.trainable_layers)
    apply_in_convolutions(body, (FrozenBatchNorm2d,), TORCHVISION_PAIRS)
    stages = range(first, 6)
    channels = [config.backbone_width * block.expansion * 2 ** (stage - 2) for stage in stages]
    return BackboneWithFPN(
        body,
        return_layers={f"layer{stage - 1}": str(index) for index, stage in enumerate(stages)},
        in_channels_list=channels,
        out_channels=config.fpn_channels,
        extra_blocks=extra(channels[-1], config.fpn_channels),
        norm_layer=norm_layer,
    )


def freeze(body: ResNet, trainable_layers: int) -> None:
    """Stop training all but the last `trainable_layers` of the five stages."""
    trained = ["layer4", "layer3", "layer2", "layer1", "conv1"][:trainable_layers]
    for name, parameter in body.named_parameters():
        stage = name.split(".")[0].replace("bn1", "conv1")
        if stage not in trained:
            parameter.requires_grad_(False)


def shape_of(level: Tensor) -> tuple[int, int]:
    """Height and width of a feature map [B, C, h, w]."""
    return level.shape[-2], level.shape[-1]


def match(
    boxes: Tensor, labels: Tensor, anchors: Tensor, foreground: float = 0.5, background: float = 0.4,
    *, keep_best: bool = True,
) -> Tensor:  # fmt: skip
    """Assign to every anchor a target, BACKGROUND or IGNORED, as torchvision's `Matcher` does.

    An anchor takes the target it overlaps most if that IoU is at least `foreground`; below `background` it
    takes none. With `keep_best` the anchors that overlap a target most keep their own best target however
    small the overlap, so that every target has an anchor. Of targets [B, M, 4] with labels [B, M] and anchors
    [N, 4] or [B, N, 4]: int64 [B, N], indices into the M targets, or BACKGROUND or IGNORED.
    """
    count = max(1, _OVERLAPS_AT_ONCE // (boxes.shape[1] * anchors.shape[-2]))
    each = anchors.split(count) if anchors.ndim == 3 else itertools.repeat(anchors)
    parts = zip(boxes.split(count), labels.split(count), each, strict=False)
    found = [_best_overlaps(some, names != PADDING, places) for some, names, places in parts]
    iou, target, best = (torch.cat(part) for part in zip(*found, strict=True))
    matched = torch.where(iou < foreground, IGNORED, target)
    matched = torch.where(iou < background, BACKGROUND, matched)
    return torch.where(best, target, matched) if keep_best else matched


@fused_exactly
def _best_overlaps(boxes: Tensor, valid: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each anchor its largest IoU, that target, and whether the anchor is the best of any target."""
    iou = pairwise_iou(boxes, anchors).masked_fill_(~valid[:, :, None], -1.0)
    best_iou, best_target = iou.max(dim=1)
    best = ((iou == iou.amax(dim=2, keepdim=True)) & valid[:, :, None]).any(dim=1)
    return best_iou, best_target, best
