"""FCOS: torchvision's heads, and its losses on padded batches."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchvision.models.detection._utils import BoxLinearCoder
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.fcos import FCOSClassificationHead, FCOSHead, FCOSRegressionHead
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from trainer.model import upstream_fitting
from trainer.model.architecture import UpstreamWeights
from trainer.model.architectures.fcos.fcos_options import FcosOptions
from trainer.model.boxes import area, giou_loss
from trainer.model.focal import BACKGROUND, focal_loss
from trainer.model.pyramid_detector import DenseDetector, build_backbone, group_norm, shape_of

STRIDES = (8, 16, 32, 64, 128)
_PLACES = 1  # predictions at each place of a level
_LARGEST, _LEAST = 1e8, 1e-5
"""torchvision's bounds: a place takes the object with the greatest `_LARGEST` - area, if that is `_LEAST`."""


class Matches(NamedTuple):
    """Targets of N locations in each of B images."""

    labels: Tensor  # int64 [B, N]: a class, or BACKGROUND
    boxes: Tensor  # fp32 [B, N, 4]: the object's box, or the place's square if there is none
    positive: Tensor  # bool [B, N]: whether there is an object


class Fcos(DenseDetector):
    """FCOS in torchvision's state-dict layout (backbone.*, head.*).

    As in torchvision, losses are divided by the places that learn an object in a forward pass, so the split
    of a global batch into passes and processes changes them slightly.
    """

    config: FcosOptions
    loss_names = ("classification", "boxes", "centerness")

    def __init__(self, config: FcosOptions, num_classes: int) -> None:
        super().__init__(config, num_classes)
        self.backbone = build_backbone(config, first=3, extra=lambda _, width: LastLevelP6P7(width, width))
        self.head = _Head(config.fpn_channels, num_classes, config.head_depth)
        self.anchor_generator = AnchorGenerator(tuple((size,) for size in STRIDES), ((1.0,),) * len(STRIDES))

    def forward(
        self, images: Tensor, boxes: Tensor, labels: Tensor, color: Tensor | None = None,
        verified: Tensor | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Losses of a batch: focal loss, GIoU loss, and cross-entropy of the distance from the center.

        They are those of torchvision's `FCOSHead.compute_loss`; no shape depends on the data.
        """
        features = self.features(self.normalize(images, color))
        outputs = self.head(features)
        with torch.autocast(images.device.type, enabled=False):
            levels = self.anchors([shape_of(level) for level in features], images.shape[-1])
            matches = assign(boxes, labels, levels, self.config.center_radius)
            positive, places = matches.positive, torch.cat(levels).expand_as(matches.boxes)
            share = 1 / positive.sum().clamp(min=1)
            logits, coder = outputs["cls_logits"], self.head.box_coder
            # Places without an object learn nothing here; distances of 0 to a square keep the loss finite.
            distances = torch.where(positive[..., None], outputs["bbox_regression"], 0.0)
            overlap = giou_loss(coder.decode(distances, places), matches.boxes)
            left, top, right, bottom = coder.encode(places, matches.boxes).unbind(-1)
            centered = torch.sqrt(
                (torch.minimum(left, right) / torch.maximum(left, right))
                * (torch.minimum(top, bottom) / torch.maximum(top, bottom))
            )
            nearness = binary_cross_entropy_with_logits(
                outputs["bbox_ctrness"].squeeze(-1), centered, reduction="none"
            )
            return {
                "classification": focal_loss(
                    logits.flatten(0, 1), matches.labels.flatten(), share.expand(positive.numel())
                ),
                "boxes": torch.where(positive, overlap, 0.0).sum() * share,
                "centerness": torch.where(positive, nearness, 0.0).sum() * share,
            }

    def outputs(self, features: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Scores [B, 1, C, h * w] of each level, and distances [B, N, 4] to the edges."""
        classes, places = self.head.classification_head, self.head.regression_head
        scores, distances = [], []
        for level in features:
            boxes = places.conv(level)
            near = torch.sigmoid(places.bbox_ctrness(boxes).float())
            score = torch.sqrt(torch.sigmoid(classes.cls_logits(classes.conv(level)).float()) * near)
            count = level.shape[-2] * level.shape[-1]
            scores.append(score.reshape(-1, 1, self.num_classes, count))
            distance = torch.relu(places.bbox_reg(boxes)).float()
            distances.append(distance.reshape(-1, 4, count).transpose(1, 2))
        return scores, torch.cat(distances, dim=1)

    def scores(self, outputs: Tensor) -> Tensor:
        """Return the outputs: `outputs` already contains scores, because they depend on two heads."""
        return outputs

    def decode(self, offsets: Tensor, anchors: Tensor) -> Tensor:
        boxes: Tensor = self.head.box_coder.decode(offsets, anchors)
        return boxes

    def load_upstream(self, state: dict[str, Tensor], source: str) -> str:
        """Load weights of torchvision's FCOS or of a ResNet; see `upstream_fitting`."""
        named = upstream_fitting.as_detector(state, source, "FCOS", "head.regression_head.bbox_ctrness.")
        named = upstream_fitting.from_torchvision(named, self.num_classes, _PLACES)
        return upstream_fitting.load(self, named, source, (upstream_fitting.LAYER,))

    def upstream_weights(self, names: Sequence[str]) -> UpstreamWeights:
        """Weights for torchvision's `fcos_resnet50_fpn`, whose labels count from 1."""
        return UpstreamWeights(*upstream_fitting.to_torchvision(self.state_dict(), names, _PLACES))

    @property
    def title(self) -> str:
        return f"FCOS on {self.config.backbone}"


def assign(boxes: Tensor, labels: Tensor, levels: list[Tensor], radius: float) -> Matches:
    """Assign to each location the smallest object whose center is near and whose size suits the level.

    The rules of `FCOS.compute_loss` in torchvision, for all images at once. `levels` has the squares [n, 4]
    around the places of each level; `radius` is the distance from the center, in squares.
    """
    anchors = torch.cat(levels)
    sides = anchors[:, 2] - anchors[:, 0]
    lowest, highest = sides * 4, sides * 8
    lowest[: len(levels[0])] = 0
    highest[-len(levels[-1]) :] = math.inf
    x, y = ((anchors[:, :2] + anchors[:, 2:]) / 2).unbind(1)
    # [B, M, N] each; a row of padding has no size, so that no place is in it.
    x1, y1, x2, y2 = (side[:, :, None] for side in boxes.unbind(-1))
    off_center = torch.maximum((x - (x1 + x2) / 2).abs(), (y - (y1 + y2) / 2).abs())
    edges = torch.stack([x - x1, y - y1, x2 - x, y2 - y])
    farthest = edges.amax(0)
    fits = (off_center < radius * sides) & (edges.amin(0) > 0) & (farthest > lowest) & (farthest < highest)
    smallness, index = torch.where(fits, _LARGEST - area(boxes)[:, :, None], 0.0).max(dim=1)
    positive = smallness >= _LEAST
    found = boxes.gather(1, index[:, :, None].expand(-1, -1, 4))
    return Matches(
        labels=torch.where(positive, labels.gather(1, index), BACKGROUND),
        boxes=torch.where(positive[:, :, None], found, anchors),
        positive=positive,
    )


class _Head(FCOSHead):
    """torchvision's head for any width, whose outputs are fp32: eight bits cannot place a box."""

    def __init__(self, channels: int, classes: int, depth: int) -> None:
        nn.Module.__init__(self)
        self.box_coder = BoxLinearCoder(normalize_by_size=True)
        self.classification_head = FCOSClassificationHead(
            channels, _PLACES, classes, depth, norm_layer=group_norm
        )
        self.regression_head = FCOSRegressionHead(channels, _PLACES, depth, norm_layer=group_norm)

    def forward(self, features: list[Tensor]) -> dict[str, Tensor]:
        return {name: part.float() for name, part in super().forward(features).items()}
