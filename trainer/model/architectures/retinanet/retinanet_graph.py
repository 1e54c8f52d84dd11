"""RetinaNet's deployment graphs: with suppression, and raw for runtimes that have their own."""

import torch
from torch import Tensor, nn

from trainer.model import boxes as box_ops
from trainer.model.architectures.retinanet.retinanet import RetinaNet
from trainer.model.architectures.retinanet.retinanet_options import RetinaNetOptions
from trainer.model.deployment import RAW_OUTPUTS, Graph, best_pairs, nms_keep, served


class _Levels(Graph):
    """The detector up to its outputs, with constant anchors.

    The class head's last convolution loses the channels of an unused class 0
    (model.background_class), which a graph would otherwise compute and then cut away.
    """

    anchors: Tensor
    """fp32 [N, 4] of all levels, x1 y1 x2 y2."""

    def __init__(self, detector: RetinaNet, image_size: int) -> None:
        super().__init__()
        self.detector = detector.eval()
        self.config: RetinaNetOptions = detector.config
        self.image_size = image_size
        self.classes = detector.num_classes
        self.cls_logits = _without_background(detector)
        # Outside of inference mode: no exporter can trace its tensors.
        with torch.no_grad():
            blank = detector.blank(image_size)
            features = detector.features(detector.normalize(blank))
        shapes = [(level.shape[-2], level.shape[-1]) for level in features]
        anchors = detector.anchors(shapes, (image_size, image_size))
        self.register_buffer("anchors", torch.cat(anchors))
        candidates = sum(min(self.config.topk_candidates, len(level) * self.classes) for level in anchors)
        self.rows = min(self.config.detections_per_image, candidates)
        """K, the rows of the padded outputs."""

    def outputs(self, images: Tensor) -> tuple[list[Tensor], Tensor]:
        """Logits [B, A, C, h * w] of each level, and the offsets [B, N, 4] of all levels' anchors."""
        head = self.detector.head
        features = self.detector.features(self.detector.normalize(images))
        logits_per_level = []
        for level in features:
            logits = self.cls_logits(head.classification_head.conv(level))
            count = logits.shape[1] // self.classes
            logits_per_level.append(
                logits.reshape(-1, count, self.classes, level.shape[-2] * level.shape[-1])
            )
        return logits_per_level, head.regression_head(features)


def _without_background(detector: RetinaNet) -> nn.Module:
    last = detector.head.classification_head.cls_logits
    if not detector.label_offset:
        return last
    outputs = detector.num_classes + detector.label_offset
    kept = nn.Conv2d(
        last.in_channels, last.out_channels // outputs * detector.num_classes, last.kernel_size,
        padding=last.padding,
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in kept.named_parameters():
            wide = last.get_parameter(name)
            parameter.copy_(wide.unflatten(0, (-1, outputs))[:, detector.label_offset :].flatten(0, 1))
    return kept.eval()


class DeploymentGraph(_Levels):
    """uint8 [B, 3, S, S] in, `Served` out; anchors and thresholds are constants of the graph."""

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Detections of a batch of uint8 squares; see `Served`."""
        levels, offsets = self.outputs(images)
        parts, start = [], 0
        for logits in levels:
            best, anchor, label = best_pairs(logits, self.config.topk_candidates)
            parts.append((best, anchor + start, label))
            start += logits.shape[1] * logits.shape[3]
        # Decoded for all levels at once: many small operators cost more than what they compute.
        best, anchor, labels = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        scores = torch.sigmoid(best)
        boxes = box_ops.decode(
            offsets.gather(1, anchor[:, :, None].expand(-1, -1, 4)), self.anchors[anchor]
        ).clamp(0, self.image_size)
        kept = nms_keep(
            boxes, scores, labels, self.classes, self.config.nms_threshold, self.config.score_threshold
        )
        return served(boxes, scores * kept, labels, self.rows)


class RawGraph(_Levels):
    """uint8 [B, 3, S, S] in; boxes [B, N, 4] and sigmoid scores [B, N, C] of all anchors out.

    What TensorRT's EfficientNMS_TRT takes (box_coding 0, score_activation 0, background_class -1).
    """

    names = RAW_OUTPUTS

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """All boxes, in pixels of the square, and their scores."""
        levels, offsets = self.outputs(images)
        # [B, A, C, h * w] -> [B, h * w * A, C], the order of the anchors.
        logits = torch.cat([level.permute(0, 3, 1, 2).flatten(1, 2) for level in levels], dim=1)
        return box_ops.decode(offsets, self.anchors).clamp(0, self.image_size), torch.sigmoid(logits)
