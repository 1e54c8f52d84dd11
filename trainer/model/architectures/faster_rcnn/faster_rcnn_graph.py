"""Faster R-CNN's deployment graph: both stages for a fixed number of proposals."""

import torch
from torch import Tensor
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import roi_align

from trainer.model.architectures.faster_rcnn.faster_rcnn import FasterRcnn
from trainer.model.deployment import Graph, nms_keep, served

_CANONICAL = 224.0
"""Side of a box whose features are taken from P4 (Lin et al. 2017, arXiv:1612.03144)."""
_EPSILON = 1e-6
_SMALLEST_PROPOSAL = 1e-3
_SMALLEST_DETECTION = 1e-2
"""Sides below which torchvision drops a box of either stage, in pixels."""
_EMPTY = 0.0
"""Score of what takes a place and is nothing; no other has it."""


class FasterRcnnGraph(Graph):
    """uint8 [B, 3, S, S] in, `Served` out; anchors and thresholds are constants of the graph.

    Where an image has fewer proposals than places for them, empty boxes without a score take the rest.
    """

    anchors: Tensor
    """fp32 [N, 4] of all levels, x1 y1 x2 y2."""
    levels: Tensor
    """int64 [N], the level of each anchor."""

    def __init__(self, detector: FasterRcnn, image_size: int) -> None:
        super().__init__()
        self.detector = detector.eval()
        self.config, self.image_size = detector.config, image_size
        with torch.no_grad():
            blank = detector.blank(image_size)
            features = list(detector.backbone(detector.normalize(blank)).values())
            listed = ImageList(blank.float(), [(image_size, image_size)])
            (anchors,) = detector.rpn.anchor_generator(listed, features)
        each = len(self.config.aspect_ratios)
        self.counts = [level.shape[-2] * level.shape[-1] * each for level in features]
        self.register_buffer("anchors", anchors)
        numbers = torch.arange(len(self.counts), device=anchors.device)
        self.register_buffer("levels", numbers.repeat_interleave(torch.tensor(self.counts).to(numbers)))
        limit = self.config.proposals
        self.places = min(limit, sum(min(limit, count) for count in self.counts))
        self.candidates = min(self.config.topk_candidates, self.places * detector.num_classes)
        self.rows = min(self.config.detections_per_image, self.candidates)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Detections of a batch of uint8 squares; see `Served`."""
        features = list(self.detector.backbone(self.detector.normalize(images)).values())
        proposals, real = self.proposals(features)
        boxes, scores = self.classified(features, proposals)
        best, pair = torch.topk((scores * real[:, :, None]).flatten(1), self.candidates, dim=1)
        classes = self.detector.num_classes
        chosen = boxes.flatten(1, 2).gather(1, pair[:, :, None].expand(-1, -1, 4))
        config = self.config
        kept = nms_keep(chosen, best, pair % classes, classes, config.nms_threshold, config.score_threshold)
        return served(chosen, best * kept, pair % classes, self.rows)

    def proposals(self, features: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Boxes [B, P, 4] of the first stage in fp32, and which of them are any: [B, P], 1 or 0."""
        rpn = self.detector.rpn
        logits, offsets = rpn.head(features)
        # [B, A, h, w] -> [B, h * w * A] and [B, A * 4, h, w] -> [B, h * w * A, 4], the anchors' order.
        scores = [level.permute(0, 2, 3, 1).flatten(1) for level in logits]
        moves = torch.cat(
            [level.permute(0, 2, 3, 1).flatten(1).unflatten(1, (-1, 4)) for level in offsets], 1
        )
        parts, start = [], 0
        for level, count in zip(scores, self.counts, strict=True):
            best, index = torch.topk(level, min(self.config.proposals, count), dim=1)
            parts.append((best, index + start))
            start += count
        best, index = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        moves = moves.gather(1, index[:, :, None].expand(-1, -1, 4))
        boxes = rpn.box_coder.decode_single(moves.flatten(0, 1), self.anchors[index].flatten(0, 1))
        boxes = boxes.unflatten(0, index.shape).clamp(0, self.image_size)
        score = torch.sigmoid(best) * _large(boxes, _SMALLEST_PROPOSAL)
        kept = nms_keep(boxes, score, self.levels[index], len(self.counts), rpn.nms_thresh, _EMPTY)
        score, order = torch.topk(score * kept, self.places, dim=1)
        real = (score > _EMPTY).to(boxes.dtype)
        return boxes.gather(1, order[:, :, None].expand(-1, -1, 4)) * real[:, :, None], real

    def classified(self, features: list[Tensor], proposals: Tensor) -> tuple[Tensor, Tensor]:
        """Boxes [B, P, C, 4] and scores [B, P, C] of every class in every proposal."""
        heads, batch = self.detector.roi_heads, proposals.shape[0]
        flat = proposals.flatten(0, 1)
        logits, moves = heads.box_predictor(heads.box_head(self.pooled(features, proposals)))
        boxes = heads.box_coder.decode_single(moves, flat).unflatten(1, (-1, 4))[:, 1:]
        boxes = boxes.clamp(0, self.image_size)
        scores = torch.softmax(logits, dim=1)[:, 1:] * _large(boxes, _SMALLEST_DETECTION)
        return boxes.unflatten(0, (batch, self.places)), scores.unflatten(0, (batch, self.places))

    def pooled(self, features: list[Tensor], proposals: Tensor) -> Tensor:
        """Features [B * P, channels, 7, 7] of proposals, of the level that their size asks for.

        Each level is pooled for all of them, which keeps the shapes fixed: next to the second stage's
        convolutions that costs little.
        """
        pool, batch = self.detector.roi_heads.box_roi_pool, proposals.shape[0]
        image = torch.arange(batch, device=proposals.device, dtype=proposals.dtype)
        rows = torch.cat([image[:, None, None].expand(-1, self.places, 1), proposals], dim=2).flatten(0, 1)
        side = torch.sqrt((rows[:, 3] - rows[:, 1]) * (rows[:, 4] - rows[:, 2]))
        bounds = [_CANONICAL * 2 ** (number - _EPSILON) for number in (-1, 0, 1)]
        level = sum((side >= bound).to(torch.int64) for bound in bounds)
        assert isinstance(level, Tensor)
        total: Tensor | None = None
        for number, feature in enumerate(features[: len(pool.featmap_names)]):
            scale = feature.shape[-1] / self.image_size
            part = roi_align(feature.float(), rows, pool.output_size, scale, pool.sampling_ratio)
            chosen = part * (level == number).to(part.dtype)[:, None, None, None]
            total = chosen if total is None else total + chosen
        assert total is not None
        return total


def _large(boxes: Tensor, smallest: float) -> Tensor:
    """1 where both sides of boxes [..., 4] are that long, in pixels, else 0."""
    sides = boxes[..., 2:] - boxes[..., :2]
    return (sides.amin(dim=-1) >= smallest).to(boxes.dtype)
