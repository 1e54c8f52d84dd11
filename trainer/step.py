"""What keeps a training step from waiting: a guard on the device, compilation, smaller messages."""

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from trainer import storage
from trainer.distributed import World, largest
from trainer.errors import ConfigError, TrainingError
from trainer.model import fusion
from trainer.model.detector import Detector

Compile = Literal["off", "loss", "model", "graphs"]
"""What torch.compile is used for: nothing; the loss; the network as well; that with CUDA graphs."""

_LOG = logging.getLogger("compile")


@dataclass(frozen=True)
class Verdict:
    """What the ranks found out together about a step that was done."""

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
    """Keeps a step with a loss that is not finite from the weights, without waiting for it.

    The ranks agree on the device; a fused optimiser reads the flag there and skips its update. The
    host reads it when the next step is on its way, and so never holds the device up.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, world: World) -> None:
        self._optimizer, self._world = optimizer, world
        self._pending: deque[tuple[int, list[int], Tensor, torch.cuda.Event | None]] = deque()

    def judge(self, step: int, losses: Tensor, image_ids: list[int], *, stopping: bool) -> Verdict | None:
        """Judge a step between its backward pass and the optimiser. A collective.

        Args:
            step: its number.
            losses: [n] of this rank, on the device.
            image_ids: images of this rank.
            stopping: whether this process was asked to stop.

        Returns:
            The verdict on the step before, None at first. All ranks get the same `broken` and
            `stopping` at the same step.
        """
        flags = torch.zeros(2, device=losses.device)
        flags[0] = torch.isfinite(losses).all().logical_not()
        flags[1].fill_(float(stopping))
        largest(flags, self._world)
        # torch's protocol between a gradient scaler and a fused optimiser, which a scaler, where
        # there is one (fp16), goes through itself.
        self._optimizer.found_inf = flags[0]  # type: ignore[attr-defined]
        self._optimizer.grad_scale = None  # type: ignore[attr-defined]
        self._pending.append((step, image_ids, *_to_host(torch.cat([flags, losses.detach()]))))
        return self._next() if len(self._pending) > 1 else None

    def settle(self) -> Verdict | None:
        """The verdict on the last step, before its state is saved; None if it has been given."""
        return self._next() if self._pending else None

    def _next(self) -> Verdict:
        step, image_ids, values, copied = self._pending.popleft()
        if copied:
            copied.synchronize()
        broken, stopping, *losses = values.tolist()
        return Verdict(step, losses, image_ids, bool(broken), bool(stopping))


def not_finite(place: str, reports: Sequence[tuple[int, list[float], list[int]]]) -> TrainingError:
    """The error for a step that the guard held back.

    Args:
        place: the step.
        reports: of every rank its number; classification and box loss and the gradient's norm; images.
    """
    bad = [report for report in reports if not all(map(math.isfinite, report[1]))]
    return TrainingError(
        f"loss or gradient not finite at {place}: "
        + "; ".join(
            f"rank {rank}: classification {values[0]:g}, boxes {values[1]:g}, "
            f"norm of the gradient {values[2]:g}, image ids {ids}"
            for rank, values, ids in bad
        ),
        fix="lower train.lr, raise train.warmup_steps, set train.clip_norm or train.precision=fp32, "
        "or look at these images; the step was not applied",
    )


def _to_host(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Start a copy to pinned memory; the event tells when it has arrived."""
    if values.device.type != "cuda":
        return values, None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return host, copied


def compile_detector(detector: Detector, mode: Compile, world: World) -> bool:
    """Compile what the configuration asks for, as far as the machine can; log what is done.

    Compilation itself happens in the first steps. The weights' names do not change.

    Args:
        detector: the network that is trained, on its device.
        mode: see `Compile`; "graphs" means "model" where there is no GPU.
        world: this process and its device; rank 0 logs.

    Returns:
        Whether the network runs as CUDA graphs: see `hold_gradients`.
    """
    if not fusion.choose(mode != "off", world.device, tell=world.is_main) or mode not in ("model", "graphs"):
        return False
    graphs = mode == "graphs" and world.device.type == "cuda"
    detector.compile_trunk("reduce-overhead" if graphs else "default")
    if world.is_main:
        _LOG.info("the network is compiled%s", ", with CUDA graphs" if graphs else "")
    return graphs


def hold_gradients(parameters: Sequence[Tensor]) -> None:
    """Give every weight a gradient in memory of its own, for steps of several passes with CUDA graphs.

    A graph leaves its gradients where its next run writes: autograd would take that memory for the
    gradient, and what one pass found would be lost to the next (pytorch/pytorch issue 169545). To a
    gradient that is there already, it adds. The optimiser has to zero it then instead of dropping it.
    """
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)


def load_compiled(uri: str) -> bool:
    """Take up what an earlier process of this run compiled, so that a restart need not; True if found.

    It is code, and is run: the folder must be as trusted as the image.
    """
    if not storage.exists(uri):
        return False
    if torch.compiler.load_cache_artifacts(storage.read_bytes(uri)) is None:
        _LOG.warning("what is in %s is no compiled code of this torch: compiling anew", uri)
        return False
    _LOG.info("took up compiled code from %s", uri)
    return True


def save_compiled(uri: str) -> bool:
    """Keep what this process has compiled for `load_compiled`; False if there is nothing."""
    saved = torch.compiler.save_cache_artifacts()
    if saved is None:
        return False
    storage.write_bytes(uri, saved[0])
    return True


def compress_gradients(model: nn.Module) -> None:
    """Let ranks exchange gradients in bf16: half the bytes, for networks of 100 Gbit/s and less.

    Raises:
        ConfigError: this build of torch cannot: it wants NCCL to be in it, whoever carries the messages.
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
