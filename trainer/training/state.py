"""The state of a training run: weights, optimizer, moving average, random numbers."""

import inspect
import logging
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.base.errors import ConfigError
from trainer.base.precision import grad_scaler
from trainer.config.schema import Config
from trainer.launching.distributed import World, gather
from trainer.model.architecture import Architecture, build
from trainer.model.pretrained import DATA_ROOT, load_and_broadcast
from trainer.training.checkpoint import State
from trainer.training.optim import MovingAverage, build_optimizer
from trainer.training.running_statistics import RunningStatistics

_LOG = logging.getLogger("train")

# The option was renamed after torch 2.11.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else "broadcast_buffers"
)


class TrainState:
    """The state of a training run in one process; `state_dict` returns all of it."""

    def __init__(
        self, config: Config, num_classes: int, world: World, *, data_root: str = DATA_ROOT, new: bool = True
    ) -> None:
        """Build the state at step 0, with the same weights in every process.

        Only a `new` run loads pretrained weights; `data_root` contains their mirror.
        """
        torch.manual_seed(config.train.seed)
        self.world, self._seed = world, config.train.seed
        if config.model.sync_batchnorm and world.size == 1:
            _LOG.warning("model.sync_batchnorm has no effect with one process")
        elif config.model.sync_batchnorm and world.device.type == "cpu":
            raise ConfigError(
                "model.sync_batchnorm needs GPUs: PyTorch has no SyncBatchNorm for CPUs",
                fix="set model.sync_batchnorm=false, or model.norm=group, which needs no shared statistics",
            )
        self.detector = build(config.model, num_classes).to(world.device).train()
        if new and config.model.weights:
            load_and_broadcast(self.detector, config.model.weights, data_root, world)
        self.detector = self.detector.to(memory_format=torch.channels_last)
        # All ranks initialized the same weights; from here on, their random numbers differ.
        torch.manual_seed(config.train.seed + 1 + world.rank)
        self.optimizer = build_optimizer(self.detector, config.train)
        train, self.ema = config.train, None
        if train.ema_decay:
            self.ema = MovingAverage(self.detector, train.ema_decay, train.ema_ramp, train.ema_steps)
        self.statistics = RunningStatistics(self.detector, world)
        self.scaler = grad_scaler(world.device, config.train.precision)
        self.parameters = [p for p in self.detector.parameters() if p.requires_grad]
        self.step = 0  # completed optimizer steps
        self.samples = 0  # samples used by all processes: the position in the sample order
        self.validated = 0  # step of the last validation

    def wrap_ddp(self) -> nn.Module:
        """Wrap the detector in DistributedDataParallel, if needed. Call it after `load_state_dict`."""
        if self.world.size == 1:
            return self.detector
        # The only buffers that change are running statistics, which `RunningStatistics` synchronizes.
        options: dict[str, Any] = {_SYNC_BUFFERS: False}
        return DistributedDataParallel(
            self.detector,
            device_ids=[self.world.device.index] if self.world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            **options,
        )

    def evaluation_model(self) -> Architecture:
        """Return the detector whose weights are scored and exported, in evaluation mode."""
        return self.ema.model if self.ema else self.detector.eval()

    def state_dict(self) -> State:
        """Return everything needed to resume. A collective."""
        random = {"cpu": torch.get_rng_state()}
        if self.world.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state()
        return {
            "step": self.step,
            "samples": self.samples,
            "validated": self.validated,
            "model": self.detector.state_dict(),
            "ema": self.ema.model.state_dict() if self.ema else None,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "random": gather(random, self.world),
        }

    def load_state_dict(self, state: State) -> None:
        """Restore a state, which may have been saved by a different number of processes."""
        self.detector.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.ema:
            self.ema.model.load_state_dict(state["ema"])
        self.scaler.load_state_dict(state["scaler"])
        self.step, self.samples = state["step"], state["samples"]
        self.validated = state["validated"]
        if self.world.rank < len(state["random"]):
            random = state["random"][self.world.rank]
            torch.set_rng_state(random["cpu"])
            if "cuda" in random and self.world.device.type == "cuda":
                torch.cuda.set_rng_state(random["cuda"])
        else:
            # The checkpoint has no state for this rank: use a new, reproducible seed.
            words = np.random.SeedSequence([self._seed, self.step, self.world.rank]).generate_state(2)
            torch.manual_seed(int(words[0]) << 32 | int(words[1]))
