"""The deployment graph: the detector with pre- and postprocessing, no shape of which depends on data.

Suppression is one operator of our own: in PyTorch it runs torchvision's, in ONNX it becomes
NonMaxSuppression over per-class scores (exact; class offsets in fp32 are not).
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchvision.ops import batched_nms

from trainer.config import ModelConfig
from trainer.model import boxes as box_ops
from trainer.model.detector import Detector

INPUT = "images"
OUTPUTS = ("boxes", "scores", "labels", "num")
RAW_OUTPUTS = ("boxes", "scores")


class Served(NamedTuple):
    """Outputs of the graph, best first, padded to K rows."""

    boxes: Tensor
    """fp32 [B, K, 4], x1 y1 x2 y2 in pixels of the input square; zeros where padded."""
    scores: Tensor
    """fp32 [B, K]; zero where padded."""
    labels: Tensor
    """int64 [B, K], contiguous from 0; -1 where padded."""
    num: Tensor
    """int64 [B], rows that are not padding."""


@torch.library.custom_op("kubedet::nms_keep", mutates_args=())
def nms_keep(
    boxes: Tensor, scores: Tensor, labels: Tensor, classes: int, overlap: float, threshold: float
) -> Tensor:
    """Which candidates survive the suppression within their class.

    Args:
        boxes: fp32 [B, T, 4].
        scores: fp32 [B, T].
        labels: int64 [B, T].
        classes: number of classes.
        overlap: IoU above which the weaker box is dropped.
        threshold: scores not above it are dropped.

    Returns:
        fp32 [B, T], 1 where a candidate is kept, else 0.
    """
    kept = torch.zeros_like(scores)
    for row in range(boxes.shape[0]):
        candidates = torch.nonzero(scores[row] > threshold).flatten()
        survivors = batched_nms(
            boxes[row, candidates], scores[row, candidates], labels[row, candidates], overlap
        )
        kept[row, candidates[survivors]] = 1.0
    return kept


@nms_keep.register_fake
def _(
    boxes: Tensor, scores: Tensor, labels: Tensor, classes: int, overlap: float, threshold: float
) -> Tensor:
    return torch.empty_like(scores)


class _Levels(nn.Module):
    """The detector up to the outputs of each pyramid level, with constant anchors.

    The class head's last convolution loses the channels of an unused class 0
    (model.background_class), which a graph would otherwise compute and then cut away.
    """

    def __init__(self, detector: Detector, image_size: int) -> None:
        super().__init__()
        self.detector = detector.eval()
        self.config: ModelConfig = detector.config
        self.image_size = image_size
        self.classes = detector.num_classes
        self.cls_logits = _without_background(detector)
        # Clones made outside of inference mode, whose tensors no exporter can trace.
        with torch.no_grad():
            blank = torch.zeros(1, 3, image_size, image_size, dtype=torch.uint8)
            features = detector.features(detector.normalize(blank))
        shapes = [(level.shape[-2], level.shape[-1]) for level in features]
        self.levels = len(shapes)
        candidates = 0
        for index, level in enumerate(detector.anchors(shapes, (image_size, image_size))):
            self.register_buffer(f"anchors_{index}", level.clone())
            candidates += min(self.config.topk_candidates, len(level) * self.classes)
        self.rows = min(self.config.detections_per_image, candidates)
        """K, the rows of the padded outputs."""

    def outputs(self, images: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each level: logits [B, A, C, h * w], offsets [B, n, 4], anchors [n, 4]; n = h * w * A."""
        head = self.detector.head
        found = []
        for index, level in enumerate(self.detector.features(self.detector.normalize(images))):
            logits = self.cls_logits(head.classification_head.conv(level))
            count = logits.shape[1] // self.classes
            logits = logits.reshape(-1, count, self.classes, level.shape[-2] * level.shape[-1])
            offsets = head.regression_head([level])
            found.append((logits, offsets, getattr(self, f"anchors_{index}")))
        return found


def _without_background(detector: Detector) -> nn.Module:
    last = detector.head.classification_head.cls_logits
    if not detector.label_offset:
        return last
    outputs = detector.num_classes + detector.label_offset
    kept = nn.Conv2d(
        last.in_channels, last.out_channels // outputs * detector.num_classes, last.kernel_size,
        padding=last.padding,
    )  # fmt: skip
    with torch.no_grad():
        for name, own in kept.named_parameters():
            wide = last.get_parameter(name)
            own.copy_(wide.unflatten(0, (-1, outputs))[:, detector.label_offset :].flatten(0, 1))
    return kept.eval()


class DeploymentGraph(_Levels):
    """uint8 [B, 3, S, S] in, `Served` out; anchors and thresholds are constants of the graph."""

    names = OUTPUTS

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Detections of a batch of uint8 squares; see `Served`."""
        parts = [
            best_pairs(*level, self.config.topk_candidates, self.image_size) for level in self.outputs(images)
        ]
        boxes, scores, labels = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        kept = nms_keep(
            boxes, scores, labels, self.classes, self.config.nms_threshold, self.config.score_threshold
        )
        best, index = torch.topk(scores * kept, self.rows, dim=1)
        real = best > 0
        chosen = boxes.gather(1, index[:, :, None].expand(-1, -1, 4)) * real[:, :, None]
        names = torch.where(real, labels.gather(1, index), -1)
        return chosen, best, names, real.sum(dim=1)


class RawGraph(_Levels):
    """uint8 [B, 3, S, S] in; boxes [B, N, 4] and sigmoid scores [B, N, C] of all anchors out.

    What TensorRT's EfficientNMS_TRT takes (box_coding 0, score_activation 0, background_class -1).
    """

    names = RAW_OUTPUTS

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """All boxes, in pixels of the square, and their scores."""
        boxes, scores = [], []
        for logits, offsets, anchors in self.outputs(images):
            boxes.append(box_ops.decode(offsets, anchors).clamp(0, self.image_size))
            # [B, A, C, h * w] -> [B, h * w * A, C], the order of the anchors.
            scores.append(torch.sigmoid(logits).permute(0, 3, 1, 2).flatten(1, 2))
        return torch.cat(boxes, dim=1), torch.cat(scores, dim=1)


def best_pairs(
    logits: Tensor, offsets: Tensor, anchors: Tensor, limit: int, image_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Best pairs of anchor and class of one level: boxes [B, k, 4], scores [B, k], labels [B, k].

    In two stages, first anchors by their best class: a pair among the best k has an anchor
    among the best k, so it is exact, and sorting anchors x classes is avoided. The logits stay
    in the convolution's order: at hundreds of classes a transposition costs more than the rest.

    Args:
        logits: [B, A, C, P], A anchors at each of P places.
        offsets: [B, P * A, 4].
        anchors: [P * A, 4].
        limit: k at most.
        image_size: side of the square, to which boxes are cut.
    """
    _, each, classes, places = logits.shape
    total = each * places
    if total > limit:
        # In the order of the memory: what is fetched for a class lies side by side.
        column = torch.topk(logits.amax(dim=2).flatten(1), limit, dim=1).indices.sort(dim=1).values
    else:
        column = torch.arange(total, device=logits.device).expand(logits.shape[0], -1)
    scale, place = torch.div(column, places, rounding_mode="floor"), column % places
    rows = torch.arange(classes, device=logits.device)[:, None] * places
    own = logits.flatten(1).gather(1, ((scale * (classes * places) + place)[:, None, :] + rows).flatten(1))
    best, pair = torch.topk(own, min(limit, own.shape[1]), dim=1)
    candidates = column.shape[1]
    # Anchors are numbered by place and then by scale.
    anchor = (place * each + scale).gather(1, pair % candidates)
    decoded = box_ops.decode(offsets.gather(1, anchor[:, :, None].expand(-1, -1, 4)), anchors[anchor])
    labels = torch.div(pair, candidates, rounding_mode="floor")
    return decoded.clamp(0, image_size), torch.sigmoid(best), labels
