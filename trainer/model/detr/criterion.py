"""The matching and losses of D-FINE and RT-DETRv2, as their authors define them.

D-FINE (arXiv:2410.13842): `src/zoo/dfine/dfine_criterion.py`, `dfine_utils.py` and
`configs/dfine/include/dfine_hgnetv2.yml` of github.com/Peterande/D-FINE (4a1f73a). RT-DETRv2:
`src/zoo/rtdetr/rtdetrv2_criterion.py` and `configs/rtdetrv2/include/rtdetrv2_r50vd.yml` in `rtdetrv2_pytorch`
of github.com/lyuwenyu/RT-DETR (068dfde).

Queries and targets are matched as in Carion et al. 2020 (arXiv:2005.12872): the device computes the costs of
all sets of predictions at once, and scipy assigns queries on the CPU. Every divisor refers to the global
batch, so the losses and gradients of its slices add up to those of the global batch.

All sets are computed at once, in shapes that do not depend on values: each query has the row of its target,
or PADDING, and loss terms that do not apply to it have weight 0. Groups of queries that are matched
separately (Group DETR) are additional sets.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from trainer.data import batch
from trainer.data.batch import PADDING
from trainer.model.boxes import area
from trainer.model.detr.denoising import DenoisingQueries
from trainer.model.global_batch import BatchContext

_WEIGHTS = {"vfl": 1.0, "bbox": 5.0, "giou": 2.0, "fgl": 0.15, "ddf": 1.5}
_ALPHA = 0.75  # weight of negatives in the varifocal loss, whose exponent is 2
_SCORE_SHARE = 0.25  # exponent of the score in a pair's goal in `ia_bce_loss`; the IoU has 1 minus this
_MIN_GOAL = 0.01  # minimum goal of a pair in `ia_bce_loss`
_MAL_GAMMA = 1.5  # exponent of the IoU, and of a negative's score, in `mal_loss`
_CLASS_COST, _DISTANCE_COST, _OVERLAP_COST = 2.0, 5.0, 2.0
_COST_ALPHA = 0.25  # weight of positives in the focal cost, whose exponent is 2
_TEMPERATURE = 5.0  # temperature of the distillation from the last layer's distributions
_PAIRS_AT_ONCE = 2**22  # pairs of query and target whose costs are computed at the same time
_MAX_DISTANCE = 0.5  # bound of the distances, relative to the scale of the distributions


class Outputs(NamedTuple):
    """Outputs in training: S sets of predictions for B images and Q queries, D of them denoising queries.

    Each of the decoder's L layers is a set; D-FINE has one more set before them, of unrefined predictions.
    """

    logits: Tensor  # [B, S, Q, C]
    boxes: Tensor  # [B, S, Q, 4] center and size, relative to the image
    corners: Tensor | None  # [B, L, Q, 4 * bins] distributions of the sides' distances; None for RT-DETRv2
    references: Tensor | None
    """[B, L, Q, 4] reference boxes of the distances, the same in all layers; None for RT-DETRv2."""
    encoder_logits: Tensor  # [B, E, Q - D, C] for the locations that became queries, a set for each group
    encoder_boxes: Tensor  # [B, E, Q - D, 4] for the same locations

    def to_full_precision(self) -> "Outputs":
        """Convert all values to fp32, unless they are fp64."""
        parts = {name: part for name, part in self._asdict().items() if part is not None}
        return self._replace(**{name: at_least_fp32(part) for name, part in parts.items()})


class Targets(NamedTuple):
    """Targets of a slice of the global batch."""

    boxes: Tensor  # [B, M, 4] center and size, relative to the image
    labels: Tensor  # int64 [B, M], PADDING where a row is padding


class QueryMatches(NamedTuple):
    """The target row of each normal query (not denoising), or PADDING, as NumPy arrays."""

    own: Any  # int64 [B, S, Q], the assignment of each set of predictions; the encoder's sets are last
    union: Any
    """int64 [B, 1, Q], for boxes and distributions of all sets; None for RT-DETRv2, which uses `own`."""

    @property
    def pairs(self) -> int:
        """Number of pairs of query and target in the union."""
        return 0 if self.union is None else int((self.union != PADDING).sum())


class _QueryGroup(NamedTuple):
    """Either the denoising queries, or the normal queries with the encoder's sets; and their target rows."""

    logits: Tensor
    boxes: Tensor
    queries: slice  # position of these queries among all queries
    class_rows: Tensor  # int64 [B, S or 1, Q], target rows for the classes
    box_rows: Tensor  # target rows for boxes and distributions
    real: Tensor  # [Q], 0 where a query is padding, else 1
    targets: Tensor  # divisor of the classification loss: a scalar
    pairs: Tensor  # divisor of the other losses if above 0: a scalar


def varifocal_loss(logits: Tensor, goal: Tensor) -> Tensor:
    """Return the varifocal loss (arXiv:2008.13367) of each query and class, [B, S, Q, C].

    `goal` is the IoU of a query's box and its target at the target's class, and -1 elsewhere.
    """
    weight = torch.where(goal < 0, _ALPHA * logits.detach().sigmoid() ** 2, goal)
    return F.binary_cross_entropy_with_logits(logits, goal.clamp(min=0), weight, reduction="none")


def ia_bce_loss(logits: Tensor, goal: Tensor) -> Tensor:
    """Return the IoU-aware binary cross-entropy (arXiv:2310.15961); arguments as for `varifocal_loss`.

    Source: `loss_labels` with `ia_bce_loss` in rfdetr/models/lwdetr.py of github.com/roboflow/rf-detr
    (35ac6ab), the same as in models/lwdetr.py of github.com/Atten4Vis/LW-DETR (d5e6e6c).
    """
    matched, chance = goal >= 0, logits.sigmoid()
    aim = chance.detach() ** _SCORE_SHARE * goal.clamp(min=0) ** (1 - _SCORE_SHARE)
    aim = aim.clamp(min=_MIN_GOAL)
    positive = torch.where(matched, aim, 0.0)
    negative = torch.where(matched, 1 - aim, chance**2)
    return negative * logits - F.logsigmoid(logits) * (positive + negative)


def mal_loss(logits: Tensor, goal: Tensor) -> Tensor:
    """Return the matchability-aware loss (arXiv:2412.04234); arguments as for `varifocal_loss`.

    Source: `loss_labels_mal` in engine/deim/deim_criterion.py and configs/base/deimv2.yml of
    github.com/Intellindust-AI-Lab/DEIMv2 (0fff8d4).
    """
    weight = torch.where(goal < 0, logits.detach().sigmoid() ** _MAL_GAMMA, 1.0)
    aim = goal.clamp(min=0) ** _MAL_GAMMA
    return F.binary_cross_entropy_with_logits(logits, aim, weight, reduction="none")


class Criterion:
    """Computes the losses of one kind of network; holds no weights."""

    def __init__(
        self,
        bins: int = 0,
        scale: float = 0.0,
        *,
        groups: int = 1,
        weights: Mapping[str, float] = _WEIGHTS,
        classification: Callable[[Tensor, Tensor], Tensor] = varifocal_loss,
    ) -> None:
        """`bins` and `scale` are `reg_max` and `reg_scale` of D-FINE's distributions; 0 for other networks.

        `weights` are the loss weights by name; the first loss is computed by `classification`, with the
        arguments of `varifocal_loss`. The losses are means over `groups` of queries.
        """
        self._bins, self._scale, self._groups = bins, scale, groups
        self._weights, self._classification = weights, classification
        names = tuple(weights)
        self.loss_names = names if bins else names[:3]
        """Names of the losses: the classification loss, bbox, giou, and for D-FINE fgl and ddf."""

    def start_matching(
        self, outputs: Outputs, targets: Targets, counts: list[int]
    ) -> Callable[[], QueryMatches]:
        """Start matching the normal queries; the returned function waits and returns the matches.

        `outputs` must be in fp32 or fp64; `counts` are the numbers of targets of each image.
        """
        values = matching_costs(*_normal_query_sets(outputs), targets.boxes, targets.labels)
        wait_for_costs = batch.copy_to_host(values)

        @functools.cache
        def finish() -> QueryMatches:
            own = assign_queries(wait_for_costs(), counts)
            return QueryMatches(own, unite_matches(own) if self._bins else None)

        return finish

    def __call__(
        self, outputs: Outputs, targets: Targets, noise: DenoisingQueries | None, context: BatchContext
    ) -> dict[str, Tensor]:
        """Return this slice's contribution to each loss in `loss_names`.

        A loss is a vector with a value for each set of predictions: sets of the denoising queries, of the
        normal queries, and of the encoder. fgl covers only decoder layers, and ddf all of them but the last.
        `outputs` must be in fp32 or fp64.
        """
        device, others = outputs.logits.device, outputs.encoder_logits.shape[2]
        first = outputs.logits.shape[2] - others
        wait_for_matches = context.matches or self.start_matching(outputs, targets, context.counts)
        copies = noise.groups if noise else 0
        total = context.target_count * self._groups
        numbers = torch.tensor([total, total * copies, max(1, total), context.image_count])
        pair_total, noisy_pairs, minimum, images = batch.to_device(numbers.to(outputs.logits.dtype), device)
        groups: list[_QueryGroup] = []
        terms: list[dict[str, Tensor]] = []
        if noise:
            # As in D-FINE's code, a step without boxes has no denoising queries.
            real = (noise.group < noise.groups) & ((pair_total > 0) | (not self._bins))
            groups.append(
                _QueryGroup(
                    outputs.logits[:, :, :first],
                    outputs.boxes[:, :, :first],
                    slice(first),
                    noise.targets,
                    noise.targets,
                    real,
                    minimum * noise.groups,
                    noisy_pairs,
                )
            )
            # The device computes these losses while the CPU receives the costs and assigns queries.
            terms.append(self._group_terms(outputs, targets, groups[0]))
        matches = wait_for_matches()
        rows = matches.own if matches.union is None else np.concatenate([matches.union, matches.own], axis=1)
        sent = batch.to_device(torch.from_numpy(rows), device)
        pairs, own = pair_total, sent
        if matches.union is not None:
            pairs = context.sum_over_step(outputs.logits.new_full((), matches.pairs))
            sent, own = sent[:, :1], sent[:, 1:]
        real, normal_sets = torch.ones(others, dtype=torch.bool, device=device), _normal_query_sets(outputs)
        groups.append(_QueryGroup(*normal_sets, slice(first, None), own, sent, real, minimum, pairs))
        terms.append(self._group_terms(outputs, targets, groups[-1]))
        if self._bins:
            overlap = [losses.pop("overlap") for losses in terms]
            ddf = self._distillation_loss(outputs, groups, torch.cat(overlap, dim=-1), images)
            for group, losses in zip(groups, terms, strict=True):
                losses["ddf"] = ddf[..., group.queries].sum((0, 2))
        return {
            name: self._weights[name] * torch.cat([losses[name] for losses in terms]) for name in terms[0]
        }

    def _group_terms(self, outputs: Outputs, targets: Targets, group: _QueryGroup) -> dict[str, Tensor]:
        """Return a group's losses except ddf; for D-FINE also `overlap`, the IoUs of pairs [B, L, Q]."""
        truth, matched = _gather_target_boxes(targets, group.box_rows)
        overlap, generalized = iou_and_giou(group.boxes, truth)
        share = matched / group.pairs.clamp(min=1)
        quality = overlap.detach()
        if group.class_rows is not group.box_rows:
            with torch.no_grad():
                quality, _ = iou_and_giou(group.boxes, _gather_target_boxes(targets, group.class_rows)[0])
        terms = {
            self.loss_names[0]: self._class_loss(targets, group, quality),
            "bbox": ((group.boxes - truth).abs().sum(-1) * share).sum((0, 2)),
            "giou": ((1 - generalized) * share).sum((0, 2)),
        }
        if self._bins and outputs.corners is not None and outputs.references is not None:
            sides = outputs.corners[:, :, group.queries].unflatten(-1, (4, -1))
            # The first set contains the predictions before the first layer.
            terms["overlap"] = overlap[:, 1 : 1 + sides.shape[1]].detach()
            references = outputs.references[:, :1, group.queries].detach()
            values = bin_values(self._bins, self._scale, references.dtype, references.device)
            center, box = references[..., :2], to_valid_corners(truth)
            outward = torch.cat([center - box[..., :2], box[..., 2:] - center], dim=-1)
            unit = references[..., 2:].repeat(1, 1, 1, 2) / self._scale + 1e-16
            distance = outward / unit - self._scale / 2
            # The bins on both sides of the true distances, and their weights: both [B, 1, Q, 4, 2].
            left = (torch.searchsorted(values, distance, right=True) - 1).clamp(0, self._bins - 1)
            right = ((distance - values[left]) / (values[left + 1] - values[left])).clamp(0, 1)
            index, shares = torch.stack([left, left + 1], dim=-1), torch.stack([1 - right, right], dim=-1)
            chance = F.log_softmax(sides, dim=-1).take_along_dim(index, dim=-1)
            terms["fgl"] = -((chance * shares).sum((-1, -2)) * terms["overlap"] * share).sum((0, 2))
        return terms

    def _class_loss(self, targets: Targets, group: _QueryGroup, quality: Tensor) -> Tensor:
        """Return the classification loss of each set; `quality` [B, S, Q] is the IoU with the target."""
        batch, rows, queries = group.class_rows.shape
        label = targets.labels.gather(1, group.class_rows.clamp(min=0).flatten(1)).view(batch, rows, queries)
        value = torch.where(group.class_rows != PADDING, quality, -1.0)[..., None]
        index = label.clamp(min=0).expand(value.shape[:-1])[..., None]
        goal = torch.full_like(group.logits, -1.0).scatter_(-1, index, value)
        values = self._classification(group.logits, goal)
        return (values.sum(-1) * group.real).sum((0, 2)) / group.targets

    def _distillation_loss(
        self, outputs: Outputs, groups: Sequence[_QueryGroup], overlap: Tensor, images: Tensor
    ) -> Tensor:
        """Return the divergence of each layer's distributions from the last layer's, [B, L - 1, queries].

        It combines a mean over matched sides and a mean over unmatched sides, weighted by the square roots of
        their counts among normal queries. `overlap` is [B, L, queries]; `images` is the number of images in
        the global batch.
        """
        assert outputs.corners is not None
        bins = outputs.corners.unflatten(-1, (4, -1)) / _TEMPERATURE
        own, last = F.log_softmax(bins[:, :-1], dim=-1), F.softmax(bins[:, -1:].detach(), dim=-1)
        divergence = F.kl_div(own, last.expand_as(own), reduction="none").sum((-1, -2))
        confidence = outputs.logits[:, -1:].detach().sigmoid().amax(-1)
        matched = torch.cat([group.box_rows for group in groups], dim=-1) != PADDING
        pairs, others = groups[-1].pairs, images * groups[-1].real.sum() - groups[-1].pairs
        roots = pairs.sqrt(), others.sqrt()
        means = [
            torch.stack(
                [
                    roots[0] / group.pairs.clamp(min=1),
                    roots[1] / (images * group.real.sum() - group.pairs).clamp(min=1),
                ]
            )[:, None]
            * group.real
            for group in groups
        ]
        pair_weight, other_weight = torch.cat(means, dim=-1) / (4 * (roots[0] + roots[1]))
        weight = torch.where(matched, overlap[:, :-1] * pair_weight, confidence * other_weight)
        return _TEMPERATURE**2 * divergence * weight


def _gather_target_boxes(targets: Targets, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the target boxes [B, S, Q, 4] of `rows`, any box for PADDING, and which rows are not PADDING."""
    matched = rows != PADDING
    index = rows.clamp(min=0).flatten(1)[..., None].expand(-1, -1, 4)
    found = targets.boxes.gather(1, index).view(*rows.shape, 4)
    return torch.where(matched[..., None], found, 0.5), matched


def _normal_query_sets(outputs: Outputs) -> tuple[Tensor, Tensor]:
    """Return logits and boxes of the normal queries; the encoder's sets come last."""
    queries = outputs.encoder_logits.shape[2]
    return (
        torch.cat([outputs.logits[:, :, -queries:], outputs.encoder_logits], dim=1),
        torch.cat([outputs.boxes[:, :, -queries:], outputs.encoder_boxes], dim=1),
    )


@functools.cache
def bin_values(bins: int, scale: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the distance of each bin, [bins + 1]: W(n) in the paper on D-FINE."""
    bound = _MAX_DISTANCE * scale
    inner = (bound + 1) ** (torch.arange(1, bins // 2, dtype=torch.float64) * 2 / (bins - 2)) - 1
    ends = torch.tensor([2 * bound], dtype=torch.float64)
    return torch.cat([-ends, -inner.flip(0), 0 * ends, inner, ends]).to(device, dtype)


def at_least_fp32(values: Tensor) -> Tensor:
    """Convert values to fp32, unless they are fp64."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


@torch.no_grad()
def matching_costs(logits: Tensor, boxes: Tensor, targets: Tensor, labels: Tensor) -> Tensor:
    """Return the cost of each pair of query and target, [B, S, Q, M], as in D-FINE's `HungarianMatcher`.

    Predictions are `logits` [B, S, Q, C] and `boxes` [B, S, Q, 4]; `targets` [B, M, 4] have `labels` [B, M].
    """
    sets = max(1, _PAIRS_AT_ONCE // (logits.shape[2] * labels.numel()))
    parts = zip(logits.split(sets, dim=1), boxes.split(sets, dim=1), strict=True)
    return torch.cat([_chunk_costs(*part, targets, labels) for part in parts], dim=1)


def _chunk_costs(logits: Tensor, boxes: Tensor, targets: Tensor, labels: Tensor) -> Tensor:
    index = labels.clamp(min=0)[:, None, None].expand(*logits.shape[:3], -1)
    chance = logits.sigmoid().gather(3, index)
    negative = (1 - _COST_ALPHA) * chance**2 * -(1 - chance + 1e-8).log()
    positive = _COST_ALPHA * (1 - chance) ** 2 * -(chance + 1e-8).log()
    distance = torch.cdist(boxes.flatten(1, 2), targets, p=1).view_as(chance)
    _, overlap = iou_and_giou(boxes[:, :, :, None], targets[:, None, None])
    total = _CLASS_COST * (positive - negative) + _DISTANCE_COST * distance - _OVERLAP_COST * overlap
    # Pairs with non-finite costs match last; the loss reports them.
    worst = torch.finfo(total.dtype).max
    return torch.nan_to_num(total, nan=worst, posinf=worst, neginf=worst)


def assign_queries(values: Tensor, counts: Sequence[int]) -> Any:
    """Assign queries to targets at minimum total cost in each set of predictions; see `QueryMatches.own`.

    `values` are the costs [B, S, Q, M] on the CPU; targets after the first `counts` are padding.
    """
    rows = np.full(values.shape[:3], PADDING)
    for image, image_costs, count in zip(rows, values.numpy(), counts, strict=True):
        for queries, set_costs in zip(image, image_costs, strict=True):
            query, target = linear_sum_assignment(set_costs[:, :count])
            queries[query] = target
    return rows


def unite_matches(own: Any) -> Any:
    """Assign each query that is matched in any set to its most frequent target; on a tie, to the first.

    The code of D-FINE's authors does not define the order on a tie.
    """
    image, number, query = np.nonzero(own != PADDING)
    found, times = np.unique(np.stack([image, query, own[image, number, query]]), axis=1, return_counts=True)
    # Sort by ascending frequency, and on a tie from the last target to the first: later values win.
    image, query, target = found[:, np.lexsort((-found[2], times))]
    union = np.full_like(own[:, :1], PADDING)
    union[image, 0, query] = target
    return union


def to_valid_corners(boxes: Tensor) -> Tensor:
    """Convert boxes [..., 4] from center and size to x1 y1 x2 y2; a negative size counts as 0."""
    half = boxes[..., 2:].clamp(min=0) / 2
    return torch.cat([boxes[..., :2] - half, boxes[..., :2] + half], dim=-1)


def iou_and_giou(boxes: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return IoU and GIoU (arXiv:1902.09630) of pairs of boxes in center and size: [..., 4] -> [...]."""
    first, second = to_valid_corners(boxes), to_valid_corners(others)
    low, high = torch.maximum(first[..., :2], second[..., :2]), torch.minimum(first[..., 2:], second[..., 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    joined = area(first) + area(second) - shared
    outer = torch.maximum(first[..., 2:], second[..., 2:]) - torch.minimum(first[..., :2], second[..., :2])
    hull = outer.prod(-1)
    overlap = shared / joined
    return overlap, overlap - (hull - joined) / hull
