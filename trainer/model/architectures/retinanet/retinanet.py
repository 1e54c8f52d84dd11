"""RetinaNet (Lin et al. 2017, arXiv:1708.02002): network, matching and losses, equal to torchvision's.

Targets are padded to one length, so no shape depends on the data and no step waits for the device.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.retinanet import RetinaNetHead, _v1_to_v2_weights
from torchvision.ops.misc import Conv2dNormActivation, FrozenBatchNorm2d

from trainer.data.batch import PADDING
from trainer.model import boxes as box_ops
from trainer.model import upstream_fitting
from trainer.model.architecture import MEAN, STD, Architecture, UpstreamWeights, recolored
from trainer.model.architectures.retinanet.anchor_matching import match
from trainer.model.architectures.retinanet.backbone import build_backbone, group_norm
from trainer.model.architectures.retinanet.retinanet_options import RetinaNetOptions
from trainer.model.batchnorm_folding import TORCHVISION_PAIRS, fold
from trainer.model.deployment import RAW_OUTPUTS, Detections, Graph, best_pairs, nms_keep, postprocess, served
from trainer.model.focal import conv_focal_loss, focal_loss, supports
from trainer.model.fused_functions import compiled_for_steps, fused

LEVELS = 5
_EPS_FREE_WEIGHTS = "torchvision:RetinaNet_ResNet50_FPN_Weights.COCO_V1"


class RetinaNet(Architecture):
    """RetinaNet in torchvision's state-dict layout (backbone.*, head.*)."""

    config: RetinaNetOptions
    mean: Tensor
    std: Tensor
    loss_names = ("classification", "boxes")

    def __init__(self, config: RetinaNetOptions, num_classes: int) -> None:
        super().__init__(config, num_classes)
        self.register_buffer("mean", torch.tensor(MEAN).view(1, 3, 1, 1) * 255, persistent=False)
        self.register_buffer("std", torch.tensor(STD).view(1, 3, 1, 1) * 255, persistent=False)
        self._anchors: dict[tuple[int, torch.device], list[Tensor]] = {}
        self.label_offset = int(config.background_class)
        self.backbone = build_backbone(config)
        width, norm_layer = config.fpn_channels, group_norm if config.version == "v2" else None
        outputs = num_classes + self.label_offset
        self.head = RetinaNetHead(width, self.anchors_at_a_place, outputs, norm_layer=norm_layer)
        for branch in (self.head.classification_head, self.head.regression_head):
            branch.conv = nn.Sequential()
            for _ in range(config.head_depth):
                layer = Conv2dNormActivation(width, width, norm_layer=norm_layer)
                nn.init.normal_(layer[0].weight, std=0.01)
                if layer[0].bias is not None:
                    nn.init.zeros_(layer[0].bias)
                branch.conv.append(layer)
        default = "giou" if config.version == "v2" else "l1"
        self.box_loss = default if config.box_loss == "default" else config.box_loss
        sizes = tuple(
            tuple(int(size * scale) for scale in config.anchor_scales) for size in config.anchor_sizes
        )
        self.anchor_generator = AnchorGenerator(sizes, (tuple(config.aspect_ratios),) * LEVELS)
        self._compiled_trunk: Callable[[Tensor], tuple[list[Tensor], Tensor]] | None = None
        if config.weights == _EPS_FREE_WEIGHTS:
            # These weights were trained with an epsilon of 0; torchvision resets it as well.
            for module in self.modules():
                if isinstance(module, FrozenBatchNorm2d):
                    module.eps = 0.0

    def forward(
        self,
        images: Tensor,
        boxes: Tensor,
        labels: Tensor,
        color: Tensor | None = None,
        verified: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Losses of a batch: focal loss of the classes, regression loss of the boxes."""
        features, offsets = (self._compiled_trunk or self.trunk)(self.normalize(images, color))
        anchors = self.anchors([_shape_of(level) for level in features], images.shape[-1])
        labels = torch.where(labels == PADDING, PADDING, labels + self.label_offset)
        if verified is not None:
            # The background output, if there is one, is never an object.
            verified = F.pad(verified, (self.label_offset, 0), value=True)
        last = self.head.classification_head.cls_logits
        return retinanet_loss(self.box_loss, features, last, offsets, anchors, boxes, labels, verified)

    def trunk(self, images: Tensor) -> tuple[list[Tensor], Tensor]:
        """The network up to the last classification convolution, for the loss.

        Returns the class head's features [B, fpn_channels, h, w] of each level, and the offsets [B, N, 4].
        """
        features = self.features(images)
        class_head = self.head.classification_head
        return [class_head.conv(level) for level in features], self.head.regression_head(features)

    def compile_network(self, mode: str) -> bool:
        """Compile `trunk`; one shape, one graph. The loss is compiled by itself."""
        self._compiled_trunk = compiled_for_steps(self.trunk, mode, fullgraph=True)
        return True

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
            anchors = torch.cat(self.anchors([_shape_of(level) for level in features], images.shape[-1]))
        return features, anchors

    def outputs(self, features: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Logits [B, A, C, h * w] of each level without the background, and offsets [B, N, 4]."""
        head = self.head.classification_head
        logits = [
            head.cls_logits(head.conv(level)).reshape(
                -1, self.anchors_at_a_place, head.num_classes, level.shape[-2] * level.shape[-1]
            )[:, :, self.label_offset :]
            for level in features
        ]
        return logits, self.head.regression_head(features)

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
        return box_ops.decode(chosen, anchors[anchor]).clamp(0, image_size), best.float().sigmoid(), labels

    def found(self, images: Tensor, anchors: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Boxes [B, T, 4], scores and labels [B, T] that go into the suppression; see `located`."""
        features, anchors = self.located(images, anchors)
        return self.candidates(*self.outputs(features), anchors, images.shape[-1])

    def raw(self, images: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """All boxes [B, N, 4] in pixels, and scores [B, N, C]."""
        outputs, offsets = self.outputs(self.features(self.normalize(images)))
        # [B, A, C, h * w] -> [B, h * w * A, C], the order of the anchors.
        levels = [level.permute(0, 3, 1, 2).flatten(1, 2) for level in outputs]
        boxes = box_ops.decode(offsets, anchors).clamp(0, images.shape[-1])
        return boxes, torch.cat(levels, dim=1).float().sigmoid()

    @torch.inference_mode()
    def predict(self, images: Tensor) -> Detections:
        return postprocess(*self.found(images), self.num_classes, images.shape[-1], self.config)

    def deployment_graph(self, image_size: int) -> Graph:
        return RetinaNetGraph(self, image_size)

    def raw_graph(self, image_size: int) -> Graph:
        return RawGraph(self, image_size)

    @property
    def thresholds(self) -> dict[str, float]:
        return {**super().thresholds, "nms": self.config.nms_threshold}

    def folded(self) -> Self:
        fold(self.backbone.body, TORCHVISION_PAIRS)
        return self

    def load_upstream(self, state: dict[str, Tensor], source: str) -> str:
        """Load weights of torchvision's RetinaNet or of a ResNet; see `upstream_fitting`."""
        named = upstream_fitting.as_retinanet(state, source)
        for branch in ("classification", "regression"):
            # Names of torchvision before 0.14.
            _v1_to_v2_weights(named, f"head.{branch}_head.")
        if not self.label_offset:
            named = upstream_fitting.from_torchvision(named, self.num_classes, self.anchors_at_a_place)
        return upstream_fitting.load(self, named, source, (upstream_fitting.LAYER,))

    def upstream_weights(self, names: Sequence[str]) -> UpstreamWeights:
        """Weights for torchvision's RetinaNet, whose label 0 is the background."""
        if self.label_offset:
            return UpstreamWeights(self.state_dict(), self.num_classes + 1)
        return UpstreamWeights(
            *upstream_fitting.to_torchvision(self.state_dict(), names, self.anchors_at_a_place)
        )

    @property
    def title(self) -> str:
        return f"RetinaNet {self.config.version} on {self.config.backbone}"

    @property
    def anchors_at_a_place(self) -> int:
        """Anchors at each location of each level."""
        return len(self.config.anchor_scales) * len(self.config.aspect_ratios)


class RetinaNetGraph(Graph):
    """uint8 [B, 3, S, S] in, detections out; anchors and thresholds are constants of the graph."""

    anchors: Tensor  # fp32 [N, 4] of all levels, x1 y1 x2 y2

    def __init__(self, detector: RetinaNet, image_size: int) -> None:
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
            boxes,
            scores,
            labels,
            self.detector.num_classes,
            self.config.nms_threshold,
            self.config.score_threshold,
        )
        return served(boxes, scores * kept, labels, self.rows)


class RawGraph(RetinaNetGraph):
    """uint8 [B, 3, S, S] in; boxes and scores before the suppression out.

    The inputs of TensorRT's EfficientNMS_TRT (box_coding 0, score_activation 0, background_class -1).
    """

    names = RAW_OUTPUTS

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self.detector.raw(images, self.anchors)


def _shape_of(level: Tensor) -> tuple[int, int]:
    """Height and width of a feature map [B, C, h, w]."""
    return level.shape[-2], level.shape[-1]


class Matches(NamedTuple):
    """The targets of every anchor of every image."""

    labels: Tensor  # [B, N] int32: class of the matched target, BACKGROUND or IGNORED
    boxes: Tensor  # [B, N, 4] fp32: the matched target, or the anchor itself without one
    positive: Tensor  # [B, N] bool: whether a target is matched
    weights: Tensor
    """[B, N] fp32: factor that turns a sum over anchors into the mean over images of the sum per
    matched anchor."""


def assign(boxes: Tensor, labels: Tensor, anchors: Tensor) -> Matches:
    """Match the anchors and look up their targets; arguments as for `match`."""
    matched = match(boxes, labels, anchors)
    positive = matched >= 0
    index = matched.clamp(min=0)
    matched_boxes = boxes.gather(1, index[:, :, None].expand(-1, -1, 4))
    count = positive.sum(dim=1, keepdim=True).clamp(min=1)
    return Matches(
        labels=torch.where(positive, labels.gather(1, index), matched).int(),
        boxes=torch.where(positive[:, :, None], matched_boxes, anchors),
        positive=positive,
        weights=(1 / (count * boxes.shape[0])).expand_as(positive),
    )


def pad_targets(boxes: Tensor, labels: Tensor, *, least: int = 8) -> tuple[Tensor, Tensor]:
    """Pad boxes [B, M, 4] and labels [B, M] to the next power of two, so that graphs are reused."""
    rows = boxes.shape[1]
    missing = max(least, 1 << (rows - 1).bit_length()) - rows
    if not missing:
        return boxes, labels
    return F.pad(boxes, (0, 0, 0, missing)), F.pad(labels, (0, missing), value=PADDING)


def retinanet_loss(
    kind: str,
    features: list[Tensor],
    last: nn.Conv2d,
    offsets: Tensor,
    anchors: list[Tensor],
    boxes: Tensor,
    labels: Tensor,
    verified: Tensor | None = None,
) -> dict[str, Tensor]:
    """`classification` and `boxes`: means over the images of the sum over anchors per matched anchor.

    Call it under the autocast of the network. `features` [B, F, h, w] of each level are the input of the
    class head's `last` convolution, to A * C channels; `offsets` [B, N, 4] are of all levels; `anchors`
    [n, 4] of each level add up to N. The targets are as for `Architecture.forward`.
    """
    sizes = [len(level) for level in anchors]
    together = torch.cat(anchors)
    with torch.autocast(offsets.device.type, enabled=False):
        matches = assign(*pad_targets(boxes, labels), together)
        box = box_loss(offsets, kind, together, matches)
    classes = classification_loss(features, last, matches, sizes, verified)
    return {"classification": classes, "boxes": box}


def classification_loss(
    features: list[Tensor],
    last: nn.Conv2d,
    matches: Matches,
    sizes: list[int],
    verified: Tensor | None = None,
) -> Tensor:
    """Focal loss of the class head; a scalar. `sizes` are the anchors of each level; see `retinanet_loss`."""
    labels = [part.contiguous() for part in matches.labels.split(sizes, dim=1)]
    weights = [part.contiguous() for part in matches.weights.split(sizes, dim=1)]
    assert last.bias is not None
    device = matches.labels.device
    if supports(device):
        return conv_focal_loss(features, last.weight, last.bias, labels, weights, verified)
    total = torch.zeros((), device=device)
    for level, names, factors in zip(features, labels, weights, strict=True):
        logits = last(level).permute(0, 2, 3, 1).reshape(names.numel(), -1)
        total = total + focal_loss(logits, names.flatten(), factors.flatten(), verified)
    return total


@fused
def box_loss(offsets: Tensor, kind: str, anchors: Tensor, matches: Matches) -> Tensor:
    """Box regression loss of the matched anchors, of predicted offsets [B, N, 4]; a scalar.

    `kind` is "l1" or "smooth_l1" (on offsets, beta 1), or "giou" (on decoded boxes).
    """
    # Anchors without a target have themselves as target: with zero offsets loss and gradient are
    # finite, and the mask below cannot turn into 0 * inf.
    offsets = torch.where(matches.positive[:, :, None], offsets.float(), 0.0)
    if kind == "giou":
        each = box_ops.giou_loss(box_ops.decode(offsets, anchors), matches.boxes)
    else:
        measure = F.l1_loss if kind == "l1" else F.smooth_l1_loss
        each = measure(offsets, box_ops.encode(matches.boxes, anchors), reduction="none").sum(dim=2)
    return (torch.where(matches.positive, each, 0.0) * matches.weights).sum()
