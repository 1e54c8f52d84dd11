"""Updates BatchNorm's running statistics once per step, from the whole global batch.

A forward pass is normalized with the statistics of its own images. The running statistics for evaluation must
not depend on how a step's images are divided into passes and processes, so they are updated once per step.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.data.batch import to_device
from trainer.launching.distributed import World, all_reduce_sum


class RunningStatistics:
    """Updates the running statistics of a network in training mode.

    During a step, the buffers contain the statistics of the last pass, because `momentum` is 1. Sums are in
    fp64, so that a variance much smaller than the mean stays exact. The CPU never waits for the GPU.
    """

    def __init__(self, network: nn.Module, world: World) -> None:
        """Take over the updates of all BatchNorm layers in `network`. Move it to its device first."""
        self._world = world
        self._norms = [
            norm
            for norm in network.modules()
            if isinstance(norm, _BatchNorm) and norm.running_mean is not None
        ]
        self._counts = [0] * len(self._norms)
        """Number of values per channel in each layer in this pass: images x height x width."""
        self._weights: dict[tuple[int, ...], Tensor] = {}
        if not self._norms:
            return
        self._means = [norm.get_buffer("running_mean") for norm in self._norms]
        self._variances = [norm.get_buffer("running_var") for norm in self._norms]
        self._steps = [norm.get_buffer("num_batches_tracked") for norm in self._norms]
        self._momentum = self._by_channel([norm.momentum for norm in self._norms])
        for number, norm in enumerate(self._norms):
            norm.momentum = 1.0
            norm.register_forward_pre_hook(functools.partial(self._before_call, number))
        self.begin()

    def begin(self) -> None:
        """Begin a step; call it before the first pass."""
        if self._norms:
            self._before = torch.stack([torch.cat(self._means), torch.cat(self._variances)]).double()
            self._steps_before = torch.stack(self._steps)
            self._sums = self._before.new_zeros(3, self._before.shape[1])
            """For each channel: number, sum and sum of squares of the values in this step."""

    def add_pass(self) -> None:
        """Add the statistics of the last forward pass."""
        if self._norms:
            self._add_statistics(self._counts)
            self._counts = [0] * len(self._norms)

    @torch.no_grad()
    def update(self) -> None:
        """Update the running statistics after the last pass. A collective if the network has BatchNorm."""
        if not self._norms:
            return
        count, total, squares = all_reduce_sum(self._sums, self._world)
        mean = total / count
        variance = (squares - total * mean) / (count - 1)  # unbiased, as in torch
        latest = torch.where(count > 0, torch.stack([mean, variance]), self._before)
        updated = self._before.lerp(latest, self._momentum).to(self._means[0].dtype)
        sizes = [len(mean) for mean in self._means]
        torch._foreach_copy_(
            self._means + self._variances, [*updated[0].split(sizes), *updated[1].split(sizes)]
        )
        torch._foreach_copy_(self._steps, list((self._steps_before + 1).unbind()))

    def _before_call(self, number: int, norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        # Ignore `Architecture.match_targets`, which runs without gradients: its images are passed again.
        if not norm.training or not torch.is_grad_enabled():
            return
        if self._counts[number]:  # A second call in this pass is about to overwrite the buffers.
            self._add_statistics([count * (other == number) for other, count in enumerate(self._counts)])
        self._counts[number] = inputs[0].numel() // inputs[0].shape[1]

    @torch.no_grad()
    def _add_statistics(self, counts: Sequence[int]) -> None:
        """Add the statistics in the buffers; `counts` are the numbers of values in each layer."""
        key = tuple(counts)
        if key not in self._weights:
            # torch divides the variance by the count minus one; SyncBatchNorm counts values of all processes.
            shared = [self._world.size if isinstance(norm, nn.SyncBatchNorm) else 1 for norm in self._norms]
            freedom = [max(0.0, count - 1 / by) for count, by in zip(counts, shared, strict=True)]
            self._weights[key] = torch.stack([self._by_channel(counts), self._by_channel(freedom)])
        count, freedom_of = self._weights[key]
        mean, variance = torch.cat(self._means).double(), torch.cat(self._variances).double()
        total = count * mean
        self._sums += torch.stack([count, total, freedom_of * variance + total * mean])

    def _by_channel(self, values: Sequence[float | None]) -> Tensor:
        """Repeat the value of each layer for each of its channels: fp64 [C]."""
        sizes = [norm.num_features for norm in self._norms]
        channels = [value for value, size in zip(values, sizes, strict=True) for _ in range(size)]
        return to_device(torch.tensor(channels, dtype=torch.float64), self._means[0].device)
