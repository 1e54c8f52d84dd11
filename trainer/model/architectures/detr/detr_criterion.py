"""The matching and losses of D-FINE and RT-DETRv2, as their authors define them.

D-FINE (arXiv:2410.13842): `src/zoo/dfine/dfine_criterion.py`, `dfine_utils.py` and
`configs/dfine/include/dfine_hgnetv2.yml` of github.com/Peterande/D-FINE (4a1f73a). RT-DETRv2:
`src/zoo/rtdetr/rtdetrv2_criterion.py` and `configs/rtdetrv2/include/rtdetrv2_r50vd.yml` in `rtdetrv2_pytorch`
of github.com/lyuwenyu/RT-DETR (068dfde).

Queries and targets are matched as by Carion et al. 2020 (arXiv:2005.12872): the device computes the costs of
all sets of predictions at once; scipy assigns on the host. Every divisor is that of the whole global batch,
like the authors' on one process, so the losses and gradients of slices add up to those of the whole.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from trainer.data import batch
from trainer.model.architectures.detr.denoising import Denoising, Pairs
from trainer.model.boxes import area
from trainer.model.global_batch import Part

_WEIGHTS = {"vfl": 1.0, "bbox": 5.0, "giou": 2.0, "fgl": 0.15, "ddf": 1.5}
_ALPHA = 0.75  # weight of negatives in the varifocal loss; its exponent is 2
_CLASS_COST, _DISTANCE_COST, _OVERLAP_COST = 2.0, 5.0, 2.0
_COST_ALPHA = 0.25  # balance of the focal cost; its exponent is 2
_TEMPERATURE = 5.0  # temperature of the last layer's distributions, which teach the others
_UP = 0.5  # bounds of the distances, relative to the scale of the distributions


class Outputs(NamedTuple):
    """Outputs in training: S sets of predictions, B images, Q queries, of which D denoise.

    Sets are the decoder's L layers; D-FINE has one more in front: boxes and logits before refinement.
    """

    logits: Tensor  # [B, S, Q, C]
    boxes: Tensor  # [B, S, Q, 4] centre and size, relative to the image
    corners: Tensor | None  # [B, L, Q, 4 * bins] distributions of the sides' distances; None for RT-DETRv2
    references: Tensor | None
    """[B, L, Q, 4] reference boxes of the distances, the same in all layers; None for RT-DETRv2."""
    encoder_logits: Tensor  # [B, Q - D, C] of the places that became queries
    encoder_boxes: Tensor  # [B, Q - D, 4] of the same

    def exact(self) -> "Outputs":
        """The same in fp32 or more."""
        parts = {name: part for name, part in self._asdict().items() if part is not None}
        return self._replace(**{name: at_least_fp32(part) for name, part in parts.items()})


class Targets(NamedTuple):
    """Targets of a slice of the global batch."""

    boxes: Tensor  # [B, M, 4] centre and size, relative to the image
    labels: Tensor  # int64 [B, M], PADDING where a row is padding
    verified: Tensor | None = None
    """bool [B, C], the classes that may be negatives of each image; None for all."""


class Matches(NamedTuple):
    """Targets of the queries without noise, on the host."""

    own: Pairs  # the assignment of each set of predictions, the encoder's last
    union: Pairs | None
    """Pairs for the boxes and distributions of all sets; None for RT-DETRv2, which uses `own`."""

    @property
    def joined(self) -> int:
        """Number of pairs in the union."""
        return len(self.union.image) if self.union else 0


class _Group(NamedTuple):
    """The denoising queries, or the others with the encoder, and their targets."""

    logits: Tensor
    boxes: Tensor
    first: int  # number of the first of these queries in a layer
    own: Pairs
    learnt: Pairs  # pairs for boxes and distributions
    targets: int  # divisor of the varifocal loss
    pairs: Tensor  # divisor of the other losses, if it is above 0: a scalar


class Criterion:
    """Computes the losses of one kind of network; holds no weights."""

    def __init__(self, bins: int = 0, scale: float = 0.0) -> None:
        """Take the authors' `reg_max` (bins of D-FINE's distributions; 0 for RT-DETRv2) and `reg_scale`."""
        self._bins, self._scale = bins, scale

    def match(self, outputs: Outputs, targets: Targets, counts: list[int]) -> Callable[[], Matches]:
        """Start to match the queries without noise; the returned function waits and returns the matches.

        `outputs` are in fp32 or more; `counts` are the targets of each image.
        """
        values = costs(*_with_encoder(outputs), targets.boxes, targets.labels)
        arriving = batch.copy_to_host(values)

        @functools.cache
        def finish() -> Matches:
            own = assign(arriving(), counts)
            return Matches(own, any_matched(own) if self._bins else None)

        return finish

    def __call__(
        self, outputs: Outputs, targets: Targets, noise: Denoising | None, part: Part
    ) -> dict[str, Tensor]:
        """Share of this slice in the losses vfl, bbox, giou, and for D-FINE fgl and ddf.

        Each is a vector with a value for each set of predictions: first the sets of the denoising queries,
        then those of the others with the encoder's last. fgl has only the layers, ddf all but the last.
        `outputs` are in fp32 or more.
        """
        scalar, boxes = outputs.logits.new_full, max(1, part.targets)
        first = outputs.logits.shape[2] - outputs.encoder_logits.shape[1]
        matched = part.surveyed or self.match(outputs, targets, part.counts)
        groups: list[_Group] = []
        terms: list[dict[str, Tensor]] = []
        # Without a box in the step D-FINE's code has no denoising queries. Here they are padding.
        if noise and (part.targets or not self._bins):
            # The device computes these losses while the costs travel and are assigned.
            (own,) = to_device([noise.pairs], outputs.logits.device)
            predictions = outputs.logits[:, :, :first], outputs.boxes[:, :, :first]
            pairs = scalar((), part.targets * noise.groups)
            groups.append(_Group(*predictions, 0, own, own, boxes * noise.groups, pairs))
            terms.append(self._terms(outputs, targets, groups[0]))
        matches = matched()
        own, union = to_device(matches, outputs.logits.device)
        pairs = part.sum_over_step(scalar((), matches.joined)) if union else scalar((), part.targets)
        groups.append(_Group(*_with_encoder(outputs), first, own, union or own, boxes, pairs))
        terms.append(self._terms(outputs, targets, groups[-1]))
        if self._bins:
            for group, each in zip(groups, terms, strict=True):
                each["ddf"] = self._distillation(outputs, group, each.pop("overlap"), pairs, part.images)
        return {name: _WEIGHTS[name] * torch.cat([each[name] for each in terms]) for name in terms[0]}

    def _terms(self, outputs: Outputs, targets: Targets, group: _Group) -> dict[str, Tensor]:
        """The losses of a group without ddf; for D-FINE also `overlap`, the IoU of pairs in each layer."""
        image, query, target = group.learnt
        sets = torch.arange(group.logits.shape[1], device=image.device)[:, None]
        predicted, truth = group.boxes[image, sets, query], targets.boxes[image, target]
        overlap, generalized = overlaps(predicted, truth)
        pairs = group.pairs.clamp(min=1)
        terms = {
            "vfl": self._varifocal(targets, group, sets, overlap.detach()),
            "bbox": (predicted - truth).abs().sum((1, 2)) / pairs,
            "giou": (1 - generalized).sum(1) / pairs,
        }
        if outputs.corners is not None and outputs.references is not None:
            layers = sets[: outputs.corners.shape[1]]
            # The first set is before the first layer.
            terms["overlap"] = overlap[1 : 1 + len(layers)].detach()
            place = query + group.first
            sides = outputs.corners[image, layers, place].unflatten(-1, (4, -1))
            references = outputs.references[image, 0, place[0]].detach()
            values = _bin_values(self._bins, self._scale, references.dtype, references.device)
            centre, box = references[:, :2], corners(truth[0])
            outward = torch.cat([centre - box[:, :2], box[:, 2:] - centre], dim=1)
            distance = outward / (references[:, 2:].repeat(1, 2) / self._scale + 1e-16) - self._scale / 2
            # The bins on both sides of the true distances, and their shares: both [P, 4, 2].
            left = (torch.searchsorted(values, distance, right=True) - 1).clamp(0, self._bins - 1)
            part = ((distance - values[left]) / (values[left + 1] - values[left])).clamp(0, 1)
            index, share = torch.stack([left, left + 1], dim=-1), torch.stack([1 - part, part], dim=-1)
            chance = F.log_softmax(sides, dim=-1).take_along_dim(index[None], dim=-1)
            terms["fgl"] = -((chance * share).sum((-1, -2)) * terms["overlap"]).sum(1) / pairs
        return terms

    def _varifocal(self, targets: Targets, group: _Group, sets: Tensor, overlap: Tensor) -> Tensor:
        """Varifocal loss (arXiv:2008.13367) of each set; `overlap` [S, P] is of the pairs for boxes."""
        image, query, target = group.own
        if group.learnt is not group.own:
            with torch.no_grad():
                predicted, truth = group.boxes[image, sets, query], targets.boxes[image, target]
                overlap, _ = overlaps(predicted, truth)
        place = (image, sets, query, targets.labels[image, target])
        weight = _ALPHA * group.logits.detach().sigmoid() ** 2
        if targets.verified is not None:
            weight = weight * targets.verified[:, None, None]
        weight[place] = overlap
        goal = torch.zeros_like(weight)
        goal[place] = overlap
        each = F.binary_cross_entropy_with_logits(group.logits, goal, weight, reduction="none")
        return each.sum((0, 2, 3)) / group.targets

    def _distillation(
        self, outputs: Outputs, group: _Group, overlap: Tensor, pairs: Tensor, images: int
    ) -> Tensor:
        """Divergence of each layer but the last from the last layer's distributions, [L - 1].

        A mean over matched sides and one over the others, weighted by the roots of their numbers among the
        queries without noise, also for the denoising queries. `overlap` is [L, P]; `pairs` counts the pairs
        of the queries without noise in the global batch of so many `images`.
        """
        assert outputs.corners is not None
        queries, others = group.logits.shape[2], outputs.encoder_logits.shape[1]
        part = slice(group.first, group.first + queries)
        corners = outputs.corners[:, :, part].unflatten(-1, (4, -1)) / _TEMPERATURE
        own, last = F.log_softmax(corners[:, :-1], dim=-1), F.softmax(corners[:, -1:].detach(), dim=-1)
        divergence = F.kl_div(own, last.expand_as(own), reduction="none").sum((-1, -2))
        image, query, _ = group.learnt
        layers = torch.arange(own.shape[1], device=image.device)[:, None]
        confidence = outputs.logits[:, -1, part].detach().sigmoid().amax(-1)
        weight = confidence[:, None].repeat(1, len(layers), 1)
        weight[image, layers, query] = overlap[:-1]
        matched = torch.zeros_like(confidence, dtype=torch.bool)
        matched[image, query[0]] = True
        roots = pairs.sqrt(), (images * others - pairs).sqrt()
        share = torch.where(matched, roots[0] / group.pairs, roots[1] / (images * queries - group.pairs))
        share = share[:, None] / (4 * (roots[0] + roots[1]))
        return _TEMPERATURE**2 * (divergence * weight * share).sum((0, 2))


def _with_encoder(outputs: Outputs) -> tuple[Tensor, Tensor]:
    """Logits and boxes of the queries without noise, the encoder's as the last set."""
    queries = outputs.encoder_logits.shape[1]
    return (
        torch.cat([outputs.logits[:, :, -queries:], outputs.encoder_logits[:, None]], dim=1),
        torch.cat([outputs.boxes[:, :, -queries:], outputs.encoder_boxes[:, None]], dim=1),
    )


@functools.cache
def _bin_values(bins: int, scale: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The distance of each bin, [bins + 1]: W(n) of D-FINE's paper."""
    bound = _UP * scale
    inner = (bound + 1) ** (torch.arange(1, bins // 2, dtype=torch.float64) * 2 / (bins - 2)) - 1
    ends = torch.tensor([2 * bound], dtype=torch.float64)
    return torch.cat([-ends, -inner.flip(0), 0 * ends, inner, ends]).to(device, dtype)


def at_least_fp32(values: Tensor) -> Tensor:
    """The same values in fp32 or fp64."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


@torch.no_grad()
def costs(logits: Tensor, boxes: Tensor, targets: Tensor, labels: Tensor) -> Tensor:
    """Cost of each pair of query and target, [B, S, Q, M], as D-FINE's and RT-DETRv2's `HungarianMatcher`.

    Predictions are `logits` [B, S, Q, C] and `boxes` [B, S, Q, 4]; `targets` [B, M, 4] have `labels` [B, M].
    """
    index = labels.clamp(min=0)[:, None, None].expand(*logits.shape[:3], -1)
    chance = logits.sigmoid().gather(3, index)
    negative = (1 - _COST_ALPHA) * chance**2 * -(1 - chance + 1e-8).log()
    positive = _COST_ALPHA * (1 - chance) ** 2 * -(chance + 1e-8).log()
    distance = (boxes[:, :, :, None] - targets[:, None, None]).abs().sum(-1)
    _, overlap = overlaps(boxes[:, :, :, None], targets[:, None, None])
    total = _CLASS_COST * (positive - negative) + _DISTANCE_COST * distance - _OVERLAP_COST * overlap
    # Values that are not finite match last; the loss reports them.
    worst = torch.finfo(total.dtype).max
    return torch.nan_to_num(total, nan=worst, posinf=worst, neginf=worst)


def assign(values: Tensor, counts: Sequence[int]) -> Pairs:
    """Assign queries to targets at the least cost, in each set of predictions.

    `values` are the costs [B, S, Q, M] on the host, with padding behind the `counts` of targets.
    """
    found = [
        np.array([linear_sum_assignment(one[:, :count]) for one in image])
        for image, count in zip(values.double().numpy(), counts, strict=True)
    ]
    query, target = np.concatenate(found, axis=2).swapaxes(0, 1)
    return Pairs(np.repeat(np.arange(len(found)), [each.shape[2] for each in found]), query, target)


def any_matched(pairs: Pairs) -> Pairs:
    """Each query that any set matches, with its most frequent target; of equally frequent ones the first.

    D-FINE's authors do not define the order of equally frequent targets.
    """
    image = np.broadcast_to(pairs.image, pairs.query.shape)
    each = np.stack([part.ravel() for part in (image, pairs.query, pairs.target)])
    found, times = np.unique(each, axis=1, return_counts=True)
    found = found[:, np.lexsort((found[2], -times, found[1], found[0]))]
    first = np.ones(found.shape[1], dtype=bool)
    first[1:] = (found[:2, 1:] != found[:2, :-1]).any(axis=0)
    return Pairs(found[0, first], found[None, 1, first], found[None, 2, first])


def to_device(groups: Sequence[Pairs | None], device: torch.device) -> list[Any]:
    """Copy pairs to a device at once."""
    arrays = [part for pairs in groups if pairs for part in pairs]
    joined = batch.to_device(torch.from_numpy(np.concatenate([part.ravel() for part in arrays])), device)
    sent = joined.split([part.size for part in arrays])
    shaped = iter([part.view(array.shape) for part, array in zip(sent, arrays, strict=True)])
    return [Pairs(*itertools.islice(shaped, 3)) if pairs else None for pairs in groups]


def corners(boxes: Tensor) -> Tensor:
    """x1 y1 x2 y2 of boxes [..., 4] given by centre and size; a negative size counts as 0."""
    half = boxes[..., 2:].clamp(min=0) / 2
    return torch.cat([boxes[..., :2] - half, boxes[..., :2] + half], dim=-1)


def overlaps(boxes: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """IoU and GIoU (arXiv:1902.09630) of pairs of boxes given by centre and size: [..., 4] -> [...]."""
    first, second = corners(boxes), corners(others)
    low, high = torch.maximum(first[..., :2], second[..., :2]), torch.minimum(first[..., 2:], second[..., 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    joined = area(first) + area(second) - shared
    outer = torch.maximum(first[..., 2:], second[..., 2:]) - torch.minimum(first[..., :2], second[..., :2])
    hull = outer.prod(-1)
    overlap = shared / joined
    return overlap, overlap - (hull - joined) / hull
