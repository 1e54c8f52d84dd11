"""Faster R-CNN v2: torchvision's layers; its two stages for padded batches, in shapes that never change."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor, RPNHead
from torchvision.ops import roi_align
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from trainer.data.batch import PADDING
from trainer.model import upstream_fitting
from trainer.model.architecture import UpstreamWeights
from trainer.model.architectures.faster_rcnn.faster_rcnn_options import FasterRcnnOptions
from trainer.model.boxes import decode, encode
from trainer.model.deployment import nms_keep
from trainer.model.focal import BACKGROUND, IGNORED
from trainer.model.global_batch import Part, uniform
from trainer.model.pyramid_detector import PyramidDetector, build_backbone, group_norm, match, shape_of

PREDICTOR = "roi_heads.box_predictor."  # prefix of the names of the layers that depend on the classes
_POOLED = 7  # side of a proposal's features
_SAMPLES = 2  # points along each side of a pooled cell
_CANONICAL = 224.0  # side of a box whose features are taken from P4 (Lin et al. 2017, arXiv:1612.03144).
_EPSILON = 1e-6
_MIN_PROPOSAL_SIDE = 1e-3
_MIN_DETECTION_SIDE = 1e-2  # sides below which torchvision drops a box of either stage, in pixels
_EMPTY = 0.0  # score of an empty box; real proposals have more
_PROPOSAL_OVERLAP = 0.7  # a proposal that overlaps a better one of its level by more is dropped
_ANCHORS = 256  # anchors of an image that the first stage is trained on, at most half of them objects
_PRECISION = (10.0, 10.0, 5.0, 5.0)  # factors of the second stage's offsets
_BETA = 1 / 9  # where the box losses of torchvision 0.29 turn from squares to distances


class FasterRcnn(PyramidDetector):
    """Faster R-CNN v2 in torchvision's state-dict layout (backbone.*, rpn.*, roi_heads.*).

    Losses are means over the anchors and proposals drawn in a forward pass. The draw is a hash of seed, step
    and image, so it does not depend on the number of processes.
    """

    config: FasterRcnnOptions
    needs_part = True
    loss_names = ("classification", "boxes", "objectness", "proposals")
    precision: Tensor

    def __init__(self, config: FasterRcnnOptions, num_classes: int) -> None:
        super().__init__(config, num_classes)
        norm = group_norm if config.norm == "group" else nn.BatchNorm2d
        self.backbone = build_backbone(
            config, first=2, extra=lambda _, width: LastLevelMaxPool(), norm_layer=norm
        )
        width, shape = config.fpn_channels, tuple(config.aspect_ratios)
        self.anchor_generator = AnchorGenerator(
            tuple((int(size),) for size in config.anchor_sizes), (shape,) * 5
        )
        self.rpn = nn.ModuleDict({"head": RPNHead(width, len(shape), conv_depth=2)})
        layers = [width] * config.head_depth
        self.roi_heads = nn.ModuleDict({
            "box_head": FastRCNNConvFCHead(
                (width, _POOLED, _POOLED), layers, [config.head_width], norm_layer=norm
            ),
            "box_predictor": FastRCNNPredictor(config.head_width, num_classes + 1),
        })  # fmt: skip
        self.register_buffer("precision", torch.tensor(_PRECISION), persistent=False)

    def forward(
        self, images: Tensor, boxes: Tensor, labels: Tensor, color: Tensor | None = None,
        verified: Tensor | None = None, part: Part | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Class and box losses of both stages; `part` has the keys of the images."""
        assert part is not None
        features, size = self.features(self.normalize(images, color)), images.shape[-1]
        levels, offsets = self.first_stage(features)
        with torch.autocast(images.device.type, enabled=False), torch.no_grad():
            anchors = torch.cat(self.anchors([shape_of(level) for level in features], size))
            matched = match(boxes, labels, anchors, 0.7, 0.3)
            tried = draw(
                part.keys, matched, anchors.expand(len(boxes), -1, -1), boxes, _ANCHORS, _ANCHORS // 2
            )
            proposals, real = self.proposals(levels, offsets, anchors, 2 * self.config.proposals, size)
            # The targets are behind the proposals, whose numbers must not depend on them.
            proposals, real = torch.cat([proposals, boxes], 1), torch.cat([real, labels != PADDING], 1)
            matched = match(boxes, labels, proposals, 0.5, 0.5, keep_best=False)
            most = self.config.trained_proposals
            chosen = draw(
                part.keys + 1, torch.where(real, matched, IGNORED), proposals, boxes, most, most // 4
            )
            names = torch.where(chosen.positive, labels.gather(1, chosen.target) + 1, 0)
        logits, moves = self.second_stage(features, chosen.boxes, size)
        moves = moves.take_along_dim(names[:, :, None, None], dim=2).squeeze(2)
        with torch.autocast(images.device.type, enabled=False):
            found = torch.cat(levels, dim=1).gather(1, tried.places)
            object_or_not = F.binary_cross_entropy_with_logits(
                found, tried.positive.float(), reduction="none"
            )
            named = F.cross_entropy(logits.flatten(0, 1), names.flatten(), reduction="none").view_as(names)
            return {
                "classification": (named * chosen.share).sum(),
                "boxes": _box_loss(moves, chosen, self.precision),
                "objectness": (object_or_not * tried.share).sum(),
                "proposals": _box_loss(offsets.take_along_dim(tried.places[:, :, None], dim=1), tried),
            }

    def first_stage(self, features: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Logits [B, n] of each level's anchors, and offsets [B, N, 4] of all, in fp32.

        Eight bits cannot place a box.
        """
        # [B, A, h, w] -> [B, h * w * A] and [B, A * 4, h, w] -> [B, h * w * A, 4], the anchors' order.
        logits, offsets = (
            [level.float().permute(0, 2, 3, 1).flatten(1) for level in levels]
            for levels in self.rpn["head"](features)
        )
        return logits, torch.cat(offsets, dim=1).unflatten(1, (-1, 4))

    def proposals(
        self, levels: list[Tensor], offsets: Tensor, anchors: Tensor, limit: int, size: int
    ) -> tuple[Tensor, Tensor]:
        """Boxes [B, P, 4] of the first stage in fp32, and which of them are any: bool [B, P].

        An image always has P proposals, at most `limit`; if it has fewer, the others are empty boxes.
        """
        parts, start = [], 0
        for number, level in enumerate(levels):
            best, index = torch.topk(level, min(limit, level.shape[1]), dim=1)
            parts.append((best, index + start, torch.full_like(index, number)))
            start += level.shape[1]
        best, index, numbers = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        boxes = decode(offsets.gather(1, index[:, :, None].expand(-1, -1, 4)), anchors[index]).clamp(0, size)
        score = torch.sigmoid(best) * _large(boxes, _MIN_PROPOSAL_SIDE)
        kept = nms_keep(boxes, score, numbers, len(levels), _PROPOSAL_OVERLAP, _EMPTY)
        score, order = torch.topk(score * kept, min(limit, score.shape[1]), dim=1)
        real = score > _EMPTY
        return boxes.gather(1, order[:, :, None].expand(-1, -1, 4)) * real[:, :, None], real

    def second_stage(self, features: list[Tensor], boxes: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Logits [B, P, 1 + C], the background's first, and offsets [B, P, 1 + C, 4] of boxes [B, P, 4]."""
        shape, flat = boxes.shape[:2], boxes.flatten(0, 1)
        image = torch.arange(shape[0], device=boxes.device, dtype=boxes.dtype)
        image = image[:, None].expand(shape).reshape(-1, 1)
        side = torch.sqrt((flat[:, 2] - flat[:, 0]) * (flat[:, 3] - flat[:, 1]))
        bounds = [_CANONICAL * 2 ** (number - _EPSILON) for number in (-1, 0, 1)]
        level = torch.stack([side >= bound for bound in bounds]).sum(dim=0)[:, None]
        pooled = [
            # Shapes are fixed: of the boxes of other levels far outside, where features are 0.
            roi_align(
                feature.float(), torch.cat([image, torch.where(level == number, flat, -4.0 * size)], dim=1),
                _POOLED, feature.shape[-1] / size, _SAMPLES,
            )
            for number, feature in enumerate(features[:4])
        ]  # fmt: skip
        heads = self.roi_heads
        logits, moves = heads["box_predictor"](heads["box_head"](sum(pooled[1:], pooled[0])))
        return logits.float().unflatten(0, shape), moves.float().view(*shape, -1, 4)

    def raw(self, images: Tensor, anchors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Boxes [B, P, C, 4] in pixels and scores [B, P, C] of every class in every proposal."""
        (features, anchors), size = self.located(images, anchors), images.shape[-1]
        proposals, real = self.proposals(*self.first_stage(features), anchors, self.config.proposals, size)
        logits, moves = self.second_stage(features, proposals, size)
        boxes = decode(moves[:, :, 1:] / self.precision, proposals[:, :, None]).clamp(0, size)
        scores = torch.softmax(logits, dim=-1)[:, :, 1:] * _large(boxes, _MIN_DETECTION_SIDE)
        return boxes, scores * real[:, :, None]

    def found(self, images: Tensor, anchors: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        boxes, scores = self.raw(images, anchors)
        best, pair = torch.topk(scores.flatten(1), min(self.config.topk_candidates, scores[0].numel()), dim=1)
        chosen = boxes.flatten(1, 2).gather(1, pair[:, :, None].expand(-1, -1, 4))
        return chosen, best, pair % self.num_classes

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


class Draw(NamedTuple):
    """K of an image's anchors or proposals, the drawn objects first."""

    places: Tensor  # int64 [B, K], among the N
    share: Tensor  # [B, K]: one divided by the number drawn from all images, or 0 where none was left to draw
    positive: Tensor  # bool [B, K]: whether it learns an object
    target: Tensor  # int64 [B, K], the row of that object; any row if there is none
    boxes: Tensor  # [B, K, 4], itself
    truth: Tensor  # [B, K, 4], its object, or itself if there is none


def draw(keys: Tensor, matched: Tensor, places: Tensor, boxes: Tensor, size: int, most: int) -> Draw:
    """Draw `size` of N places of each image, at most `most` of which have an object.

    As many as torchvision's `BalancedPositiveNegativeSampler` draws, by the random numbers of `keys` [B].
    `matched` [B, N] is what `match` gives for the places [B, N, 4] and for targets `boxes` [B, M, 4].
    """
    order, parts = uniform(keys, matched.shape[1]), []
    for eligible, limit, later in ((matched >= 0, most, 0), (matched == BACKGROUND, size, 1)):
        rank = torch.where(eligible, order + later, math.inf)
        parts.append(rank.topk(min(limit, rank.shape[1]), dim=1, largest=False))
    rank, index = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    rank, order = rank.topk(min(size, rank.shape[1]), dim=1, largest=False)
    drawn = rank.isfinite()
    # Places without a share repeat the others, so that they hardly change the statistics of BatchNorm.
    again = torch.arange(rank.shape[1], device=rank.device) % drawn.sum(1, keepdim=True).clamp(min=1)
    index = index.gather(1, order.gather(1, again))
    target, own = matched.gather(1, index), places.take_along_dim(index[:, :, None], dim=1)
    positive = (target >= 0) & drawn
    target = target.clamp(min=0)
    truth = torch.where(positive[:, :, None], boxes.take_along_dim(target[:, :, None], dim=1), own)
    return Draw(index, drawn / drawn.sum().clamp(min=1), positive, target, own, truth)


def _box_loss(offsets: Tensor, drawn: Draw, precision: Tensor | float = 1.0) -> Tensor:
    """Mean loss of offsets [B, K, 4] over all that was drawn; places without an object add 0."""
    goal = torch.where(drawn.positive[:, :, None], encode(drawn.truth, drawn.boxes) * precision, 0.0)
    each = F.smooth_l1_loss(offsets, goal, beta=_BETA, reduction="none").sum(dim=2)
    return (torch.where(drawn.positive, each, 0.0) * drawn.share).sum()


def _large(boxes: Tensor, smallest: float) -> Tensor:
    """1 where both sides of boxes [..., 4] are that long, in pixels, else 0."""
    sides = boxes[..., 2:] - boxes[..., :2]
    return (sides.amin(dim=-1) >= smallest).to(boxes.dtype)
