"""The training steps of the libraries whose networks ours are, as they give or describe them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.common import stock_model
from trainer.base.errors import ConfigError
from trainer.config.schema import ModelConfig
from trainer.model.architecture import build
from trainer.model.architectures.detr.detr_options import DetrOptions
from trainer.model.architectures.retinanet.retinanet_options import RetinaNetOptions

_CLIP = 0.1
"""Largest norm of the gradient in D-FINE's and RT-DETR's own training."""


class Candidate(NamedTuple):
    """What is measured."""

    step: Callable[[], Any]
    """One training step."""
    forward: Callable[[], Any]
    """Its loss alone."""


def stock(batch: Any, config: ModelConfig, classes: int, dtype: torch.dtype | None) -> Candidate:
    """The library's network in a plain step, with autocast to `dtype`.

    Raises:
        ConfigError: the library has no such network.
    """
    if isinstance(config, DetrOptions):
        model, loss = _transformers(batch, config, classes)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(_trained(model), lr=1e-6)
    elif isinstance(config, RetinaNetOptions):
        model, loss = _torchvision(batch, config, classes)
        optimizer = torch.optim.SGD(_trained(model), lr=1e-6, momentum=0.9, weight_decay=1e-4)
    else:
        raise ConfigError(
            f"there is no step of a library to compare {config.architecture} with",
            fix="measure a recipe of retinanet, dfine or rtdetr",
        )
    if dtype == torch.bfloat16:
        model = model.to(memory_format=torch.channels_last)
    device = batch[0].device.type
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
    clips = isinstance(config, DetrOptions)

    def forward() -> Tensor:
        with torch.autocast(device, dtype, enabled=dtype is not None):
            return loss()

    def step() -> None:
        total = forward()
        total.item()  # Both scripts look in every step whether it is finite.
        scaler.scale(total).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return Candidate(step, forward)


def _torchvision(
    batch: Any, config: RetinaNetOptions, classes: int
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """The model of torchvision and its loss, as in its references/detection/engine.py."""
    pixels, _, _, lists = batch
    model = stock_model(classes, pixels.shape[-1], pixels.device, config)
    return model, lambda: sum(model([image / 255 for image in pixels], lists).values())


def _transformers(batch: Any, config: DetrOptions, classes: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """The model of transformers and its loss; what ours has frozen is frozen."""
    pixels, boxes, labels, _ = batch
    ours = build(config, classes)
    model = ours.upstream(ours.library_config)
    frozen = {name for name, weight in ours.named_parameters() if not weight.requires_grad}
    for name, weight in model.named_parameters():
        weight.requires_grad_(name not in frozen)
    model = model.to(pixels.device).train()
    size = pixels.shape[-1]
    centred = (
        torch.cat([(boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]], dim=-1) / size
    )
    targets = [{"class_labels": names, "boxes": rows} for names, rows in zip(labels, centred, strict=True)]
    return model, lambda: model(pixel_values=pixels / 255, labels=targets).loss


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
