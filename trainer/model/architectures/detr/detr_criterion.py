"""The losses of D-FINE and RT-DETRv2: transformers' own, on slices of a step's global batch.

Two things are ours. What a loss is divided by is counted over the global batch, so that slices of any size
and number add up to the same gradient. And all layers are matched at once (`hungarian`).
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DFineConfig, RTDetrV2Config
from transformers.loss.loss_d_fine import DFineLoss, bbox2distance
from transformers.loss.loss_for_object_detection import box_iou
from transformers.loss.loss_rt_detr import RTDetrLoss

from trainer.model.architectures.detr import hungarian
from trainer.model.architectures.detr.denoising import Denoising

_TEMPERATURE = 5.0
"""Of the distributions that earlier layers learn from the last one (Peng et al. 2024, GO-LSD)."""

_ABSENT = -100.0
"""A logit whose chance, squared, is nothing in fp32."""


class Outputs(NamedTuple):
    """What a network gives in training. L layers, B images, Q queries, the first D denoising's."""

    logits: Tensor
    """[B, L, Q, C]; of D-FINE one more than layers, the first before the first layer's refinement."""
    boxes: Tensor
    """[B, L, Q, 4] centre and size, relative to the image; of D-FINE as many as logits."""
    corners: Tensor | None
    """[B, L, Q, 4 * bins] distributions of the sides' distances; None for RT-DETRv2."""
    references: Tensor | None
    """[B, L, Q, 4] the boxes that the distances are from; None for RT-DETRv2."""
    encoder_logits: Tensor
    """[B, Q - D, C] of the places that became queries."""
    encoder_boxes: Tensor
    """[B, Q - D, 4] of the same."""

    def exact(self) -> "Outputs":
        """The same in fp32 or more."""
        corners, references = (
            part if part is None else at_least_fp32(part) for part in (self.corners, self.references)
        )
        return Outputs(
            at_least_fp32(self.logits), at_least_fp32(self.boxes), corners, references,
            at_least_fp32(self.encoder_logits), at_least_fp32(self.encoder_boxes),
        )  # fmt: skip


class Targets(NamedTuple):
    """Targets of a slice of the global batch."""

    boxes: Tensor
    """[B, M, 4] centre and size, relative to the image."""
    labels: Tensor
    """int64 [B, M], PADDING where a row is padding."""
    counts: list[int]
    """Targets of each image, which come first in its rows."""
    mean: Tensor
    """Targets of an image on average over the global batch, a scalar."""
    images: int
    """Images of the global batch."""
    verified: Tensor | None = None
    """bool [B, C], the classes of each image that may be negatives; None is all of them."""


class _Set(NamedTuple):
    """One set of predictions with what its losses are divided by."""

    outputs: dict[str, Tensor]
    indices: hungarian.Assigned
    boxes: Tensor
    """Targets that the set has to learn, and its share of the step's."""
    matched: Tensor
    """Matched queries of this slice, by the mean of the global batch."""
    teacher: tuple[Tensor, Tensor] | None
    """Corners and logits of the last layer."""


class Criterion:
    """Computes the losses of one kind of network; holds no weights."""

    def __init__(self, config: DFineConfig | RTDetrV2Config) -> None:
        self._distributions = isinstance(config, DFineConfig)
        self._losses: Any = DFineLoss(config) if self._distributions else RTDetrLoss(config)
        self._weights = hungarian.Weights(
            config.matcher_class_cost, config.matcher_bbox_cost, config.matcher_giou_cost,
            config.matcher_alpha, config.matcher_gamma,
        )  # fmt: skip
        self._bins = config.max_num_bins if self._distributions else 0

    def __call__(self, outputs: Outputs, targets: Targets, noise: Denoising | None) -> dict[str, Tensor]:
        """Losses by name, each the sum over the layers: vfl, bbox, giou, and of D-FINE fgl and ddf.

        As means over the images of this slice: times its share of the global batch they add up to the step's.

        Args:
            outputs: of the network, in fp32 or more.
            targets: of this slice.
            noise: its denoising queries, or None.
        """
        self._losses.to(outputs.logits.device, outputs.logits.dtype)
        sets = self._predictions(outputs, noise)
        logits, boxes = (torch.stack([part[key] for part in sets]) for key in ("logits", "pred_boxes"))
        arriving = hungarian.start(
            hungarian.costs(logits, boxes, targets.boxes, targets.labels, self._weights)
        )
        count = len(targets.counts)
        # The device computes these while the costs travel and are assigned.
        losses = self._denoising(outputs, targets, noise) if noise else {}
        assigned = hungarian.assign(arriving(), targets.counts, outputs.logits.device)
        matched = targets.mean * count
        total = targets.mean.clamp(min=1 / targets.images) * count
        teacher = self._teacher(outputs, noise)
        for number, (part, indices) in enumerate(zip(sets, assigned, strict=True)):
            # The first set is the last layer, which is the others' teacher and not its own.
            whole = _Set(part, indices, total, matched, teacher if number else None)
            self._add(losses, whole, targets)
        return losses

    def _predictions(self, outputs: Outputs, noise: Denoising | None) -> list[dict[str, Tensor]]:
        """The last layer, the others, and the encoder's, of the queries that no noise is in."""
        first = noise.labels.shape[1] if noise else 0
        layers = self._layers(outputs, slice(first, None), last=False)
        encoder = {"logits": outputs.encoder_logits, "pred_boxes": self._clamped(outputs.encoder_boxes)}
        final = {
            "logits": outputs.logits[:, -1, first:],
            "pred_boxes": self._clamped(outputs.boxes[:, -1, first:]),
        }
        return [final, *layers, encoder]

    def _layers(self, outputs: Outputs, queries: slice, *, last: bool) -> list[dict[str, Tensor]]:
        """Predictions of each layer as transformers pairs them, with or without the last."""
        end = None if last else -1
        parts = {"logits": outputs.logits[:, :end, queries], "pred_boxes": outputs.boxes[:, :end, queries]}
        parts["pred_boxes"] = self._clamped(parts["pred_boxes"])
        if outputs.corners is not None and outputs.references is not None:
            parts["pred_corners"] = outputs.corners[:, :end, queries]
            parts["ref_points"] = outputs.references[:, :end, queries]
        count = min(part.shape[1] for part in parts.values())
        return [{key: part[:, number] for key, part in parts.items()} for number in range(count)]

    def _clamped(self, boxes: Tensor) -> Tensor:
        return boxes.clamp(min=0, max=1) if self._distributions else boxes

    def _teacher(self, outputs: Outputs, noise: Denoising | None) -> tuple[Tensor, Tensor] | None:
        if outputs.corners is None:
            return None
        first = noise.labels.shape[1] if noise else 0
        return outputs.corners[:, -1, first:], outputs.logits[:, -1, first:]

    def _denoising(self, outputs: Outputs, targets: Targets, noise: Denoising) -> dict[str, Tensor]:
        queries = slice(0, noise.labels.shape[1])
        layers = self._layers(outputs, queries, last=True)
        matched = targets.mean * len(targets.counts) * noise.groups
        boxes = targets.mean.clamp(min=1 / targets.images) * len(targets.counts) * noise.groups
        teacher = None
        if outputs.corners is not None:
            teacher = outputs.corners[:, -1, queries], outputs.logits[:, -1, queries]
        losses: dict[str, Tensor] = {}
        for number, part in enumerate(layers):
            own = outputs.corners is not None and number == outputs.corners.shape[1] - 1
            self._add(losses, _Set(part, noise.matched, boxes, matched, None if own else teacher), targets)
        # Without a box in the whole step there is nothing to reconstruct.
        some = (targets.mean > 0).to(outputs.logits.dtype)
        return {name: loss * some for name, loss in losses.items()}

    def _add(self, losses: dict[str, Tensor], part: _Set, targets: Targets) -> None:
        """Add one set's losses."""
        upstream = [
            {"class_labels": labels[:count], "boxes": boxes[:count]}
            for labels, boxes, count in zip(targets.labels, targets.boxes, targets.counts, strict=True)
        ]
        for kind in ("vfl", "boxes"):
            outputs = self._known(part, targets) if kind == "vfl" else part.outputs
            values = self._losses.get_loss(kind, outputs, upstream, part.indices, part.boxes)
            self._weighed(losses, values)
        if "pred_corners" in part.outputs:
            self._weighed(losses, self._local(part, upstream))

    def _known(self, part: _Set, targets: Targets) -> dict[str, Tensor]:
        """The outputs, with what cannot be judged as sure to be absent: no loss and no gradient comes of it.

        A negative weighs as much as it is believed, which transformers' loss reads from the logit.
        """
        if targets.verified is None:
            return part.outputs
        logits = part.outputs["logits"]
        known = targets.verified[:, None].expand_as(logits).clone()
        image, query = self._losses._get_source_permutation_idx(part.indices)
        matched = [labels[index] for labels, (_, index) in zip(targets.labels, part.indices, strict=True)]
        known[image, query, torch.cat(matched)] = True
        return {**part.outputs, "logits": torch.where(known, logits, _ABSENT)}

    def _weighed(self, losses: dict[str, Tensor], values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            short = name.removeprefix("loss_")
            losses[short] = losses.get(short, 0) + value * self._losses.weight_dict[name]

    def _local(self, part: _Set, targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Losses of the distributions: of the matched against the truth, of all against the last layer's."""
        outputs, bins = part.outputs, self._bins + 1
        place = self._losses._get_source_permutation_idx(part.indices)
        truth = hungarian.corners(
            torch.cat([each["boxes"][index] for each, (_, index) in zip(targets, part.indices, strict=True)])
        )
        with torch.no_grad():
            learnt = bbox2distance(
                outputs["ref_points"][place], truth, self._bins, self._losses.reg_scale, self._losses.up
            )
            overlaps = torch.diag(box_iou(hungarian.corners(outputs["pred_boxes"][place]), truth)[0])
        own = outputs["pred_corners"][place].reshape(-1, bins)
        losses = {
            "loss_fgl": self._losses.unimodal_distribution_focal_loss(
                own, *learnt, overlaps.repeat_interleave(4), avg_factor=part.boxes
            )
        }
        if part.teacher:
            losses["loss_ddf"] = self._distillation(part, place, overlaps)
        return losses

    def _distillation(self, part: _Set, place: tuple[Tensor, Tensor], overlaps: Tensor) -> Tensor:
        """Divergence from the last layer's distributions.

        A mean over the matched sides and one over the rest, weighed by the roots of their numbers: both
        numbers are the global batch's, by this slice's share.
        """
        assert part.teacher
        corners, logits = part.teacher
        weights = logits.detach().sigmoid().amax(dim=-1)
        weights[place] = overlaps.to(weights.dtype)
        matched = torch.zeros_like(weights, dtype=torch.bool)
        matched[place] = True
        bins = self._bins + 1
        own, last = (
            sides.unflatten(-1, (4, bins)) / _TEMPERATURE
            for sides in (part.outputs["pred_corners"], corners.detach())
        )
        divergence = F.kl_div(F.log_softmax(own, dim=-1), F.softmax(last, dim=-1), reduction="none")
        each = weights * _TEMPERATURE**2 * divergence.sum(dim=(-1, -2))
        positive = 4 * part.matched
        negative = 4 * math.prod(matched.shape) - positive
        tiny = torch.finfo(each.dtype).tiny
        positive, negative = (number.clamp(min=tiny).sqrt() for number in (positive, negative))
        sums = (each * matched).sum() / positive + (each * ~matched).sum() / negative
        return sums / (positive + negative)


def at_least_fp32(values: Tensor) -> Tensor:
    """The same in fp32, or in fp64 where it is."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
