"""Optimizer, learning-rate schedule, and moving average of the weights."""

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from trainer.config.schema import TrainConfig
from trainer.model.architecture import Architecture, ParameterGroups

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm)

_MOMENTUM = 0.9  # momentum of SGD
_FINAL_LR = 0.01  # learning rate at the end of the cosine, relative to the peak


def build_optimizer(detector: Architecture, config: TrainConfig) -> torch.optim.Optimizer:
    """Return SGD, Adam or AdamW for the detector's parameter groups; skipped steps do not change it."""
    norms = {
        id(parameter)
        for module in detector.modules()
        if isinstance(module, _NORMS)
        for parameter in module.parameters(recurse=False)
    }
    decays = config.weight_decay, config.norm_weight_decay, config.bias_weight_decay
    groups: ParameterGroups = []
    for group in detector.parameter_groups(config):
        if "weight_decay" in group:
            groups.append(group)
            continue
        by_decay: dict[float, list[nn.Parameter]] = {decay: [] for decay in decays}
        for parameter in group["params"]:
            kind = 0 if parameter.ndim > 1 else 1 if id(parameter) in norms else 2
            by_decay[decays[kind]].append(parameter)
        groups += [
            {**group, "params": found, "weight_decay": decay} for decay, found in by_decay.items() if found
        ]
    if config.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=_MOMENTUM, fused=True)
        # torch (2.15, `_fused_sgd`) allocates the buffers uninitialized, and uses them if `found_inf` skips
        # the first step. With zeros the result equals torch's first step: momentum * 0 + gradient.
        for parameter in itertools.chain.from_iterable(group["params"] for group in groups):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer
    adam = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return adam(groups, lr=config.lr, fused=True)


def scale_to_batch(config: TrainConfig, global_batch: int) -> tuple[TrainConfig, str]:
    """Return the options scaled to the global batch, and an explanation of the learning rate.

    `lr_scaling` is linear (Goyal et al. 2017, arXiv:1706.02677) or by the square root (Malladi et al. 2022,
    arXiv:2205.10287); `scale_steps` follows "Customizing Batch Size" in the README of
    github.com/Peterande/D-FINE (4a1f73a).
    """
    images = f"{global_batch} images per step"
    if not config.lr_batch:
        return config, (
            f"peak learning rate {config.lr:g}, not scaled to {images}; to scale it from N images, set "
            "train.lr_batch=N"
        )
    ratio = global_batch / config.lr_batch
    linear = config.lr_scaling == "linear" or (config.lr_scaling == "auto" and config.optimizer == "sgd")
    scale, rule = (ratio, "") if linear else (math.sqrt(ratio), "the root of ")
    scaled = replace(config, lr=config.lr * scale)
    if config.scale_steps:
        scaled = replace(
            scaled,
            warmup_steps=round(config.warmup_steps / ratio),
            ema_decay=max(0.0, 1 - (1 - config.ema_decay) * ratio) if config.ema_decay else 0.0,
            ema_steps=max(1, round(config.ema_steps / ratio)),
        )
    return scaled, (
        f"peak learning rate {config.lr * scale:g} for {images}: {config.lr:g} for "
        f"{config.lr_batch}, times {rule}{global_batch}/{config.lr_batch} ({config.optimizer})"
    )


def learning_rate(step: float, total_steps: int, config: TrainConfig) -> float:
    """Return the learning rate at `step` (from 0, may be fractional) of `total_steps`.

    The warm-up is quadratic, or linear from a thousandth of the peak. After it the rate follows half a cosine
    down to a hundredth of the peak, or drops by `gamma` at the milestones.
    """
    warmup = min(config.warmup_steps, total_steps // 10)
    if config.warmup_epochs:
        warmup = round(min(config.warmup_epochs / config.epochs, 1) * total_steps)
    if step < warmup:
        part = (step + 1) / warmup
        return config.lr * (part**2 if config.warmup_shape == "quadratic" else 0.001 + 0.999 * part)
    if config.schedule == "multistep":
        drops = sum(step >= milestone * total_steps for milestone in config.milestones)
        return config.lr * config.gamma**drops
    progress = (step - warmup) / max(1, total_steps - warmup)
    return config.lr * (_FINAL_LR + (1 - _FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all groups, multiplied by their `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


class MovingAverage:
    """Exponential moving average of a model's weights and buffers.

    The decay grows with the steps, so that the initial weights do not dominate a short run: `inverse` as in
    TensorFlow's ExponentialMovingAverage, `exponential` as in ModelEMA of D-FINE's authors.
    """

    def __init__(self, model: Architecture, decay: float, ramp: str = "inverse", steps: int = 1000) -> None:
        self.model: Architecture = copy.deepcopy(model).eval().requires_grad_(False)
        """The averaged model, for evaluation."""
        self._decay, self._ramp, self._steps = decay, ramp, steps
        pairs = list(zip(self.model.state_dict().values(), model.state_dict().values(), strict=True))
        self._averaged = [(mean, value) for mean, value in pairs if mean.is_floating_point()]
        self._copied = [(mean, value) for mean, value in pairs if not mean.is_floating_point()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Include the weights after optimizer step `step` (from 0)."""
        decay = self._decay
        if self._ramp == "inverse":
            decay = min(decay, (1 + step) / (10 + step))
        elif self._ramp == "exponential":
            decay *= 1 - math.exp(-(step + 1) / self._steps)
        weight = 1 - decay
        torch._foreach_lerp_(
            [mean for mean, _ in self._averaged], [value for _, value in self._averaged], weight
        )
        if self._copied:
            torch._foreach_copy_([mean for mean, _ in self._copied], [value for _, value in self._copied])


def clip_gradient(parameters: Sequence[Tensor], limit: float) -> Tensor:
    """Clip the norm of all gradients to `limit` in place, if above 0; return the norm before clipping."""
    if limit > 0:
        return nn.utils.clip_grad_norm_(parameters, limit)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return nn.utils.get_total_norm(gradients)
