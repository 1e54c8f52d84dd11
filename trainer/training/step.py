"""An optimiser step on one rank; nothing in it waits for the device."""

import contextlib
import functools
import math
import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from trainer.base.errors import ConfigError, TrainingError
from trainer.base.precision import autocast
from trainer.config.schema import TrainConfig
from trainer.data.batch import Batch
from trainer.launching.distributed import World, gather, largest, summed
from trainer.model.global_batch import Part, parts
from trainer.training.optim import gradient_norm, learning_rate, set_learning_rate
from trainer.training.state import TrainState

_PendingCopy = tuple[Tensor, torch.cuda.Event | None]
"""Values on the host, and the event that marks the copy as complete."""


class TrainStep:
    """One step of the optimiser, over the forward passes of this rank. Steps are collectives."""

    def __init__(
        self,
        state: TrainState,
        model: nn.Module,
        config: TrainConfig,
        *,
        steps: int,
        global_batch: int,
        holds_gradients: bool = False,
    ) -> None:
        """Prepare.

        Args:
            state: what the steps change.
            model: the detector as the ranks share it, see `TrainState.distributed`.
            config: the training's.
            steps: of the whole training, which the learning rate follows.
            global_batch: images of all ranks in a step.
            holds_gradients: whether the gradients' memory stays from step to step.
        """
        self._state, self._model, self._config = state, model, config
        self._steps, self._global_batch = steps, global_batch
        self._holds_gradients = holds_gradients
        self._guard = StepGuard(state.optimizer, state.world)

    def __call__(self, batches: Sequence[Batch], *, stop: bool = False) -> tuple[Tensor, bool]:
        """Do one step, with one forward pass for each batch.

        Returns:
            [2 + losses] on the device: total, each loss of the detector, norm of the gradient, whose
            means over the ranks are those of the global batch; and whether any rank was asked to `stop`.

        Raises:
            TrainingError: a loss or gradient of the step before was not finite; the weights are those
                before it.
        """
        state = self._state
        set_learning_rate(state.optimizer, learning_rate(state.step, self._steps, self._config))
        losses = torch.zeros(len(state.detector.loss_names), device=state.world.device)
        for turn, (batch, part) in enumerate(zip(batches, self._survey(batches), strict=True)):
            losses += self._forward_backward(batch, part, last=turn == len(batches) - 1)
        state.scaler.unscale_(state.optimizer)
        norm = gradient_norm(state.parameters, self._config.clip_norm).float()[None]
        checked = torch.cat([losses, norm])
        if state.scaler.is_enabled():
            # The scaler handles fp16 overflows: it skips the step and lowers the scale.
            checked = torch.cat([losses, losses.new_zeros(1)])
            norm = torch.where(norm.isfinite(), norm, 0.0)
        # One all-reduce tells all ranks of losses that are not finite on any of them. It is read a
        # step later: the host never waits for the device, nor a rank for one that is slower just now.
        ids = [image_id for batch in batches for image_id in batch.image_ids]
        stopping = self._accept(self._guard.judge(state.step + 1, checked, ids, stopping=stop))
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad(set_to_none=not self._holds_gradients)
        if state.ema:
            state.ema.update(state.step)
        state.step += 1
        state.samples += self._global_batch
        return torch.cat([losses.sum()[None], losses, norm]), stopping

    def losses(self, batch: "Batch", part: Part | None = None) -> Mapping[str, Tensor]:
        """The forward pass: means over the images of this batch.

        Args:
            batch: images and targets.
            part: what it is of the step's global batch, for detectors that need it; None is all of it.
        """
        more: dict[str, Any] = {}
        if self._state.detector.needs_part:
            alone = World(0, 1, self._state.world.device)
            more["part"] = part or self._parts([batch], len(batch.image_ids), alone)[0]
        if batch.verified is not None:
            more["verified"] = batch.verified
        with autocast(self._state.world.device, self._config.precision):
            losses: Mapping[str, Tensor] = self._model(
                batch.images, batch.boxes, batch.labels, batch.color, **more
            )
        return losses

    def _parts(self, batches: Sequence[Batch], images: int, world: World) -> list[Part]:
        return parts(batches, self._config.seed, self._state.step, images, world)

    def _survey(self, batches: Sequence[Batch]) -> Sequence[Part | None]:
        """What each batch is of the step's global batch, if the detector needs it. A collective then."""
        state = self._state
        detector = state.detector
        if not detector.needs_part:
            return [None] * len(batches)
        whole = self._parts(batches, self._global_batch, state.world)
        if len(batches) == 1 or not detector.needs_survey:
            return whole
        statistics = [buffer.clone() for buffer in detector.buffers()]
        with torch.no_grad(), autocast(state.world.device, self._config.precision):
            found = [
                detector.survey(batch.images, batch.boxes, batch.labels, batch.color, part)
                for batch, part in zip(batches, whole, strict=True)
            ]
            for buffer, before in zip(detector.buffers(), statistics, strict=True):
                buffer.copy_(before)
            count = summed(torch.stack([count for _, count in found]).sum(), state.world)
        return [
            part._replace(surveyed=one, counted=count) for part, (one, _) in zip(whole, found, strict=True)
        ]

    def settle(self) -> bool:
        """Wait for the last step, as before its state is saved; whether any rank was asked to stop.

        Raises:
            TrainingError: as for a step.
        """
        return self._accept(self._guard.settle())

    def _forward_backward(self, batch: "Batch", part: Part | None, *, last: bool) -> Tensor:
        # Gradients are exchanged in the last backward pass of a step only.
        waits = isinstance(self._model, DistributedDataParallel) and not last
        with self._model.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
            named = self.losses(batch, part)
            losses = [named[name] for name in self._state.detector.loss_names]
            # A mean over these images. The gradients of the ranks are averaged, so that its share
            # in the mean over the global batch is this, however uneven the slices are.
            share = len(batch.image_ids) * self._state.world.size / self._global_batch
            total = functools.reduce(operator.add, losses) * share
            # Times 1, or nan where it is not finite: then all gradients are nan, and by their exchange
            # those of all ranks, whose optimisers leave out the step without a word between them.
            self._state.scaler.scale(total * (1 + 0 * total.detach())).backward()
        return torch.stack([loss.detach() for loss in losses]) * share

    def _accept(self, verdict: "Verdict | None") -> bool:
        """Go on, or stop every rank where the optimiser left out a step, naming it and its images."""
        if not verdict or not verdict.broken:
            return bool(verdict and verdict.stopping)
        world = self._state.world
        reports = gather((world.rank, verdict.losses, verdict.image_ids), world)
        raise _not_finite(f"step {verdict.step} of {self._steps}", self._state.detector.loss_names, reports)


@dataclass(frozen=True)
class Verdict:
    """The common result of all ranks about a finished step."""

    step: int
    """Number of the step, as given to `StepGuard.judge`."""
    losses: list[float]
    """This rank's losses."""
    image_ids: list[int]
    """Images of this rank in that step."""
    broken: bool
    """Whether any rank had a loss that is not finite: the optimiser left the weights alone."""
    stopping: bool
    """Whether any rank was asked to stop."""


class StepGuard:
    """Prevents the update of a step whose loss is not finite, without waiting for the device.

    A fused optimiser reads a flag on the device and skips its update. All ranks decide alike: a value that is
    not finite on one of them reaches the gradients of all. The host reads the result, and whether any rank
    was asked to stop, during the next step, and so never blocks the device.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, world: World) -> None:
        self._optimizer, self._world = optimizer, world
        self._pending: deque[tuple[int, list[int], Callable[[], _PendingCopy]]] = deque()

    def judge(self, step: int, losses: Tensor, image_ids: list[int], *, stopping: bool) -> Verdict | None:
        """Judge a step between its backward pass and the optimiser. A collective, which waits for no rank.

        Args:
            step: its number.
            losses: [n] of this rank, on the device; where ranks share gradients, not finite on all ranks
                if it is not finite on one.
            image_ids: images of this rank.
            stopping: whether this process was asked to stop.

        Returns:
            The verdict on the step before, None at first. All ranks get the same `broken` and
            `stopping` at the same step.
        """
        flags = torch.zeros(2, device=losses.device)
        flags[0] = torch.isfinite(losses).all().logical_not()
        flags[1].fill_(float(stopping))
        # torch's protocol between a gradient scaler and a fused optimiser; with a scaler (fp16) the
        # scaler sets these itself.
        self._optimizer.found_inf = flags[0].clone()  # type: ignore[attr-defined]
        self._optimizer.grad_scale = None  # type: ignore[attr-defined]
        message, own_losses = largest(flags, self._world), losses.detach()
        if flags.device.type == "cuda":
            # In the same stream: the message is tiny, and the copy can start at once.
            sent = _to_host(torch.cat([message(), own_losses]))
            self._pending.append((step, image_ids, lambda: sent))
        else:
            self._pending.append((step, image_ids, lambda: _to_host(torch.cat([message(), own_losses]))))
        return self._next() if len(self._pending) > 1 else None

    def settle(self) -> Verdict | None:
        """The verdict on the last step, before its state is saved; None if it has been given."""
        return self._next() if self._pending else None

    def _next(self) -> Verdict:
        step, image_ids, arriving = self._pending.popleft()
        values, copied = arriving()
        if copied:
            copied.synchronize()
        broken, stopping, *losses = values.tolist()
        return Verdict(step, losses, image_ids, bool(broken), bool(stopping))


def _not_finite(
    place: str, names: Sequence[str], reports: Sequence[tuple[int, list[float], list[int]]]
) -> TrainingError:
    """Build the error for a step that was not applied.

    Args:
        place: the step.
        names: of the losses.
        reports: of every rank its number; its losses and the gradient's norm; images.
    """
    titles = [*names, "norm of the gradient"]
    bad = [report for report in reports if not all(map(math.isfinite, report[1]))]
    return TrainingError(
        f"loss or gradient not finite at {place}: "
        + "; ".join(
            f"rank {rank}: "
            + ", ".join(f"{title} {value:g}" for title, value in zip(titles, values, strict=False))
            + f", image ids {ids}"
            for rank, values, ids in bad
        ),
        fix="lower train.lr, raise train.warmup_steps, set train.clip_norm or train.precision=fp32, "
        "or look at these images; the step was not applied",
    )


def _to_host(values: Tensor) -> _PendingCopy:
    """Start a copy to pinned memory; the event marks its completion."""
    if values.device.type != "cuda":
        return values, None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return host, copied


def compress_gradients(model: nn.Module) -> None:
    """Let ranks exchange gradients in bf16: half the bytes, for networks of 100 Gbit/s and less.

    Raises:
        ConfigError: this build of torch cannot: it requires NCCL, whatever the backend.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    try:
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    except TypeError as error:
        raise ConfigError(
            f"train.gradient_compression: torch {torch.__version__} cannot send bf16: {error}",
            fix="set train.gradient_compression=false, or install torch built for CUDA",
        ) from None
