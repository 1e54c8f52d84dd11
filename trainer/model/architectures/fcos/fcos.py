"""FCOS, with torchvision's heads, losses and postprocessing on our squares and padded batches."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchvision.models.detection._utils import BoxLinearCoder
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.fcos import FCOS, FCOSClassificationHead, FCOSHead, FCOSRegressionHead
from torchvision.models.detection.image_list import ImageList
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from trainer.model import class_outputs, upstream_fitting
from trainer.model.architecture import UpstreamWeights
from trainer.model.architectures.fcos.fcos_options import FcosOptions
from trainer.model.backbone import build_backbone, group_norm
from trainer.model.boxes import area, giou_loss
from trainer.model.deployment import RAW_OUTPUTS, Graph, best_pairs, nms_keep, served
from trainer.model.focal import BACKGROUND, focal_loss
from trainer.model.postprocess import Detections, padded
from trainer.model.pyramid_detector import PyramidDetector

STRIDES = (8, 16, 32, 64, 128)
_PLACES = 1
"""Predictions at each place of a level."""
_LARGEST, _LEAST = 1e8, 1e-5
"""torchvision's bounds: a place takes the object with the greatest `_LARGEST` - area, if that is `_LEAST`."""


class Matches(NamedTuple):
    """What each of N places learns in each of B images."""

    labels: Tensor
    """int64 [B, N]: a class, or BACKGROUND."""
    boxes: Tensor
    """fp32 [B, N, 4]: the object's box, or the place's own square where there is none."""
    positive: Tensor
    """bool [B, N]: whether there is an object."""


class Fcos(PyramidDetector):
    """FCOS in torchvision's state-dict layout (backbone.*, head.*).

    Its losses are divided by the places that learn an object, over all images of a forward pass, as
    torchvision does: how a global batch is cut into passes and processes changes them a little.
    """

    config: FcosOptions
    loss_names = ("classification", "boxes", "centerness")

    def __init__(self, config: FcosOptions, num_classes: int) -> None:
        super().__init__(config, num_classes)
        self.backbone = build_backbone(config, first=3, extra=lambda _, width: LastLevelP6P7(width, width))
        self.head = _Head(config.fpn_channels, num_classes, config.head_depth)
        stock = FCOS(
            self.backbone, num_classes, head=self.head,
            anchor_generator=AnchorGenerator(tuple((size,) for size in STRIDES), ((1.0,),) * len(STRIDES)),
            center_sampling_radius=config.center_radius, score_thresh=config.score_threshold,
            nms_thresh=config.nms_threshold, detections_per_img=config.detections_per_image,
            topk_candidates=config.topk_candidates,
        )  # fmt: skip
        # In a tuple: its weights are ours, and shall not be registered a second time.
        self._stock = (stock,)

    def forward(
        self, images: Tensor, boxes: Tensor, labels: Tensor, color: Tensor | None = None,
        verified: Tensor | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Losses of a batch: focal loss, GIoU loss, and cross-entropy of the distance from the centre."""
        inputs = self.normalize(images, color)
        features = list(self.backbone(inputs).values())
        outputs = self.head(features)
        with torch.autocast(inputs.device.type, enabled=False):
            anchors = self.anchors(inputs[:1], features)[0]
            matches = assign(boxes, labels, anchors, _counts(features), self.config.center_radius)
            return self._losses(outputs, anchors, matches)

    def _losses(self, outputs: dict[str, Tensor], anchors: Tensor, matches: Matches) -> dict[str, Tensor]:
        """The losses of torchvision's `FCOSHead.compute_loss`; no shape depends on the data.

        Args:
            outputs: cls_logits [B, N, C], bbox_regression [B, N, 4] and bbox_ctrness [B, N, 1], fp32.
            anchors: [N, 4].
            matches: what each place learns.
        """
        positive, places = matches.positive, anchors.expand_as(matches.boxes)
        share = 1 / positive.sum().clamp(min=1)
        logits, coder = outputs["cls_logits"], self.head.box_coder
        # Places without an object learn nothing here; with distances of 0 to a square their loss is finite.
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

    @torch.inference_mode()
    def predict(self, images: Tensor) -> Detections:
        """Detections in uint8 images [B, 3, S, S], by torchvision's postprocessing."""
        inputs = self.normalize(images)
        features = list(self.backbone(inputs).values())
        counts = _counts(features)
        outputs = {name: list(part.split(counts, dim=1)) for name, part in self.head(features).items()}
        anchors = [list(each.split(counts)) for each in self.anchors(inputs, features)]
        sizes = [(images.shape[-2], images.shape[-1])] * len(images)
        detections = self._stock[0].postprocess_detections(outputs, anchors, sizes)
        return padded(detections, self.config.detections_per_image, first=0)

    def anchors(self, images: Tensor, features: list[Tensor]) -> list[Tensor]:
        """A square of a stride's side at each place, [N, 4] fp32 for each image.

        Args:
            images: [B, 3, S, S].
            features: of each level, [B, channels, h, w].
        """
        sizes = [(images.shape[-2], images.shape[-1])] * len(images)
        anchors: list[Tensor] = self._stock[0].anchor_generator(
            ImageList(images.float(), sizes), [level.float() for level in features]
        )
        return anchors

    def deployment_graph(self, image_size: int) -> Graph:
        """The detector with pre- and postprocessing."""
        return FcosGraph(self, image_size)

    def raw_graph(self, image_size: int) -> Graph:
        """All boxes and scores, for runtimes with a suppression of their own."""
        return RawFcosGraph(self, image_size)

    def load_upstream(self, state: dict[str, Tensor], source: str) -> str:
        """Load weights of torchvision's FCOS or of a ResNet; see `upstream_fitting`."""
        named = upstream_fitting.as_detector(state, source, "FCOS", "head.regression_head.bbox_ctrness.")
        named = class_outputs.without_unused(named, self.num_classes, _PLACES)
        return upstream_fitting.load(self, named, source, (class_outputs.LAYER,))

    def upstream_weights(self, names: Sequence[str]) -> UpstreamWeights:
        """Weights for torchvision's `fcos_resnet50_fpn`, whose labels count from 1."""
        places, total = class_outputs.places(names)
        return UpstreamWeights(class_outputs.spread(self.state_dict(), places, total, _PLACES), total)

    @property
    def title(self) -> str:
        """Name and backbone."""
        return f"FCOS on {self.config.backbone}"


def assign(boxes: Tensor, labels: Tensor, anchors: Tensor, counts: list[int], radius: float) -> Matches:
    """Assign the smallest object to each place that is near its centre and on the level for its size.

    The rules of `FCOS.compute_loss` in torchvision, for all images at once.

    Args:
        boxes: [B, M, 4] targets in pixels; zeros where padded.
        labels: int64 [B, M].
        anchors: [N, 4] the square around each place.
        counts: places of each level.
        radius: distance from the centre, in squares.
    """
    sides = anchors[:, 2] - anchors[:, 0]
    lowest, highest = sides * 4, sides * 8
    lowest[: counts[0]] = 0
    highest[-counts[-1] :] = math.inf
    x, y = ((anchors[:, :2] + anchors[:, 2:]) / 2).unbind(1)
    # [B, M, N] each; a row of padding has no size, so that no place is in it.
    x1, y1, x2, y2 = (side[:, :, None] for side in boxes.unbind(-1))
    off_centre = torch.maximum((x - (x1 + x2) / 2).abs(), (y - (y1 + y2) / 2).abs())
    edges = torch.stack([x - x1, y - y1, x2 - x, y2 - y])
    farthest = edges.amax(0)
    fits = (off_centre < radius * sides) & (edges.amin(0) > 0) & (farthest > lowest) & (farthest < highest)
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


def _counts(features: list[Tensor]) -> list[int]:
    """Places of each level."""
    return [level.shape[-2] * level.shape[-1] for level in features]


class _Places(Graph):
    """The detector up to its outputs, with constant places."""

    anchors: Tensor
    """fp32 [N, 4]: the square around each place."""

    def __init__(self, detector: Fcos, image_size: int) -> None:
        super().__init__()
        self.detector = detector.eval()
        self.config, self.image_size = detector.config, image_size
        with torch.no_grad():
            blank = detector.blank(image_size)
            features = list(detector.backbone(detector.normalize(blank)).values())
            self.register_buffer("anchors", detector.anchors(blank, features)[0])
        places = [level.shape[-2] * level.shape[-1] for level in features]
        candidates = sum(min(self.config.topk_candidates, count * detector.num_classes) for count in places)
        self.rows = min(self.config.detections_per_image, candidates)

    def outputs(self, images: Tensor) -> tuple[list[Tensor], Tensor]:
        """Scores [B, 1, C, h * w] of each level, and the distances [B, N, 4] of all places to the edges."""
        head = self.detector.head
        classes, places = head.classification_head, head.regression_head
        scores, distances = [], []
        for level in self.detector.backbone(self.detector.normalize(images)).values():
            boxes = places.conv(level)
            near = torch.sigmoid(places.bbox_ctrness(boxes).float())
            score = torch.sqrt(torch.sigmoid(classes.cls_logits(classes.conv(level)).float()) * near)
            count = level.shape[-2] * level.shape[-1]
            scores.append(score.reshape(-1, 1, self.detector.num_classes, count))
            distance = torch.relu(places.bbox_reg(boxes)).float()
            distances.append(distance.reshape(-1, 4, count).transpose(1, 2))
        return scores, torch.cat(distances, dim=1)

    def boxes(self, distances: Tensor, anchors: Tensor) -> Tensor:
        """Boxes in pixels of the square, within it."""
        return self.detector.head.box_coder.decode(distances, anchors).clamp(0, self.image_size)


class FcosGraph(_Places):
    """uint8 [B, 3, S, S] in, `Served` out; places and thresholds are constants of the graph."""

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Detections of a batch of uint8 squares; see `Served`."""
        levels, distances = self.outputs(images)
        parts, start = [], 0
        for level in levels:
            best, place, label = best_pairs(level, self.config.topk_candidates)
            parts.append((best, place + start, label))
            start += level.shape[3]
        scores, place, labels = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        boxes = self.boxes(distances.gather(1, place[:, :, None].expand(-1, -1, 4)), self.anchors[place])
        kept = nms_keep(
            boxes, scores, labels, self.detector.num_classes,
            self.config.nms_threshold, self.config.score_threshold,
        )  # fmt: skip
        return served(boxes, scores * kept, labels, self.rows)


class RawFcosGraph(_Places):
    """uint8 [B, 3, S, S] in; boxes [B, N, 4] and scores [B, N, C] of all places out."""

    names = RAW_OUTPUTS

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """All boxes, in pixels of the square, and their scores."""
        levels, distances = self.outputs(images)
        scores = torch.cat([level[:, 0].transpose(1, 2) for level in levels], dim=1)
        return self.boxes(distances, self.anchors), scores
