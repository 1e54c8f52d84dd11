"""Faster R-CNN v2, with torchvision's two stages on our squares and padded batches."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import (
    FasterRCNN,
    FastRCNNConvFCHead,
    FastRCNNPredictor,
    RPNHead,
)
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from trainer.model import class_outputs, upstream_fitting
from trainer.model.architecture import UpstreamWeights
from trainer.model.architectures.faster_rcnn.faster_rcnn_options import FasterRcnnOptions
from trainer.model.backbone import build_backbone, group_norm
from trainer.model.deployment import Graph
from trainer.model.global_batch import Part, uniform
from trainer.model.postprocess import Detections, padded
from trainer.model.pyramid_detector import PyramidDetector, unpadded

PREDICTOR = "roi_heads.box_predictor."
"""Prefix of the names of the layers that depend on the classes."""
_POOLED = 7
"""Side of a proposal's features."""


class FasterRcnn(PyramidDetector):
    """Faster R-CNN v2 in torchvision's state-dict layout (backbone.*, rpn.*, roi_heads.*).

    Its losses are means over the anchors and proposals that are drawn in a forward pass: of each image by
    random numbers that follow from seed, step and image, the same on any number of processes.
    """

    config: FasterRcnnOptions
    needs_part = True
    loss_names = ("classification", "boxes", "objectness", "proposals")

    def __init__(self, config: FasterRcnnOptions, num_classes: int) -> None:
        super().__init__(config, num_classes)
        norm = group_norm if config.norm == "group" else nn.BatchNorm2d
        self.backbone = build_backbone(
            config, first=2, extra=lambda _, width: LastLevelMaxPool(), norm_layer=norm
        )
        width, shape = config.fpn_channels, tuple(config.aspect_ratios)
        anchors = AnchorGenerator(tuple((int(size),) for size in config.anchor_sizes), (shape,) * 5)
        stock = FasterRCNN(
            self.backbone, rpn_anchor_generator=anchors, rpn_head=_ProposalHead(width, len(shape), 2),
            rpn_pre_nms_top_n_train=2 * config.proposals, rpn_post_nms_top_n_train=2 * config.proposals,
            rpn_pre_nms_top_n_test=config.proposals, rpn_post_nms_top_n_test=config.proposals,
            box_roi_pool=_Pooling(["0", "1", "2", "3"], _POOLED, sampling_ratio=2),
            box_head=FastRCNNConvFCHead(
                (width, _POOLED, _POOLED), [width] * config.head_depth, [config.head_width], norm_layer=norm
            ),
            box_predictor=_Predictor(config.head_width, num_classes + 1),
            box_batch_size_per_image=config.trained_proposals, box_score_thresh=config.score_threshold,
            box_nms_thresh=config.nms_threshold, box_detections_per_img=config.detections_per_image,
        )  # fmt: skip
        self.rpn, self.roi_heads = stock.rpn, stock.roi_heads
        self.rpn.fg_bg_sampler = BalancedDraw(self.rpn.fg_bg_sampler, stage=0)
        self.roi_heads.fg_bg_sampler = BalancedDraw(self.roi_heads.fg_bg_sampler, stage=1)

    def forward(
        self, images: Tensor, boxes: Tensor, labels: Tensor, color: Tensor | None = None,
        verified: Tensor | None = None, part: Part | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Losses of a batch: of both stages, what is there and where; `part` has the keys of its images."""
        assert part is not None
        self.rpn.fg_bg_sampler.keys = self.roi_heads.fg_bg_sampler.keys = part.keys
        inputs = self.normalize(images, color)
        targets = unpadded(boxes, labels, first=1)
        features, listed = self.backbone(inputs), _listed(inputs)
        proposals, first = self.rpn(listed, features, targets)
        _, second = self.roi_heads(features, proposals, listed.image_sizes, targets)
        return {
            "classification": second["loss_classifier"],
            "boxes": second["loss_box_reg"],
            "objectness": first["loss_objectness"],
            "proposals": first["loss_rpn_box_reg"],
        }

    @torch.inference_mode()
    def predict(self, images: Tensor) -> Detections:
        """Detections in uint8 images [B, 3, S, S], by torchvision's postprocessing."""
        inputs = self.normalize(images)
        features, listed = self.backbone(inputs), _listed(inputs)
        proposals, _ = self.rpn(listed, features)
        detections, _ = self.roi_heads(features, proposals, listed.image_sizes)
        return padded(detections, self.config.detections_per_image, first=1)

    def deployment_graph(self, image_size: int) -> Graph:
        """The detector with pre- and postprocessing."""
        from trainer.model.architectures.faster_rcnn.faster_rcnn_graph import FasterRcnnGraph

        return FasterRcnnGraph(self, image_size)

    def load_upstream(self, state: dict[str, Tensor], source: str) -> str:
        """Load weights of torchvision's Faster R-CNN v2 or of a ResNet; see `upstream_fitting`."""
        named = upstream_fitting.as_detector(state, source, "Faster R-CNN", PREDICTOR)
        if (score := named.get(PREDICTOR + "cls_score.bias")) is not None:
            kept = class_outputs.chosen(len(score), self.num_classes)
            named |= {
                name: value.unflatten(0, (len(score), -1))[[0, *kept]].flatten(0, 1)
                for name, value in named.items() if kept and name.startswith(PREDICTOR)
            }  # fmt: skip
        return upstream_fitting.load(self, named, source, (PREDICTOR,))

    def upstream_weights(self, names: Sequence[str]) -> UpstreamWeights:
        """Weights for torchvision's `fasterrcnn_resnet50_fpn_v2`, whose labels count from 1."""
        places, total = class_outputs.places(names)
        state = self.state_dict()
        for name, value in self.state_dict().items():
            if name.startswith(PREDICTOR):
                parts = value.unflatten(0, (self.num_classes + 1, -1))
                unused = class_outputs.UNUSED_BIAS if name == PREDICTOR + "cls_score.bias" else 0.0
                wider = value.new_full((total, *parts.shape[1:]), unused)
                wider[[0, *places]] = parts
                state[name] = wider.flatten(0, 1)
        return UpstreamWeights(state, total)

    @property
    def title(self) -> str:
        """Name and backbone."""
        return f"Faster R-CNN v2 on {self.config.backbone}"


class BalancedDraw(BalancedPositiveNegativeSampler):
    """torchvision's draw of positives and negatives, by numbers of each image's own."""

    keys: Tensor
    """int64 [B], of the images that come next, see `global_batch.Part`."""

    def __init__(self, stock: BalancedPositiveNegativeSampler, stage: int) -> None:
        """Draw as many as `stock`; the draws of two stages are independent of each other."""
        super().__init__(stock.batch_size_per_image, stock.positive_fraction)
        self._stage = stage

    def __call__(self, matched: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Masks of the drawn positives and of the drawn negatives, uint8 [N] of each image.

        Args:
            matched: of each image [N]: 1 and more is positive, 0 negative, below it neither.
        """
        positives, negatives = [], []
        for number, places in enumerate(matched):
            order = uniform(self.keys[number : number + 1] + self._stage, len(places))[0]
            most = int(self.batch_size_per_image * self.positive_fraction)
            positives.append(_first(order, places >= 1, most))
            left = self.batch_size_per_image - int(positives[-1].sum())
            negatives.append(_first(order, places == 0, left))
        return positives, negatives


def _first(order: Tensor, eligible: Tensor, most: int) -> Tensor:
    """Mask of the eligible places that come first in an order, uint8 [N]."""
    places = eligible.nonzero()[:, 0]
    mask = torch.zeros_like(eligible, dtype=torch.uint8)
    mask[places[order[places].argsort(stable=True)[:most]]] = 1
    return mask


class _ProposalHead(RPNHead):
    """torchvision's, with outputs in fp32: eight bits cannot place a box."""

    def forward(self, features: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        logits, offsets = super().forward(features)
        return [level.float() for level in logits], [level.float() for level in offsets]


class _Predictor(FastRCNNPredictor):
    """torchvision's, with outputs in fp32."""

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        logits, offsets = super().forward(features)
        return logits.float(), offsets.float()


class _Pooling(MultiScaleRoIAlign):
    """torchvision's, in fp32, which is the type of the boxes."""

    def forward(
        self, features: dict[str, Tensor], boxes: list[Tensor], sizes: list[tuple[int, int]]
    ) -> Tensor:
        return super().forward({name: level.float() for name, level in features.items()}, boxes, sizes)


def _listed(images: Tensor) -> ImageList:
    return ImageList(images, [(images.shape[-2], images.shape[-1])] * len(images))
