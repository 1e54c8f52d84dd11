"""RetinaNet (Lin et al. 2017, arXiv:1708.02002): the same network as in torchvision."""

from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.retinanet import RetinaNetHead, _v1_to_v2_weights
from torchvision.ops.misc import Conv2dNormActivation, FrozenBatchNorm2d

from trainer.model import boxes as box_ops
from trainer.model.architecture import (
    MEAN,
    RAW_OUTPUTS,
    STD,
    Architecture,
    Detections,
    Graph,
    UpstreamWeights,
    apply_color,
)
from trainer.model.batchnorm_folding import TORCHVISION_PAIRS, fold
from trainer.model.fused_functions import compile_for_steps
from trainer.model.retinanet import weights
from trainer.model.retinanet.backbone import build_backbone, group_norm
from trainer.model.retinanet.loss import retinanet_loss
from trainer.model.retinanet.options import RetinaNetOptions
from trainer.model.retinanet.postprocess import best_anchor_class_pairs, nms_keep, postprocess, top_detections
from trainer.model.weights import load_tensors

LEVELS = 5
ANCHOR_SCALES = (1.0, 2 ** (1 / 3), 2 ** (2 / 3))
"""Sizes of the anchors at each location, relative to the level's smallest one."""
_MAX_CANDIDATES = 1000  # number of best pairs of anchor and class per level that NMS considers
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
        self.backbone = build_backbone(config)
        width, norm_layer = config.fpn_channels, group_norm if config.version == "v2" else None
        self.head = RetinaNetHead(width, self.anchors_per_location, num_classes, norm_layer=norm_layer)
        for branch in (self.head.classification_head, self.head.regression_head):
            branch.conv = nn.Sequential()
            for _ in range(config.head_depth):
                layer = Conv2dNormActivation(width, width, norm_layer=norm_layer)
                nn.init.normal_(layer[0].weight, std=0.01)
                if layer[0].bias is not None:
                    nn.init.zeros_(layer[0].bias)
                branch.conv.append(layer)
        self.box_loss = "giou" if config.version == "v2" else "l1"
        sizes = tuple(tuple(int(size * scale) for scale in ANCHOR_SCALES) for size in config.anchor_sizes)
        self.anchor_generator = AnchorGenerator(sizes, (tuple(config.aspect_ratios),) * LEVELS)
        self._compiled_trunk: Callable[[Tensor], tuple[list[Tensor], Tensor]] | None = None
        if config.weights == _EPS_FREE_WEIGHTS:
            # These weights were trained with an epsilon of 0; torchvision resets it as well.
            for module in self.modules():
                if isinstance(module, FrozenBatchNorm2d):
                    module.eps = 0.0

    def forward(
        self, images: Tensor, boxes: Tensor, labels: Tensor, color: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the focal loss of the classes and the regression loss of the boxes."""
        features, offsets = (self._compiled_trunk or self.run_trunk)(self.normalize(images, color))
        anchors = self.anchors([_shape_of(level) for level in features], images.shape[-1])
        last = self.head.classification_head.cls_logits
        return retinanet_loss(self.box_loss, features, last, offsets, anchors, boxes, labels)

    def run_trunk(self, images: Tensor) -> tuple[list[Tensor], Tensor]:
        """Run the network up to the last classification convolution, for the loss.

        Return the class head's features [B, fpn_channels, h, w] of each level, and the offsets [B, N, 4].
        """
        features = self.features(images)
        class_head = self.head.classification_head
        return [class_head.conv(level) for level in features], self.head.regression_head(features)

    def compile_network(self, mode: str) -> bool:
        """Compile `run_trunk`, with a graph for each shape. The loss is compiled separately."""
        self._compiled_trunk = compile_for_steps(self.run_trunk, mode, fullgraph=True)
        return True

    def normalize(self, images: Tensor, color: Tensor | None = None) -> Tensor:
        """Convert uint8 images to fp32 network input, in the memory format of the weights."""
        values = (apply_color(images.float(), color, 255) - self.mean) / self.std
        if self.backbone.body.conv1.weight.is_contiguous(memory_format=torch.channels_last):
            values = values.contiguous(memory_format=torch.channels_last)
        return values

    def features(self, images: Tensor) -> list[Tensor]:
        """Return levels [B, fpn_channels, h, w] for normalized images [B, 3, S, S], the finest first."""
        return list(self.backbone(images).values())

    def anchors(self, shapes: list[tuple[int, int]], image_size: int) -> list[Tensor]:
        """Return anchors [n, 4] of each level in fp32; bf16 would shift them by up to 6 pixels at 800 px."""
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

    def features_and_anchors(
        self, images: Tensor, anchors: Tensor | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """Return features of uint8 images, and the anchors [N, 4] of all levels, created unless given."""
        features = self.features(self.normalize(images))
        if anchors is None:
            anchors = torch.cat(self.anchors([_shape_of(level) for level in features], images.shape[-1]))
        return features, anchors

    def outputs(self, features: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Return logits [B, A, C, h * w] of each level, and offsets [B, N, 4]."""
        head = self.head.classification_head
        logits = [
            head.cls_logits(head.conv(level)).reshape(
                -1, self.anchors_per_location, self.num_classes, level.shape[-2] * level.shape[-1]
            )
            for level in features
        ]
        return logits, self.head.regression_head(features)

    def select_candidates(
        self, outputs: list[Tensor], offsets: Tensor, anchors: Tensor, image_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return boxes [B, T, 4], scores and labels [B, T] of each level's best pairs, finest level first.

        `outputs` and `offsets` are the result of `outputs()`; `anchors` [N, 4] cover all levels.
        """
        parts, start = [], 0
        for level in outputs:
            best, anchor, label = best_anchor_class_pairs(level, _MAX_CANDIDATES)
            parts.append((best, anchor + start, label))
            start += level.shape[1] * level.shape[3]
        # Decode all levels at once: many small operators cost more than the arithmetic.
        best, anchor, labels = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        chosen = offsets.gather(1, anchor[:, :, None].expand(-1, -1, 4)).float()
        return box_ops.decode(chosen, anchors[anchor]).clamp(0, image_size), best.float().sigmoid(), labels

    def candidates(self, images: Tensor, anchors: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return boxes [B, T, 4], scores and labels [B, T] before NMS; see `features_and_anchors`."""
        features, anchors = self.features_and_anchors(images, anchors)
        return self.select_candidates(*self.outputs(features), anchors, images.shape[-1])

    def raw_outputs(self, images: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Return all boxes [B, N, 4] in pixels, and scores [B, N, C]."""
        outputs, offsets = self.outputs(self.features(self.normalize(images)))
        # [B, A, C, h * w] -> [B, h * w * A, C], the order of the anchors.
        levels = [level.permute(0, 3, 1, 2).flatten(1, 2) for level in outputs]
        boxes = box_ops.decode(offsets, anchors).clamp(0, images.shape[-1])
        return boxes, torch.cat(levels, dim=1).float().sigmoid()

    @torch.inference_mode()
    def predict(self, images: Tensor) -> Detections:
        return postprocess(*self.candidates(images), self.num_classes, images.shape[-1], self.config)

    def deployment_graph(self, image_size: int) -> Graph:
        return RetinaNetGraph(self, image_size)

    def raw_graph(self, image_size: int) -> Graph:
        return RawGraph(self, image_size)

    @property
    def thresholds(self) -> dict[str, float]:
        return {**super().thresholds, "nms": self.config.nms_threshold}

    def fold_batchnorm(self) -> Self:
        fold(self.backbone.body, TORCHVISION_PAIRS)
        return self

    def load_upstream(self, state: dict[str, Tensor], source: str) -> str:
        """Load weights of torchvision's RetinaNet or of a ResNet."""
        named = weights.rename_as_retinanet(state, source)
        for branch in ("classification", "regression"):
            # Rename tensors of torchvision before 0.14.
            _v1_to_v2_weights(named, f"head.{branch}_head.")
        named = weights.remove_unused_outputs(named, self.num_classes, self.anchors_per_location)
        return load_tensors(self, named, source, (weights.CLASS_LAYER,), body=weights.BACKBONE)

    def upstream_weights(self, class_names: Sequence[str]) -> UpstreamWeights:
        """Return the weights for torchvision's RetinaNet, whose label 0 is the background."""
        return UpstreamWeights(
            *weights.add_unused_outputs(self.state_dict(), class_names, self.anchors_per_location)
        )

    @property
    def title(self) -> str:
        return f"RetinaNet {self.config.version} on {self.config.backbone}"

    @property
    def anchors_per_location(self) -> int:
        """Number of anchors at each location of each level."""
        return len(ANCHOR_SCALES) * len(self.config.aspect_ratios)


class RetinaNetGraph(Graph):
    """Returns detections for uint8 [B, 3, S, S]; anchors and thresholds are constants of the graph."""

    anchors: Tensor  # fp32 [N, 4] of all levels, x1 y1 x2 y2

    def __init__(self, detector: RetinaNet, image_size: int) -> None:
        super().__init__()
        self.detector, self.config, self.image_size = detector.eval(), detector.config, image_size
        blank = torch.zeros(1, 3, image_size, image_size, dtype=torch.uint8, device=detector.mean.device)
        # Exporters cannot trace tensors of inference mode.
        with torch.no_grad():
            self.register_buffer("anchors", detector.features_and_anchors(blank)[1])
            candidates = detector.candidates(blank, self.anchors)[1].shape[1]
        self.rows = min(self.config.detections_per_image, candidates)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        boxes, scores, labels = self.detector.candidates(images, self.anchors)
        kept = nms_keep(
            boxes,
            scores,
            labels,
            self.detector.num_classes,
            self.config.nms_threshold,
            self.config.score_threshold,
        )
        return top_detections(boxes, scores * kept, labels, self.rows)


class RawGraph(RetinaNetGraph):
    """Returns boxes and scores before NMS for uint8 [B, 3, S, S].

    The outputs fit TensorRT's EfficientNMS_TRT (box_coding 0, score_activation 0, background_class -1).
    """

    output_names = RAW_OUTPUTS

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self.detector.raw_outputs(images, self.anchors)


def _shape_of(level: Tensor) -> tuple[int, int]:
    """Return height and width of a feature map [B, C, h, w]."""
    return level.shape[-2], level.shape[-1]
