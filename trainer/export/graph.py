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


class DeploymentGraph(nn.Module):
    """uint8 [B, 3, S, S] in, `Served` out; anchors and thresholds are constants of the graph."""

    def __init__(self, detector: Detector, image_size: int) -> None:
        super().__init__()
        self.detector = detector.eval()
        self.config: ModelConfig = detector.config
        self.image_size = image_size
        with torch.no_grad():
            blank = torch.zeros(1, 3, image_size, image_size, dtype=torch.uint8)
            _, _, shapes = detector.outputs(detector.normalize(blank))
        levels = detector.anchors(shapes, (image_size, image_size))
        self.sizes = [len(level) for level in levels]
        for index, level in enumerate(levels):
            self.register_buffer(f"anchors_{index}", level.clone())

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Detections of a batch of uint8 squares; see `Served`."""
        logits, offsets, _ = self.detector.outputs(self.detector.normalize(images))
        logits = logits[:, :, self.detector.label_offset :]
        parts = [
            self._candidates(level_logits, level_offsets, getattr(self, f"anchors_{index}"))
            for index, (level_logits, level_offsets) in enumerate(
                zip(logits.split(self.sizes, dim=1), offsets.split(self.sizes, dim=1), strict=True)
            )
        ]
        boxes, scores, labels = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        kept = nms_keep(
            boxes, scores, labels, self.detector.num_classes, self.config.nms_threshold,
            self.config.score_threshold,
        )  # fmt: skip
        rows = min(self.config.detections_per_image, scores.shape[1])
        best, index = torch.topk(scores * kept, rows, dim=1)
        real = best > 0
        chosen = boxes.gather(1, index[:, :, None].expand(-1, -1, 4)) * real[:, :, None]
        names = torch.where(real, labels.gather(1, index), -1)
        return chosen, best, names, real.sum(dim=1)

    def _candidates(self, logits: Tensor, offsets: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Best pairs of anchor and class of one level: boxes, scores, labels.

        In two stages, first anchors by their best class: a pair among the best k has an anchor
        among the best k, so it is exact, and sorting anchors x classes is avoided.
        """
        limit = self.config.topk_candidates
        classes = logits.shape[2]
        if logits.shape[1] > limit:
            anchor_index = torch.topk(logits.amax(dim=2), limit, dim=1).indices
            logits = logits.gather(1, anchor_index[:, :, None].expand(-1, -1, classes))
            offsets = offsets.gather(1, anchor_index[:, :, None].expand(-1, -1, 4))
            own_anchors = anchors[anchor_index]
        else:
            own_anchors = anchors.expand(logits.shape[0], -1, -1)
        best, pair = torch.topk(logits.flatten(1), min(limit, logits.shape[1] * classes), dim=1)
        place = torch.div(pair, classes, rounding_mode="floor")[:, :, None].expand(-1, -1, 4)
        decoded = box_ops.decode(offsets.gather(1, place), own_anchors.gather(1, place))
        return decoded.clamp(0, self.image_size), torch.sigmoid(best), pair % classes
