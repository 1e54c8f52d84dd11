"""Weights in the type of autocast, cast for many layers at once instead of one by one."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.model.batchnorm_folding import AppliedNorm, NormedConv2d

_TOGETHER = 40
"""Layers whose weights are cast in one operation. Their gradients become ready together, so a larger number
would leave DDP less to overlap."""


@contextlib.contextmanager
def cast_together(layers: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Let convolutions and linear layers use their weights in the type of autocast, if it is on.

    Values and gradients are those of autocast; fixed statistics are applied as well. The parameters are
    hidden behind attributes, so no other code may use the layers meanwhile.
    """
    shadowed: list[tuple[nn.Module, str]] = []
    dtype = torch.get_autocast_dtype(device.type)
    try:
        for first in range(0, len(layers) * torch.is_autocast_enabled(device.type), _TOGETHER):
            group = layers[first : first + _TOGETHER]
            normed = [layer for layer in group if isinstance(layer, NormedConv2d)]
            scales, shifts = _constants([layer.norm[0] for layer in normed]) if normed else ([], [])
            others = [layer for layer in group if not isinstance(layer, NormedConv2d)]
            parts: list[tuple[nn.Module, str, Tensor]] = [(layer, "weight", layer.weight) for layer in normed]
            parts += [(layer, "shift", shift) for layer, shift in zip(normed, shifts, strict=True)]
            parts += [(layer, name, part) for layer in others for name, part in layer.named_parameters()]
            cast = _Cast.apply(dtype, scales, *[part for _, _, part in parts])
            for (owner, name, _), value in zip(parts, cast, strict=True):
                owner.__dict__[name] = value
                shadowed.append((owner, name))
        yield
    finally:
        for shadow, name in shadowed:
            shadow.__dict__.pop(name)


def _constants(norms: Sequence[AppliedNorm]) -> tuple[list[Tensor], list[Tensor]]:
    """What `NormedConv2d` multiplies its weights by, and its shift, for layers in front of these."""
    scales = torch._foreach_add([norm.running_var for norm in norms], [norm.eps for norm in norms])
    torch._foreach_rsqrt_(scales)
    torch._foreach_mul_(scales, [norm.weight for norm in norms])
    moved = torch._foreach_mul(scales, [norm.running_mean for norm in norms])
    shifts = torch._foreach_sub([norm.bias for norm in norms], moved)
    return [scale[:, None, None, None] for scale in scales], list(shifts)


class _Cast(torch.autograd.Function):
    """Weights times the first `scales`, as far as they go, in another type."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, scales: list[Tensor], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.scales, ctx.weights = scales, weights
        scaled = torch._foreach_mul(weights[: len(scales)], scales) if scales else ()
        cast = [torch.empty_like(weight, dtype=dtype) for weight in weights]
        torch._foreach_copy_(cast, [*scaled, *weights[len(scales) :]])
        needed = zip(cast, ctx.needs_input_grad[2:], strict=True)
        ctx.mark_non_differentiable(*(value for value, needs in needed if not needs))
        return tuple(cast)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        known = {
            number: gradient
            for number, gradient in enumerate(gradients)
            if gradient is not None and ctx.needs_input_grad[number + 2]
        }
        exact = {number: torch.empty_like(ctx.weights[number]) for number in known}
        torch._foreach_copy_(list(exact.values()), list(known.values()))
        scaled = [number for number in known if number < len(ctx.scales)]
        if scaled:
            torch._foreach_mul_(
                [exact[number] for number in scaled], [ctx.scales[number] for number in scaled]
            )
        return None, None, *(exact.get(number) for number in range(len(gradients)))
