"""Faster R-CNN v2, with torchvision's two stages on our squares and padded batches."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
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
from torchvision.ops import MultiScaleRoIAlign, roi_align
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from trainer.data.batch import PADDING
from trainer.model import upstream_fitting
from trainer.model.architecture import UpstreamWeights
from trainer.model.architectures.faster_rcnn.faster_rcnn_options import FasterRcnnOptions
from trainer.model.deployment import RAW_OUTPUTS, Graph, nms_keep, served
from trainer.model.global_batch import Part, uniform
from trainer.model.postprocess import Detections
from trainer.model.pyramid_detector import PyramidDetector, build_backbone, group_norm

PREDICTOR = "roi_heads.box_predictor."  # prefix of the names of the layers that depend on the classes
_POOLED = 7  # side of a proposal's features
_CANONICAL = 224.0  # side of a box whose features are taken from P4 (Lin et al. 2017, arXiv:1612.03144).
_EPSILON = 1e-6
_MIN_PROPOSAL_SIDE = 1e-3
_MIN_DETECTION_SIDE = 1e-2  # sides below which torchvision drops a box of either stage, in pixels
_EMPTY = 0.0  # score of an empty box; real proposals have more


class FasterRcnn(PyramidDetector):
    """Faster R-CNN v2 in torchvision's state-dict layout (backbone.*, rpn.*, roi_heads.*).

    Losses are means over the anchors and proposals drawn in a forward pass. The draw is a hash of seed, step
    and image, so it does not depend on the number of processes.
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
        """Class and box losses of both stages; `part` has the keys of the images."""
        assert part is not None
        self.rpn.fg_bg_sampler.keys = self.roi_heads.fg_bg_sampler.keys = part.keys
        inputs = self.normalize(images, color)
        # torchvision's lists without padding, whose label 0 is the background.
        targets = [
            {"boxes": rows[real], "labels": names[real] + 1}
            for rows, names, real in zip(boxes, labels, labels != PADDING, strict=True)
        ]
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
        inputs = self.normalize(images)
        features, listed = self.backbone(inputs), _listed(inputs)
        proposals, _ = self.rpn(listed, features)
        found, _ = self.roi_heads(features, proposals, listed.image_sizes)
        rows = self.config.detections_per_image

        def padded(name: str, fill: float) -> Tensor:
            parts = [image[name] for image in found]
            sides = [(0, 0) * (part.ndim - 1) + (0, rows - len(part)) for part in parts]
            return torch.stack([F.pad(part, pad, value=fill) for part, pad in zip(parts, sides, strict=True)])

        num = torch.tensor([len(image["scores"]) for image in found], device=images.device)
        return Detections(padded("boxes", 0.0), padded("scores", 0.0), padded("labels", 0) - 1, num)

    def deployment_graph(self, image_size: int) -> Graph:
        return FasterRcnnGraph(self, image_size)

    def raw_graph(self, image_size: int) -> Graph:
        return RawFasterRcnnGraph(self, image_size)

    def load_upstream(self, state: dict[str, Tensor], source: str) -> str:
        """Load weights of torchvision's Faster R-CNN v2 or of a ResNet; see `upstream_fitting`."""
        named = upstream_fitting.as_detector(state, source, "Faster R-CNN", PREDICTOR)
        if (score := named.get(PREDICTOR + "cls_score.bias")) is not None:
            kept = upstream_fitting.chosen(len(score), self.num_classes)
            named |= {
                name: upstream_fitting.select(value, [0, *kept], len(score))
                for name, value in named.items()
                if kept and name.startswith(PREDICTOR)
            }
        return upstream_fitting.load(self, named, source, (PREDICTOR,))

    def upstream_weights(self, names: Sequence[str]) -> UpstreamWeights:
        """Weights for torchvision's `fasterrcnn_resnet50_fpn_v2`, whose labels count from 1."""
        places, total = upstream_fitting.places(names)
        state = self.state_dict()
        for name in [name for name in state if name.startswith(PREDICTOR)]:
            unused = upstream_fitting.UNUSED_BIAS if name == PREDICTOR + "cls_score.bias" else 0.0
            state[name] = upstream_fitting.spread(state[name], [0, *places], total, unused=unused)
        return UpstreamWeights(state, total)

    @property
    def title(self) -> str:
        return f"Faster R-CNN v2 on {self.config.backbone}"


class BalancedDraw(BalancedPositiveNegativeSampler):
    """torchvision's draw of positives and negatives, by random numbers of each image."""

    keys: Tensor  # int64 [B], of the images of the next call, see `global_batch.Part`

    def __init__(self, stock: BalancedPositiveNegativeSampler, stage: int) -> None:
        """Draw as many as `stock`; the draws of two stages are independent of each other."""
        super().__init__(stock.batch_size_per_image, stock.positive_fraction)
        self._stage = stage

    def __call__(self, matched: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Masks of drawn positives and negatives, uint8 [N] of each image.

        `matched` [N] of an image is at least 1 for positives, 0 for negatives, and less for the rest.
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


class FasterRcnnGraph(Graph):
    """uint8 [B, 3, S, S] in, detections out; anchors and thresholds are constants of the graph.

    An image always has P proposals; if it has fewer, the others are empty boxes without a score.
    """

    anchors: Tensor  # fp32 [N, 4] of all levels, x1 y1 x2 y2
    levels: Tensor  # int64 [N], the level of each anchor

    def __init__(self, detector: FasterRcnn, image_size: int) -> None:
        super().__init__()
        self.detector = detector.eval()
        self.config, self.image_size = detector.config, image_size
        with torch.no_grad():
            blank = torch.zeros(1, 3, image_size, image_size, device=detector.mean.device)
            features = detector.features(detector.normalize(blank))
            (anchors,) = detector.rpn.anchor_generator(_listed(blank), features)
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
        features = self.detector.features(self.detector.normalize(images))
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
        score = torch.sigmoid(best) * _large(boxes, _MIN_PROPOSAL_SIDE)
        kept = nms_keep(boxes, score, self.levels[index], len(self.counts), rpn.nms_thresh, _EMPTY)
        score, order = torch.topk(score * kept, self.places, dim=1)
        real = (score > _EMPTY).to(boxes.dtype)
        return boxes.gather(1, order[:, :, None].expand(-1, -1, 4)) * real[:, :, None], real

    def classified(self, features: list[Tensor], proposals: Tensor) -> tuple[Tensor, Tensor]:
        """Boxes [B, P, C, 4] and scores [B, P, C] of every class in every proposal."""
        heads, batch = self.detector.roi_heads, proposals.shape[0]
        flat = proposals.flatten(0, 1)
        # From the level for the size of each proposal. Each level is pooled for all proposals, which keeps
        # shapes fixed and costs little compared with the second stage's convolutions.
        pool = heads.box_roi_pool
        image = torch.arange(batch, device=proposals.device, dtype=proposals.dtype)
        rows = torch.cat([image[:, None, None].expand(-1, self.places, 1), proposals], dim=2).flatten(0, 1)
        side = torch.sqrt((rows[:, 3] - rows[:, 1]) * (rows[:, 4] - rows[:, 2]))
        bounds = [_CANONICAL * 2 ** (number - _EPSILON) for number in (-1, 0, 1)]
        level = torch.stack([side >= bound for bound in bounds]).sum(dim=0)
        pooled: Tensor | None = None
        for number, feature in enumerate(features[: len(pool.featmap_names)]):
            scale = feature.shape[-1] / self.image_size
            part = roi_align(feature.float(), rows, pool.output_size, scale, pool.sampling_ratio)
            chosen = part * (level == number).to(part.dtype)[:, None, None, None]
            pooled = chosen if pooled is None else pooled + chosen
        logits, moves = heads.box_predictor(heads.box_head(pooled))
        boxes = heads.box_coder.decode_single(moves, flat).unflatten(1, (-1, 4))[:, 1:]
        boxes = boxes.clamp(0, self.image_size)
        scores = torch.softmax(logits, dim=1)[:, 1:] * _large(boxes, _MIN_DETECTION_SIDE)
        return boxes.unflatten(0, (batch, self.places)), scores.unflatten(0, (batch, self.places))


class RawFasterRcnnGraph(FasterRcnnGraph):
    """uint8 [B, 3, S, S] in; boxes [B, P, C, 4] in pixels and scores [B, P, C] of all proposals out."""

    names = RAW_OUTPUTS

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        features = self.detector.features(self.detector.normalize(images))
        proposals, real = self.proposals(features)
        boxes, scores = self.classified(features, proposals)
        return boxes, scores * real[:, :, None]


def _large(boxes: Tensor, smallest: float) -> Tensor:
    """1 where both sides of boxes [..., 4] are that long, in pixels, else 0."""
    sides = boxes[..., 2:] - boxes[..., :2]
    return (sides.amin(dim=-1) >= smallest).to(boxes.dtype)
