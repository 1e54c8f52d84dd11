"""RetinaNet as one module: uint8 squares in; losses in training, detections otherwise."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.retinanet import RetinaNetHead, _v1_to_v2_weights
from torchvision.ops.feature_pyramid_network import LastLevelP6P7
from torchvision.ops.misc import Conv2dNormActivation, FrozenBatchNorm2d

from trainer.data.batch import PADDING
from trainer.model import boxes as box_ops
from trainer.model import class_outputs, upstream_fitting
from trainer.model.architecture import UpstreamWeights
from trainer.model.architectures.retinanet.retinanet_loss import retinanet_loss
from trainer.model.architectures.retinanet.retinanet_options import RetinaNetOptions
from trainer.model.fused_functions import guarded
from trainer.model.pyramid_detector import DenseDetector, build_backbone, group_norm, shape_of

LEVELS = 5

_EPS_FREE_WEIGHTS = "torchvision:RetinaNet_ResNet50_FPN_Weights.COCO_V1"


class RetinaNet(DenseDetector):
    """RetinaNet in torchvision's state-dict layout (backbone.*, head.*)."""

    config: RetinaNetOptions
    loss_names = ("classification", "boxes")

    def __init__(self, config: RetinaNetOptions, num_classes: int) -> None:
        super().__init__(config, num_classes)
        self.label_offset = int(config.background_class)
        self.backbone = build_backbone(config, first=3, extra=partial(_coarser_levels, config.version))
        self.head = _build_head(config, num_classes + self.label_offset)
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
        self, images: Tensor, boxes: Tensor, labels: Tensor, color: Tensor | None = None,
        verified: Tensor | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Losses of a batch: focal loss of the classes, regression loss of the boxes."""
        features, offsets = (self._compiled_trunk or self.trunk)(self.normalize(images, color))
        return retinanet_loss(
            self.box_loss,
            features,
            self.head.classification_head.cls_logits,
            offsets,
            self.anchors([shape_of(level) for level in features], images.shape[-1]),
            boxes,
            torch.where(labels == PADDING, PADDING, labels + self.label_offset),
            # The background output, if there is one, is never an object.
            verified if verified is None else F.pad(verified, (self.label_offset, 0), value=True),
        )

    def trunk(self, images: Tensor) -> tuple[list[Tensor], Tensor]:
        """The network up to the last classification convolution, for the loss.

        Returns the class head's features [B, fpn_channels, h, w] of each level, and the offsets [B, N, 4].
        """
        features = self.features(images)
        class_head = self.head.classification_head
        return [class_head.conv(level) for level in features], self.head.regression_head(features)

    def compile_network(self, mode: str) -> bool:
        """Compile `trunk`; one shape, one graph. The loss is compiled by itself."""
        compiled = guarded(torch.compile(self.trunk, mode=mode, dynamic=False, fullgraph=True), self.trunk)

        def run(images: Tensor) -> tuple[list[Tensor], Tensor]:
            # CUDA graphs reuse their outputs' memory from here on.
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(images)

        self._compiled_trunk = run
        return True

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

    def decode(self, offsets: Tensor, anchors: Tensor) -> Tensor:
        return box_ops.decode(offsets, anchors)

    def load_upstream(self, state: dict[str, Tensor], source: str) -> str:
        """Load weights of torchvision's RetinaNet or of a ResNet; see `upstream_fitting`, `class_outputs`."""
        named = upstream_fitting.as_detector(
            state, source, "RetinaNet", "head.classification_head.",
            foreign="head.regression_head.bbox_ctrness.",
        )  # fmt: skip
        for branch in ("classification", "regression"):
            # Names of torchvision before 0.14.
            _v1_to_v2_weights(named, f"head.{branch}_head.")
        if not self.label_offset:
            named = class_outputs.from_torchvision(named, self.num_classes, self.anchors_at_a_place)
        return upstream_fitting.load(self, named, source, (class_outputs.LAYER,))

    def upstream_weights(self, names: Sequence[str]) -> UpstreamWeights:
        """Weights for torchvision's RetinaNet, whose label 0 is the background."""
        if self.label_offset:
            return UpstreamWeights(self.state_dict(), self.num_classes + 1)
        return UpstreamWeights(
            *class_outputs.to_torchvision(self.state_dict(), names, self.anchors_at_a_place)
        )

    @property
    def title(self) -> str:
        return f"RetinaNet {self.config.version} on {self.config.backbone}"

    @property
    def anchors_at_a_place(self) -> int:
        """Anchors at each place of each level."""
        return len(self.config.anchor_scales) * len(self.config.aspect_ratios)


def _coarser_levels(version: str, channels: int, width: int) -> LastLevelP6P7:
    """Make P6 and P7, from C5 in version 2 and from P5 in version 1."""
    levels = LastLevelP6P7(channels if version == "v2" else width, width)
    levels.use_P5 = version == "v1"  # It would guess it from equal widths.
    return levels


def _build_head(config: RetinaNetOptions, outputs: int) -> RetinaNetHead:
    anchors = len(config.anchor_scales) * len(config.aspect_ratios)
    norm_layer = group_norm if config.version == "v2" else None
    head = RetinaNetHead(config.fpn_channels, anchors, outputs, norm_layer=norm_layer)
    for branch in (head.classification_head, head.regression_head):
        branch.conv = nn.Sequential(*(_head_layer(config, norm_layer) for _ in range(config.head_depth)))
    return head


def _head_layer(config: RetinaNetOptions, norm_layer: object) -> nn.Module:
    layer = Conv2dNormActivation(config.fpn_channels, config.fpn_channels, norm_layer=norm_layer)
    nn.init.normal_(layer[0].weight, std=0.01)
    if layer[0].bias is not None:
        nn.init.zeros_(layer[0].bias)
    return layer
