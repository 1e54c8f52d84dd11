"""RetinaNet as one module: uint8 squares in; losses in training, detections otherwise."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops.feature_pyramid_network import LastLevelP6P7
from torchvision.ops.misc import Conv2dNormActivation, FrozenBatchNorm2d

from trainer.data.batch import PADDING
from trainer.model import class_outputs
from trainer.model.architecture import UpstreamWeights
from trainer.model.architectures.retinanet import retinanet_weights
from trainer.model.architectures.retinanet.retinanet_options import RetinaNetOptions
from trainer.model.backbone import build_backbone, group_norm
from trainer.model.deployment import Graph
from trainer.model.fused_functions import guarded
from trainer.model.loss import retinanet_loss
from trainer.model.postprocess import Detections, postprocess
from trainer.model.pyramid_detector import PyramidDetector

LEVELS = 5

_EPS_FREE_WEIGHTS = "torchvision:RetinaNet_ResNet50_FPN_Weights.COCO_V1"


class RetinaNet(PyramidDetector):
    """RetinaNet in torchvision's state-dict layout (backbone.*, head.*)."""

    config: RetinaNetOptions
    loss_names = ("classification", "boxes")

    def __init__(self, config: RetinaNetOptions, num_classes: int) -> None:
        super().__init__(config, num_classes)
        self.label_offset = int(config.background_class)
        self.backbone = build_backbone(config, first=3, extra=_coarser_levels(config))
        self.head = _build_head(config, num_classes + self.label_offset)
        self.box_loss = _box_loss_kind(config)
        sizes = tuple(
            tuple(int(size * scale) for scale in config.anchor_scales) for size in config.anchor_sizes
        )
        self.anchor_generator = AnchorGenerator(sizes, (tuple(config.aspect_ratios),) * LEVELS)
        self._compiled_trunk: Callable[[Tensor], tuple[list[Tensor], Tensor]] | None = None
        self._anchors: dict[tuple[tuple[int, int], torch.device], list[Tensor]] = {}
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
        anchors = self.anchors([(level.shape[-2], level.shape[-1]) for level in features], _size(images))
        losses = retinanet_loss(
            self.box_loss,
            features,
            self.head.classification_head.cls_logits,
            offsets,
            anchors,
            boxes,
            torch.where(labels == PADDING, PADDING, labels + self.label_offset),
            # The background, where there is one, is never an object.
            verified if verified is None else F.pad(verified, (self.label_offset, 0), value=True),
        )
        return losses._asdict()

    def trunk(self, images: Tensor) -> tuple[list[Tensor], Tensor]:
        """The network up to the last classification convolution, for the loss.

        Args:
            images: normalised, [B, 3, S, S].

        Returns:
            The class head's features [B, fpn_channels, h, w] of each level, and the offsets [B, N, 4].
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

    @torch.inference_mode()
    def predict(self, images: Tensor) -> Detections:
        """Detections in uint8 images [B, 3, S, S]."""
        logits, offsets, shapes = self.outputs(self.normalize(images))
        size = _size(images)
        return self.detections(logits, offsets, self.anchors(shapes, size), size)

    def detections(
        self, logits: list[Tensor], offsets: list[Tensor], anchors: list[Tensor], image_size: tuple[int, int]
    ) -> Detections:
        """Detections from the heads' outputs of each level, with the background output left out."""
        classes = [level[:, :, self.label_offset :] for level in logits]
        return postprocess(classes, offsets, anchors, image_size, self.config)

    def features(self, images: Tensor) -> list[Tensor]:
        """Pyramid P3..P7 of normalised images [B, 3, S, S], each [B, fpn_channels, h, w]."""
        return list(self.backbone(images).values())

    def outputs(self, images: Tensor) -> tuple[list[Tensor], list[Tensor], list[tuple[int, int]]]:
        """Class logits [B, n, C], offsets [B, n, 4] and shape of each level, of normalised images.

        Level by level: a concatenation would copy the largest tensor of all.
        """
        features = self.features(images)
        head, rows = self.head.classification_head, len(images)
        logits = [
            head.cls_logits(head.conv(level)).permute(0, 2, 3, 1).reshape(rows, -1, head.num_classes)
            for level in features
        ]
        offsets = self.head.regression_head(features).split([level.shape[1] for level in logits], dim=1)
        return logits, list(offsets), [(level.shape[-2], level.shape[-1]) for level in features]

    def anchors(self, shapes: list[tuple[int, int]], image_size: tuple[int, int]) -> list[Tensor]:
        """Anchors [n, 4] of each level, fp32, built once for an input size and device.

        Always fp32: in bf16 they would move by up to 6 pixels at 800 px.
        """
        device = self.mean.device
        key = (image_size, device)
        if key not in self._anchors:
            self.anchor_generator.set_cell_anchors(torch.float32, device)
            strides = [
                [torch.tensor(image_size[axis] // shape[axis], device=device) for axis in (0, 1)]
                for shape in shapes
            ]
            with torch.inference_mode(False):
                self._anchors[key] = self.anchor_generator.grid_anchors([list(s) for s in shapes], strides)
        return self._anchors[key]

    def deployment_graph(self, image_size: int) -> Graph:
        """The detector with pre- and postprocessing."""
        from trainer.model.architectures.retinanet.retinanet_graph import DeploymentGraph

        return DeploymentGraph(self, image_size)

    def raw_graph(self, image_size: int) -> Graph:
        """All boxes and scores, for runtimes with a suppression of their own."""
        from trainer.model.architectures.retinanet.retinanet_graph import RawGraph

        return RawGraph(self, image_size)

    def load_upstream(self, state: dict[str, Tensor], source: str) -> str:
        """Load weights of torchvision's RetinaNet or ResNet; see `retinanet_weights.fit`."""
        return retinanet_weights.fit(self, state, source)

    def upstream_weights(self, names: Sequence[str]) -> UpstreamWeights:
        """Weights of torchvision's RetinaNet; see `retinanet_weights.torchvision_state`."""
        state = retinanet_weights.torchvision_state(self, names)
        return UpstreamWeights(state, class_outputs.outputs(state, self.anchors_at_a_place))

    @property
    def title(self) -> str:
        """Version and backbone."""
        return f"RetinaNet {self.config.version} on {self.config.backbone}"

    @property
    def anchors_at_a_place(self) -> int:
        """Anchors at each place of each level."""
        return len(self.config.anchor_scales) * len(self.config.aspect_ratios)


def _size(images: Tensor) -> tuple[int, int]:
    return images.shape[-2], images.shape[-1]


def _box_loss_kind(config: RetinaNetOptions) -> str:
    if config.box_loss != "default":
        return config.box_loss
    return "giou" if config.version == "v2" else "l1"


def _coarser_levels(config: RetinaNetOptions) -> Callable[[int, int], LastLevelP6P7]:
    """Makes P6 and P7, of C5 in version 2 and of P5 in version 1."""

    def make(channels: int, width: int) -> LastLevelP6P7:
        # LastLevelP6P7 takes C5 where its two widths differ and P5 where they are equal.
        levels = LastLevelP6P7(channels if config.version == "v2" else width, width)
        if config.version == "v2":
            levels.use_P5 = False
        return levels

    return make


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
