"""FCOS' deployment graphs: with suppression, and raw for runtimes that have their own."""

import torch
from torch import Tensor

from trainer.model.architectures.fcos.fcos import Fcos
from trainer.model.deployment import RAW_OUTPUTS, Graph, best_pairs, nms_keep, served


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
