"""Normalization by fixed statistics as a part of the convolution before it.

Such a layer scales and shifts each channel, which the convolution's weights can do as well: the same function
but for rounding, without a pass over the largest tensors. `fold` changes the weights once;
`apply_in_convolutions` computes them at each call, so that they can still be trained and saved;
`cast_together` computes them for many layers at once, in the type of autocast.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torchvision.ops.misc import FrozenBatchNorm2d

_Convolution = TypeVar("_Convolution", bound=nn.Conv2d)
Names = tuple[tuple[str, str], ...]

TORCHVISION_PAIRS: Names = (("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3"), ("0", "1"))
"""Names of a convolution and of the layer behind it in torchvision's ResNet, the last in `downsample`."""
TRANSFORMERS_PAIRS: Names = (("convolution", "normalization"), ("conv", "norm"), ("0", "1"))
"""The same in the backbones and encoders of transformers' detectors."""

_OPTIONS = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
_TOGETHER = 40
"""Layers whose weights are cast in one operation. Their gradients become ready together, so a larger number
would leave DDP less to overlap."""


class AppliedNorm(FrozenBatchNorm2d):  # type: ignore[misc]
    """Fixed statistics that the convolution before this layer applies: an identity."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x


class NormedConv2d(nn.Conv2d):
    """A convolution that applies the fixed statistics of the layer behind it.

    Under autocast its output has 16 bits. Behind FrozenBatchNorm2d, whose statistics are fp32, it would have
    32, be cast again for the next convolution, and be kept in both types for the backward pass.
    """

    norm: tuple[AppliedNorm]  # the layer behind it; in a tuple, which hides it from `state_dict`

    def forward(self, input: Tensor) -> Tensor:
        """Convolution and normalization of [B, C, H, W]."""
        output: Tensor
        if "shift" in self.__dict__:  # See `cast_together`.
            output = self._conv_forward(input, self.weight, self.__dict__["shift"])
            return output
        norm = self.norm[0]
        scale: Tensor = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
        shift: Tensor = norm.bias - norm.running_mean * scale
        output = self._conv_forward(input, self.weight * scale[:, None, None, None], shift)
        return output


def apply_in_convolutions(body: nn.Module, kinds: tuple[type[nn.Module], ...], pairs: Names) -> None:
    """Let convolutions without a bias apply the fixed statistics of the layer behind them, in place.

    Parameters, buffers and their names do not change. Layers of `kinds` have FrozenBatchNorm2d's buffers;
    `pairs` are the names of a convolution and the layer behind it.
    """
    for parent, names, convolution, norm in _pairs(body, kinds, pairs):
        if convolution.bias is not None:
            continue
        statistics = dict(norm.named_buffers())
        applied = AppliedNorm(len(statistics["weight"]), getattr(norm, "eps", 1e-5))
        for name, values in statistics.items():
            setattr(applied, name, values)
        normed = convert_convolution(convolution, NormedConv2d)
        normed.norm = (applied,)
        setattr(parent, names[0], normed)
        setattr(parent, names[1], applied)


def fold(body: nn.Module, pairs: Names) -> None:
    """Fold the BatchNorm of a network in evaluation mode into its convolutions, in place.

    The network can no longer be trained or saved: its state dict has other names. `pairs` are the names of a
    convolution and the layer behind it.
    """
    for parent, names, convolution, norm in _pairs(body, (_BatchNorm, FrozenBatchNorm2d), pairs):
        folded = convert_convolution(convolution, nn.Conv2d)
        folded.weight, folded.bias = fuse_conv_bn_weights(
            convolution.weight,
            convolution.bias,
            norm.running_mean,
            norm.running_var,
            norm.eps,
            norm.weight,
            norm.bias,
        )
        setattr(parent, names[0], folded)
        setattr(parent, names[1], nn.Identity())


def _pairs(
    body: nn.Module, kinds: tuple[type[nn.Module], ...], pairs: Names
) -> Iterator[tuple[nn.Module, tuple[str, str], nn.Conv2d, Any]]:
    """Each convolution with a layer of these kinds behind it: parent, names, convolution, layer."""
    for parent in list(body.modules()):
        for names in pairs:
            convolution, norm = (getattr(parent, name, None) for name in names)
            if isinstance(convolution, nn.Conv2d) and isinstance(norm, kinds):
                yield parent, names, convolution, norm


def convert_convolution(convolution: nn.Conv2d, kind: type[_Convolution]) -> _Convolution:
    """Return a convolution of another class with the same options and weights."""
    options: dict[str, Any] = {name: getattr(convolution, name) for name in _OPTIONS}
    other = kind(convolution.in_channels, convolution.out_channels, bias=False, device="meta", **options)
    other.weight, other.bias = convolution.weight, convolution.bias
    return other.train(convolution.training)


@contextlib.contextmanager
def cast_together(layers: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Let convolutions and linear layers use their weights in autocast's type, if autocast is enabled.

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
            plain = [layer for layer in group if not isinstance(layer, NormedConv2d)]
            parts: list[tuple[nn.Module, str, Tensor]] = [(layer, "weight", layer.weight) for layer in normed]
            parts += [(layer, "shift", shift) for layer, shift in zip(normed, shifts, strict=True)]
            parts += [(layer, name, part) for layer in plain for name, part in layer.named_parameters()]
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
        present = {
            number: gradient
            for number, gradient in enumerate(gradients)
            if gradient is not None and ctx.needs_input_grad[number + 2]
        }
        exact = {number: torch.empty_like(ctx.weights[number]) for number in present}
        torch._foreach_copy_(list(exact.values()), list(present.values()))
        scaled = [number for number in present if number < len(ctx.scales)]
        if scaled:
            torch._foreach_mul_(
                [exact[number] for number in scaled], [ctx.scales[number] for number in scaled]
            )
        return None, None, *(exact.get(number) for number in range(len(gradients)))
