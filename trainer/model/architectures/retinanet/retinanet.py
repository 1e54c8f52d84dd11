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
from trainer.model import boxes as box_ops
from trainer.model import class_outputs, upstream_fitting
from trainer.model.architecture import UpstreamWeights
from trainer.model.architectures.retinanet.retinanet_options import RetinaNetOptions
from trainer.model.backbone import build_backbone, group_norm
from trainer.model.deployment import RAW_OUTPUTS, Graph, best_pairs, nms_keep, served
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
        return DeploymentGraph(self, image_size)

    def raw_graph(self, image_size: int) -> Graph:
        """All boxes and scores, for runtimes with a suppression of their own."""
        return RawGraph(self, image_size)

    def load_upstream(self, state: dict[str, Tensor], source: str) -> str:
        """Load weights of torchvision's RetinaNet or of a ResNet classifier, in place.

        Tensors of the classification layer stay as they are if their shape differs (other classes, other
        anchors). Any other tensor must fit. Outputs of torchvision's detectors for the background and for
        unused ids are left out if the model has exactly the others.
        """
        named = upstream_fitting.as_detector(
            state, source, "RetinaNet", "head.classification_head.",
            foreign="head.regression_head.bbox_ctrness.",
        )  # fmt: skip
        named = {_new_head_name(name): value for name, value in named.items()}
        if not self.label_offset:
            named = class_outputs.without_unused(named, self.num_classes, self.anchors_at_a_place)
        return upstream_fitting.load(self, named, source, (class_outputs.LAYER,))

    def upstream_weights(self, names: Sequence[str]) -> UpstreamWeights:
        """Weights for torchvision's RetinaNet, whose labels count from 1, the background being 0.

        Classes named as COCO's get the ids that torchvision's published weights give them: 91 outputs.
        Otherwise there is one output more than classes.
        """
        state = self.state_dict()
        if not self.label_offset:
            state = class_outputs.spread(state, *class_outputs.places(names), self.anchors_at_a_place)
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


def _new_head_name(name: str) -> str:
    """Rename the head convolutions of torchvision before 0.14: conv.2.weight -> conv.1.0.weight."""
    parts = name.split(".")
    if parts[0] == "head" and parts[2] == "conv" and len(parts) == 5:
        return ".".join([*parts[:3], str(int(parts[3]) // 2), "0", parts[4]])
    return name


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
