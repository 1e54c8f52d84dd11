"""Normalisation by fixed statistics as a part of the convolution before it.

Such a layer is a scale and a shift for each channel, which the convolution's weights can have in them: the
same function but for rounding, without a pass over the largest tensors of all. `fold` puts them there for
good, `apply_in_convolutions` anew at each call, so that the weights can be trained and saved.
"""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torchvision.ops.misc import FrozenBatchNorm2d

_Convolution = TypeVar("_Convolution", bound=nn.Conv2d)

TORCHVISION = (("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3"), ("0", "1"))
"""Names of a convolution and of the layer behind it in torchvision's ResNet, the last in `downsample`."""
TRANSFORMERS = (("convolution", "normalization"), ("conv", "norm"), ("0", "1"))
"""The same in transformers' detectors: in backbones, in encoders, before and behind them."""

_OPTIONS = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")


class AppliedNorm(FrozenBatchNorm2d):
    """Fixed statistics that the convolution before this layer applies: it passes on what it gets."""

    def forward(self, x: Tensor) -> Tensor:
        """Return it as it is."""
        return x


class NormedConv2d(nn.Conv2d):
    """A convolution that has the fixed statistics of the layer behind it in its weights and its bias.

    Under autocast all behind it has 16 bits. Behind FrozenBatchNorm2d, whose statistics are fp32, it has 32:
    what is scaled, shifted, rectified and cast again for the next convolution, and kept in both forms for
    the backward pass.
    """

    norm: tuple[AppliedNorm]
    """The layer behind it; in a tuple, or it would be a part of this one and saved twice."""

    def forward(self, input: Tensor) -> Tensor:
        """Convolution and normalisation of [B, C, H, W]."""
        norm = self.norm[0]
        scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
        shift = norm.bias - norm.running_mean * scale
        return self._conv_forward(input, self.weight * scale[:, None, None, None], shift)


def apply_in_convolutions(
    body: nn.Module, kinds: tuple[type[nn.Module], ...], pairs: tuple[tuple[str, str], ...]
) -> None:
    """Let convolutions without a bias apply the fixed statistics behind them, in place.

    Args:
        body: a network that calls each normalisation right behind its convolution. Parameters, buffers and
            their names stay what they are.
        kinds: classes of the layers with fixed statistics: FrozenBatchNorm2d or others with its buffers.
        pairs: names of a convolution and the layer behind it, within their parent.
    """
    for parent in list(body.modules()):
        for names in pairs:
            convolution, norm = (getattr(parent, name, None) for name in names)
            if isinstance(convolution, nn.Conv2d) and convolution.bias is None and isinstance(norm, kinds):
                statistics = dict(norm.named_buffers())
                applied = AppliedNorm(len(statistics["weight"]), getattr(norm, "eps", 1e-5))
                for name, values in statistics.items():
                    setattr(applied, name, values)
                normed = _like(convolution, NormedConv2d)
                normed.norm = (applied,)
                setattr(parent, names[0], normed)
                setattr(parent, names[1], applied)


def fold(body: nn.Module, pairs: tuple[tuple[str, str], ...]) -> None:
    """Fold the batch normalisation of a network into its convolutions, in place.

    Args:
        body: in evaluation mode. Its state dict is another one afterwards: it can no longer be trained or
            saved.
        pairs: names of a convolution and the layer behind it, within their parent.
    """
    for parent in list(body.modules()):
        for names in pairs:
            convolution, norm = (getattr(parent, name, None) for name in names)
            if isinstance(convolution, nn.Conv2d) and isinstance(norm, _BatchNorm | FrozenBatchNorm2d):
                statistics: tuple[Any, Any] = norm.running_mean, norm.running_var
                folded = _like(convolution, nn.Conv2d)
                folded.weight, folded.bias = fuse_conv_bn_weights(
                    convolution.weight, convolution.bias, *statistics, norm.eps, norm.weight, norm.bias
                )
                setattr(parent, names[0], folded)
                setattr(parent, names[1], nn.Identity())


def _like(convolution: nn.Conv2d, kind: type[_Convolution]) -> _Convolution:
    """A convolution of another class with the same options and weights."""
    options: dict[str, Any] = {name: getattr(convolution, name) for name in _OPTIONS}
    other = kind(convolution.in_channels, convolution.out_channels, bias=False, device="meta", **options)
    other.weight, other.bias = convolution.weight, convolution.bias
    return other.train(convolution.training)
