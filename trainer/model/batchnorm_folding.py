"""Normalisation by fixed statistics as a part of the convolution before it.

In evaluation such a layer is a scale and a shift for each channel, which the convolution's weights can
have in them: the same function but for rounding, without a pass over the largest tensors of all.
"""

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torchvision.ops.misc import FrozenBatchNorm2d

_PAIRS = (("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3"), ("0", "1"))
"""Names of a convolution and of the layer behind it in torchvision's ResNet, the last in `downsample`."""


def fold(body: nn.Module) -> None:
    """Fold the batch normalisation of a backbone into its convolutions, in place.

    Args:
        body: a ResNet in evaluation mode. Its state dict is another one afterwards: it can no longer be
            trained or saved.
    """
    for parent in body.modules():
        for names in _PAIRS:
            convolution, norm = (getattr(parent, name, None) for name in names)
            if isinstance(convolution, nn.Conv2d) and isinstance(norm, _BatchNorm | FrozenBatchNorm2d):
                statistics: tuple[Any, Any] = norm.running_mean, norm.running_var
                convolution.weight, convolution.bias = fuse_conv_bn_weights(
                    convolution.weight, convolution.bias, *statistics, norm.eps, norm.weight, norm.bias
                )
                setattr(parent, names[1], nn.Identity())
