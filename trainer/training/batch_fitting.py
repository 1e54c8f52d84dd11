"""The most images of a forward pass that fit into a GPU's memory, found by trying.

The global batch stays what it is: with more images in a pass a step has fewer passes. All ranks try the same
numbers and take what fits on each of them. A run that resumes on as many GPUs of the same memory takes the
number that it had, so that it goes on bit for bit.
"""

import functools
import itertools
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainer.base.errors import TrainingError
from trainer.config.schema import Config
from trainer.data.batch import Batch
from trainer.launching.distributed import gather
from trainer.model import fused_functions
from trainer.training.state import TrainState
from trainer.training.step import TrainStep

SHARE = 0.9
"""Of the memory that a pass may take: the allocator loses some between blocks of several sizes."""
_TARGETS = 64
"""Boxes of an image in a trial."""
_OPTIMIZER_COPIES = {"sgd": 1, "adam": 2, "adamw": 2}
"""Tensors that the optimiser keeps for each weight, from the first step on."""
_LOG = logging.getLogger("train")


def fitting_batch(
    config: Config, state: TrainState, global_batch: int, saved: dict[str, Any] | None
) -> dict[str, int]:
    """Return the images of a forward pass that the configuration asks for, or those that fit.

    Args:
        config: with `train.find_batch_size` the number is searched, on a GPU.
        state: of the training, before its first step; it is left as it was.
        global_batch: images of a step on all ranks.
        saved: the checkpoint that the run goes on from, if any.

    Returns:
        images; where they were searched also processes and memory (bytes) they fit: for the checkpoint.

    Raises:
        TrainingError: not even one image fits.
    """
    world, configured = state.world, {"images": config.train.batch_size}
    if not config.train.find_batch_size:
        return configured
    place = {"processes": world.size, "memory": min(gather(memory(world.device), world))}
    if not place["memory"]:
        if world.is_main:
            _LOG.warning(
                "train.find_batch_size does nothing on a CPU, which has no memory of its own: "
                "train.batch_size=%d stays", config.train.batch_size,
            )  # fmt: skip
        return configured
    before = (saved or {}).get("batch", {})
    if all(before.get(name) == value for name, value in place.items()):
        return dict(before)
    # The loss takes less memory compiled.
    fused_functions.choose(config.train.compile != "off", world.device, tell=False)
    most = -(-global_batch // world.size)
    trial = Trial(config, state, place["memory"])
    images = largest_fitting(pass_sizes(most), lambda images: all(gather(trial(images), world)))
    if images is None:
        raise TrainingError(
            f"not even one image of {trial.side} pixels fits into the GPU's memory of "
            f"{place['memory'] / 2**30:.0f} GiB",
            fix="set a smaller loader.image_size (and loader.sizes), or take a smaller detector",
        )
    if world.is_main:
        _LOG.info(
            "up to %d images of %d pixels fit into a forward pass: a step of %d images on %d processes has "
            "%d passes", images, trial.side, global_batch, world.size, -(-most // images),
        )  # fmt: skip
    return {"images": images, **place}


def memory(device: torch.device) -> int:
    """Memory of a GPU in bytes; 0 for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def pass_sizes(most: int) -> list[int]:
    """The numbers of images that differ in how many passes `most` images take: the smallest of each."""
    return sorted({-(-most // passes) for passes in range(1, most + 1)})


def largest_fitting(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Search the largest size that fits by halving; None where not even the first does.

    Args:
        sizes: ascending.
        fits: tries one; whatever is smaller than one that fits, fits.
    """
    low, high = 0, len(sizes)  # All before `low` fit, none from `high` on.
    while low < high:
        middle = (low + high) // 2
        if fits(sizes[middle]):
            low = middle + 1
        else:
            high = middle
    return sizes[low - 1] if low else None


class Trial:
    """Forward and backward passes of made-up images, as large as the training's largest."""

    def __init__(self, config: Config, state: TrainState, memory_bytes: int, boxes: int = _TARGETS) -> None:
        """Prepare; `memory_bytes` is what the device has, `boxes` how many an image has, 64 at most."""
        self._config, self._state, self._bytes, self._boxes = config, state, memory_bytes, boxes
        self.side = max([config.loader.image_size, *config.loader.sizes])
        """Of the square, in pixels."""

    def __call__(self, images: int) -> bool:
        """Whether a step with so many images in a pass fits. The state is as before."""
        state, device = self._state, self._state.world.device
        random = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        buffers = [buffer.clone() for buffer in state.detector.buffers()]
        try:
            with _statistics_of_their_own(state.detector):
                self._step(images)
            peak = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
            return peak <= SHARE * self._bytes
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            return False
        finally:
            for parameter in state.parameters:
                parameter.grad = None
            with torch.no_grad():
                for buffer, before in zip(state.detector.buffers(), buffers, strict=True):
                    buffer.copy_(before)
            torch.set_rng_state(random[0])
            if random[1] is not None:
                torch.cuda.set_rng_state(random[1], device)
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)

    def _step(self, images: int) -> None:
        state, config = self._state, self._config.train
        copies = range(_OPTIMIZER_COPIES[config.optimizer])
        kept = [torch.empty_like(parameter) for parameter in state.parameters for _ in copies]
        step = TrainStep(state, state.detector, config, steps=1, global_batch=images * state.world.size)
        losses = step.losses(self._batch(images))
        state.scaler.scale(functools.reduce(operator.add, losses.values())).backward()
        del kept

    def _batch(self, images: int) -> Batch:
        """A batch as the loader gives it: grey squares with boxes, full of them where there are 64."""
        device, classes = self._state.world.device, self._state.detector.num_classes
        squares = torch.full((images, 3, self.side, self.side), 114, dtype=torch.uint8, device=device)
        corners = torch.tensor(
            [[x, y] for x, y in itertools.islice(itertools.product(range(8), repeat=2), self._boxes)]
        )
        step = self.side / 8
        boxes = torch.cat([corners * step, corners * step + 0.9 * step], dim=1).to(device, torch.float32)
        labels = torch.arange(self._boxes, device=device) % classes
        verified = torch.ones(images, classes, dtype=torch.bool, device=device)
        return Batch(
            squares.contiguous(memory_format=torch.channels_last), boxes.expand(images, -1, -1).contiguous(),
            labels.expand(images, -1).contiguous(), torch.eye(3, 4, device=device).repeat(images, 1, 1),
            image_ids=list(range(images)), scales=[1.0] * images, counts=[self._boxes] * images,
            verified=verified if self._config.train.negatives == "verified" else None,
        )  # fmt: skip


@contextmanager
def _statistics_of_their_own(detector: nn.Module) -> Iterator[None]:
    """Let no layer wait for other processes, of which one may have run out of memory half way.

    SyncBatchNorm keeps as much for the backward pass as BatchNorm, but for a few numbers of a channel.
    """
    waiting = [module for module in detector.modules() if isinstance(module, nn.SyncBatchNorm)]
    for module in waiting:
        module.__class__ = nn.BatchNorm2d  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in waiting:
            module.__class__ = nn.SyncBatchNorm


def _is_out_of_memory(error: Exception) -> bool:
    """Whether it is: libraries below torch have errors of their own for it."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "alloc_failed" in text
