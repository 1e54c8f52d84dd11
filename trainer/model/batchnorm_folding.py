"""Merges normalization layers with fixed statistics into the preceding convolution.

Such a layer scales and shifts each channel, which the convolution's weights can do as well. Results differ
only by rounding, and a pass over the largest tensors is saved. `fold` changes the weights once;
`apply_in_convolutions` merges them at each call, so that the weights can still be trained and saved;
`cast_weights_together` merges and casts the weights of many layers in one operation.
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
LayerPairs = tuple[tuple[str, str], ...]

TORCHVISION_PAIRS: LayerPairs = (("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3"), ("0", "1"))
"""Names of a convolution and the normalization after it in torchvision's ResNet; "0", "1" in `downsample`."""
TRANSFORMERS_PAIRS: LayerPairs = (("convolution", "normalization"), ("conv", "norm"), ("0", "1"))
"""Names of these layers in the backbones and encoders of transformers' detectors."""

_OPTIONS = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
_LAYERS_PER_CAST = 40
"""Layers whose weights are cast in one operation. Their gradients become ready together, so with a larger
number DDP could overlap less communication."""


class FoldedNorm(FrozenBatchNorm2d):  # type: ignore[misc]
    """Keeps the fixed statistics that the preceding convolution applies; its output is its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x


class ConvNorm2d(nn.Conv2d):
    """A convolution that applies the fixed statistics of the next layer.

    Under autocast its output has 16 bits. A separate FrozenBatchNorm2d would return fp32, because its
    statistics are fp32, and autograd would also keep the copy that is cast for the next convolution.
    """

    norm: tuple[FoldedNorm]  # the next layer; in a tuple, which hides it from `state_dict`

    def forward(self, input: Tensor) -> Tensor:
        """Apply convolution and normalization to [B, C, H, W]."""
        output: Tensor
        if "shift" in self.__dict__:  # See `cast_weights_together`.
            output = self._conv_forward(input, self.weight, self.__dict__["shift"])
            return output
        norm = self.norm[0]
        scale: Tensor = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
        shift: Tensor = norm.bias - norm.running_mean * scale
        output = self._conv_forward(input, self.weight * scale[:, None, None, None], shift)
        return output


def apply_in_convolutions(body: nn.Module, kinds: tuple[type[nn.Module], ...], pairs: LayerPairs) -> None:
    """Make convolutions without a bias apply the fixed statistics of the next layer, in place.

    Parameters, buffers and their names do not change. Layers of `kinds` must have the buffers of
    FrozenBatchNorm2d; `pairs` are the names of a convolution and its normalization.
    """
    for parent, names, convolution, norm in _find_conv_norm_pairs(body, kinds, pairs):
        if convolution.bias is not None:
            continue
        statistics = dict(norm.named_buffers())
        applied = FoldedNorm(len(statistics["weight"]), getattr(norm, "eps", 1e-5))
        for name, values in statistics.items():
            setattr(applied, name, values)
        normed = convert_convolution(convolution, ConvNorm2d)
        normed.norm = (applied,)
        setattr(parent, names[0], normed)
        setattr(parent, names[1], applied)


def fold(body: nn.Module, pairs: LayerPairs) -> None:
    """Fold the BatchNorm of a network in evaluation mode into its convolutions, in place.

    The network can no longer be trained or saved, because names in its state dict change. `pairs` are the
    names of a convolution and its normalization.
    """
    for parent, names, convolution, norm in _find_conv_norm_pairs(
        body, (_BatchNorm, FrozenBatchNorm2d), pairs
    ):
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


def _find_conv_norm_pairs(
    body: nn.Module, kinds: tuple[type[nn.Module], ...], pairs: LayerPairs
) -> Iterator[tuple[nn.Module, tuple[str, str], nn.Conv2d, Any]]:
    """Yield parent, names, convolution and norm for each convolution followed by a layer of `kinds`."""
    for parent in list(body.modules()):
        for names in pairs:
            convolution, norm = (getattr(parent, name, None) for name in names)
            if isinstance(convolution, nn.Conv2d) and isinstance(norm, kinds):
                yield parent, names, convolution, norm


def convert_convolution(convolution: nn.Conv2d, kind: type[_Convolution]) -> _Convolution:
    """Return a convolution of a different class with the same options and weights."""
    options: dict[str, Any] = {name: getattr(convolution, name) for name in _OPTIONS}
    other = kind(convolution.in_channels, convolution.out_channels, bias=False, device="meta", **options)
    other.weight, other.bias = convolution.weight, convolution.bias
    return other.train(convolution.training)


@contextlib.contextmanager
def cast_weights_together(layers: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Cast the weights of convolutions and linear layers together, if autocast is enabled.

    Values and gradients are the same as with autocast; fixed statistics are applied as well. The cast tensors
    hide the parameters, so no other code may use the layers in this context.
    """
    shadowed: list[tuple[nn.Module, str]] = []
    dtype = torch.get_autocast_dtype(device.type)
    try:
        for first in range(0, len(layers) * torch.is_autocast_enabled(device.type), _LAYERS_PER_CAST):
            group = layers[first : first + _LAYERS_PER_CAST]
            normed = [layer for layer in group if isinstance(layer, ConvNorm2d)]
            scales, shifts = _scales_and_shifts([layer.norm[0] for layer in normed]) if normed else ([], [])
            plain = [layer for layer in group if not isinstance(layer, ConvNorm2d)]
            parts: list[tuple[nn.Module, str, Tensor]] = [(layer, "weight", layer.weight) for layer in normed]
            parts += [(layer, "shift", shift) for layer, shift in zip(normed, shifts, strict=True)]
            parts += [(layer, name, part) for layer in plain for name, part in layer.named_parameters()]
            cast = _CastWeights.apply(dtype, scales, *[part for _, _, part in parts])
            for (owner, name, _), value in zip(parts, cast, strict=True):
                owner.__dict__[name] = value
                shadowed.append((owner, name))
        yield
    finally:
        for shadow, name in shadowed:
            shadow.__dict__.pop(name)


def _scales_and_shifts(norms: Sequence[FoldedNorm]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the scales and shifts that the `ConvNorm2d` before each norm applies."""
    scales = torch._foreach_add([norm.running_var for norm in norms], [norm.eps for norm in norms])
    torch._foreach_rsqrt_(scales)
    torch._foreach_mul_(scales, [norm.weight for norm in norms])
    moved = torch._foreach_mul(scales, [norm.running_mean for norm in norms])
    shifts = torch._foreach_sub([norm.bias for norm in norms], moved)
    return [scale[:, None, None, None] for scale in scales], list(shifts)


class _CastWeights(torch.autograd.Function):
    """Casts weights to another type, after multiplying the first of them by `scales`."""

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
