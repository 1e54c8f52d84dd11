"""An optimizer step on one rank, from batches to updated weights. The CPU never waits for the GPU."""

import contextlib
import functools
import logging
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.base.errors import TrainingError
from trainer.base.precision import autocast
from trainer.config.schema import TrainConfig
from trainer.data.batch import Batch, copy_to_host
from trainer.launching.distributed import World, all_reduce_sum, gather, start_all_reduce_max
from trainer.model import fused_functions
from trainer.model.architecture import Architecture
from trainer.model.global_batch import BatchContext, batch_contexts
from trainer.training.optim import clip_gradient, learning_rate, set_learning_rate
from trainer.training.schedule import Schedule
from trainer.training.state import TrainState

_LOG = logging.getLogger("compile")


class TrainStep:
    """Runs optimizer steps over the forward passes of this rank. Each step is a collective."""

    def __init__(
        self,
        state: TrainState,
        model: nn.Module,
        config: TrainConfig,
        *,
        schedule: Schedule,
        global_batch: int,
        keeps_gradients: bool = False,
    ) -> None:
        """`model` is `state.wrap_ddp()`; for `keeps_gradients` see `allocate_gradients`."""
        self._state, self._model, self._config = state, model, config
        self._schedule, self._global_batch = schedule, global_batch
        self._holds_gradients = keeps_gradients
        self._pending: tuple[int, list[int], Callable[[], Tensor]] | None = None
        """Number and image ids of the last step, and the function that `start_flag_exchange` returned."""

    def __call__(self, batches: Sequence[Batch], *, stop: bool = False) -> tuple[Tensor, bool]:
        """Run one step, with one forward pass for each batch.

        Returns [2 + losses] on the device (total loss, each loss of the detector, gradient norm; their means
        over the ranks are those of the global batch), and whether any rank was asked to `stop`. Raises
        TrainingError if the previous step was skipped because its loss or gradient was not finite.
        """
        state = self._state
        lr = learning_rate(self._schedule.position, self._schedule.steps, self._config)
        set_learning_rate(state.optimizer, lr)
        losses = torch.zeros(len(state.detector.loss_names), device=state.world.device)
        state.statistics.begin()
        for number, (batch, context) in enumerate(zip(batches, self._contexts_for(batches), strict=True), 1):
            # Gradients are exchanged only in the last backward pass of a step.
            local = isinstance(self._model, DistributedDataParallel) and number < len(batches)
            with self._model.no_sync() if local else contextlib.nullcontext():  # type: ignore[operator]
                named = self.losses(batch, context)
                values = [named[name] for name in state.detector.loss_names]
                # Losses are means over this batch, and gradients are averaged over the ranks. With this
                # weight the sum is the mean over the global batch, even if the batches differ in size.
                share = len(batch.image_ids) * state.world.size / self._global_batch
                total = functools.reduce(operator.add, values) * share
                # The factor is 1, or NaN if the loss is not finite. NaN spreads to the gradients of all
                # ranks, so all optimizers skip the step.
                state.scaler.scale(total * (1 + 0 * total.detach())).backward()
            state.statistics.add_pass()
            losses += torch.stack([loss.detach() for loss in values]) * share
        state.statistics.update()
        state.scaler.unscale_(state.optimizer)
        norm = clip_gradient(state.parameters, self._config.clip_norm).float()[None]
        checked = torch.cat([losses, norm])
        if state.scaler.is_enabled():
            # The scaler handles fp16 overflows: it skips the step and lowers the scale.
            checked = torch.cat([losses, losses.new_zeros(1)])
            norm = torch.where(norm.isfinite(), norm, 0.0)
        # One all-reduce shares non-finite losses, stop requests and the elapsed time. Its result is read
        # during the next step, so that the CPU does not wait.
        wait_for_flags = start_flag_exchange(
            state.optimizer, checked, (stop, self._schedule.measure_elapsed_share()), state.world
        )
        stopping = self.wait()
        ids = [image_id for batch in batches for image_id in batch.image_ids]
        self._pending = state.step + 1, ids, wait_for_flags
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad(set_to_none=not self._holds_gradients)
        if state.ema:
            state.ema.update(state.step)
        state.step += 1
        state.samples += self._global_batch
        return torch.cat([losses.sum()[None], losses, norm]), stopping

    def losses(self, batch: Batch, context: BatchContext | None = None) -> Mapping[str, Tensor]:
        """Return the mean losses of a batch; without a `context`, the batch is the whole global batch."""
        more: dict[str, Any] = {}
        if self._state.detector.needs_batch_context:
            alone = World(0, 1, self._state.world.device)
            more["context"] = context or self._make_contexts([batch], len(batch.image_ids), alone)[0]
        with autocast(self._state.world.device, self._config.precision):
            losses: Mapping[str, Tensor] = self._model(
                batch.images, batch.boxes, batch.labels, batch.color, **more
            )
        return losses

    def wait(self) -> bool:
        """Wait for the last step; return whether any rank was asked to stop.

        Raises TrainingError on every rank if the step was skipped.
        """
        if self._pending is None:
            return False
        (step, own_ids, wait_for_flags), self._pending = self._pending, None
        broken, stopping, time_share, *own_values = wait_for_flags().tolist()
        self._schedule.set_elapsed_share(time_share)
        if not broken:
            return bool(stopping)
        world, titles = self._state.world, [*self._state.detector.loss_names, "norm of the gradient"]
        reports = []
        for rank, values, ids in gather((world.rank, own_values, own_ids), world):
            if not all(map(math.isfinite, values)):
                numbers = [f"{title} {value:g}" for title, value in zip(titles, values, strict=False)]
                reports.append(f"rank {rank}: {', '.join(numbers)}, image ids {ids}")
        raise TrainingError(
            f"loss or gradient not finite at step {step} of {self._schedule.expected_steps}: "
            + "; ".join(reports),
            fix="lower train.lr, raise train.warmup_steps, set train.clip_norm or train.precision=fp32, "
            "or check these images; the step was not applied",
        )

    def _make_contexts(self, batches: Sequence[Batch], image_count: int, world: World) -> list[BatchContext]:
        return batch_contexts(batches, self._config.seed, self._state.step, image_count, world)

    def _contexts_for(self, batches: Sequence[Batch]) -> Sequence[BatchContext | None]:
        """Return the context of each batch (a collective), or None for each if the detector needs none."""
        state, detector = self._state, self._state.detector
        if not detector.needs_batch_context:
            return [None] * len(batches)
        contexts = self._make_contexts(batches, self._global_batch, state.world)
        if len(batches) == 1 or not detector.needs_global_matches:
            return contexts
        with torch.no_grad(), autocast(state.world.device, self._config.precision):
            matches = [
                detector.match_targets(batch.images, batch.boxes, batch.labels, batch.color, context)
                for batch, context in zip(batches, contexts, strict=True)
            ]
            total = all_reduce_sum(torch.stack([count for _, count in matches]).sum(), state.world)
        return [
            context._replace(matches=matched, pair_count=total)
            for context, (matched, _) in zip(contexts, matches, strict=True)
        ]


def start_flag_exchange(
    optimizer: torch.optim.Optimizer, losses: Tensor, values: Sequence[float], world: World
) -> Callable[[], Tensor]:
    """Share flags of all ranks, and skip the optimizer's next step if a loss is not finite. A collective.

    A fused optimizer reads the flag of `losses` [n] on the device. The returned function waits, and returns
    whether a loss is not finite on any rank, the maximum of each of `values`, and this rank's losses.
    """
    flags = torch.zeros(1 + len(values), device=losses.device)
    flags[0] = torch.isfinite(losses).all().logical_not()
    for flag, value in zip(flags[1:], values, strict=True):
        flag.fill_(float(value))  # A copy would wait for the device.
    # torch's protocol between a gradient scaler and a fused optimizer; an fp16 scaler overwrites the flags.
    optimizer.found_inf = flags[0].clone()  # type: ignore[attr-defined]
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    reduced, own_losses = start_all_reduce_max(flags, world), losses.detach()
    if flags.device.type == "cuda":
        # The copy uses the same stream, so it can be queued immediately.
        return copy_to_host(torch.cat([reduced(), own_losses]))

    def wait() -> Tensor:
        return copy_to_host(torch.cat([reduced(), own_losses]))()

    return wait


def compile_detector(detector: Architecture, mode: str, world: World, sizes: int = 1) -> bool:
    """Apply `train.compile` as far as the machine supports it, and log the result.

    Compilation happens in the first steps. Without a GPU, "graphs" means "model". `sizes` is the number of
    input sizes. Returns whether the network runs as CUDA graphs; see `allocate_gradients`.
    """
    supported = fused_functions.configure(mode != "off", world.device, log_result=world.is_main)
    if not supported or mode not in ("model", "graphs"):
        return False
    if sizes > 1:
        import torch._dynamo  # Importing it takes seconds.

        # There is one graph per shape, and batch sizes within a step may differ by one.
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, 2 * sizes)
    graphs = mode == "graphs" and world.device.type == "cuda"
    if not detector.compile_network("reduce-overhead" if graphs else "default"):
        if world.is_main:
            _LOG.warning("the network of %s is not compiled: it does not support compilation", detector.title)
        return False
    if world.is_main:
        _LOG.info("the network is compiled%s", ", with CUDA graphs" if graphs else "")
    return graphs


def allocate_gradients(parameters: Sequence[Tensor]) -> None:
    """Allocate all gradients, for steps of several passes with CUDA graphs.

    Otherwise autograd stores gradients in the graph's memory, which the graph's next run overwrites
    (pytorch/pytorch issue 169545). The optimizer must then zero gradients instead of setting them to None.
    """
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
