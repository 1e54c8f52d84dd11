"""Normalization by fixed statistics as a part of the convolution before it.

Such a layer scales and shifts each channel, which the convolution's weights can do as well: the same function
but for rounding, without a pass over the largest tensors. `fold` changes the weights once;
`apply_in_convolutions` computes them at each call, so that they can still be trained and saved.
"""

from collections.abc import Iterator
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
        norm = self.norm[0]
        scale: Tensor = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
        shift: Tensor = norm.bias - norm.running_mean * scale
        output: Tensor = self._conv_forward(input, self.weight * scale[:, None, None, None], shift)
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
