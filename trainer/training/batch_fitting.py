"""Trial passes of a training: whether they fit into a GPU's memory."""

import functools
import logging
import operator

import torch
from torch import nn

from trainer.config.schema import Config
from trainer.data.batch import Batch
from trainer.training.state import TrainState
from trainer.training.step import TrainStep
from trainer.training.time_limit import SplitSizes, TimeLimit

_MEMORY_SHARE = 0.9  # share of the memory that a pass may take, because the allocator wastes some
_MAX_BOXES = 64  # boxes of an image in a trial
_OPTIMIZER_COPIES = {"sgd": 1, "adam": 2, "adamw": 2}  # tensors of the optimizer for each weight
_LOG = logging.getLogger("train")


def memory(device: torch.device) -> int:
    """Return the memory of a GPU in bytes; 0 for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


class Trial:
    """Forward and backward passes of synthetic images, as large as the training's largest."""

    def __init__(self, config: Config, state: TrainState, memory_bytes: int, boxes: int = _MAX_BOXES) -> None:
        """Prepare; `memory_bytes` is the device's memory, `boxes` (at most 64) the number in an image."""
        self._config, self._state, self._bytes, self._boxes = config, state, memory_bytes, boxes
        self.side = max([config.loader.image_size, *config.loader.sizes])  # side of the square in pixels

    def __call__(self, images: int) -> bool:
        """Return whether a pass of so many images fits. Restores the state."""
        state, device = self._state, self._state.world.device
        random = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        buffers = [buffer.clone() for buffer in state.detector.buffers()]
        # No layer may wait for other processes, of which one may have run out of memory.
        synchronized = [module for module in state.detector.modules() if isinstance(module, nn.SyncBatchNorm)]
        for module in synchronized:
            module.__class__ = nn.BatchNorm2d  # type: ignore[assignment]
        try:
            self._forward_backward(images)
            peak = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
            return peak <= _MEMORY_SHARE * self._bytes
        except (torch.OutOfMemoryError, RuntimeError) as error:
            text = str(error).lower()
            memory_ran_out = "out of memory" in text or "alloc_failed" in text  # cuDNN's and cuBLAS' too.
            if not isinstance(error, torch.OutOfMemoryError) and not memory_ran_out:
                raise
            return False
        finally:
            for module in synchronized:
                module.__class__ = nn.SyncBatchNorm
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

    def _forward_backward(self, images: int) -> None:
        """Pass gray squares with boxes on a grid, next to as much memory as the optimizer will take."""
        state, config, device = self._state, self._config.train, self._state.world.device
        copies = range(_OPTIMIZER_COPIES[config.optimizer])
        optimizer_memory = [torch.empty_like(parameter) for parameter in state.parameters for _ in copies]
        squares = torch.full((images, 3, self.side, self.side), 114, dtype=torch.uint8, device=device)
        corners = torch.cartesian_prod(torch.arange(8), torch.arange(8))[: self._boxes]
        step = self.side / 8
        boxes = torch.cat([corners * step, corners * step + 0.9 * step], dim=1).to(device, torch.float32)
        labels = torch.arange(self._boxes, device=device) % state.detector.num_classes
        verified = torch.ones(images, state.detector.num_classes, dtype=torch.bool, device=device)
        batch = Batch(
            squares.contiguous(memory_format=torch.channels_last),
            boxes.expand(images, -1, -1).contiguous(),
            labels.expand(images, -1).contiguous(),
            torch.eye(3, 4, device=device).repeat(images, 1, 1),
            image_ids=list(range(images)),
            scales=[(1.0,) * 4] * images,
            counts=[self._boxes] * images,
            verified=verified if config.negatives == "verified" else None,
        )
        whole = images * state.world.size
        limit = TimeLimit(self._config, SplitSizes(whole), whole)
        train_step = TrainStep(state, state.detector, config, limit=limit, global_batch=whole)
        losses = train_step.losses(batch)
        state.scaler.scale(functools.reduce(operator.add, losses.values())).backward()
        del optimizer_memory
