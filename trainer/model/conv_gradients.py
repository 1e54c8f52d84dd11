"""The gradients of a 3x3 convolution with thousands of outputs, such as a class head's last one."""

import torch
import torch.nn.functional as F
from torch import Tensor


def conv_backward(
    gradient: Tensor, features: Tensor, kernel: Tensor, output_mask: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a convolution with stride 1 and padding 1.

    Args:
        gradient: [B, O, h, w] of the convolution's output, channels_last.
        features: [B, F, h, w] its input, channels_last.
        kernel: [O, F, 3, 3], channels_last.
        output_mask: which of the three gradients to compute.

    Returns:
        Of features, kernel and bias, in the type of the kernel; undefined where not computed.
    """
    if products_pay(gradient):
        return by_products(gradient, features, kernel, output_mask)
    return by_library(gradient, features, kernel, output_mask)


def products_pay(gradient: Tensor) -> bool:
    """Whether matrix products take less time, by the numbers of output channels and of places.

    On a CPU oneDNN converts the kernel gradient to layouts of its own, at a cost that grows with the kernel:
    0.1 s a call with 5409 outputs, however small the map. Matrix products copy the map nine times instead.
    """
    places = gradient.shape[0] * gradient.shape[2] * gradient.shape[3]
    return gradient.device.type == "cpu" and places <= 2 * gradient.shape[1]


def by_library(
    gradient: Tensor, features: Tensor, kernel: Tensor, output_mask: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as torch computes it: by oneDNN or cuDNN."""
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        gradient, features, kernel, [len(kernel)], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, output_mask
    )
    return gradients


def by_products(
    gradient: Tensor, features: Tensor, kernel: Tensor, output_mask: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as matrix products with a row for each place: im2col and col2im."""
    rows = gradient.permute(0, 2, 3, 1).flatten(0, 2)
    channels = features.shape[1]
    of_features = of_kernel = of_bias = rows.new_empty(0)
    if output_mask[0]:
        of_windows = rows @ kernel.permute(0, 2, 3, 1).flatten(1)
        of_features = _folded(of_windows.view(*_places(features), 3, 3, channels)).to(kernel.dtype)
    if output_mask[1]:
        of_kernel = (rows.t() @ _windows(features)).view(-1, 3, 3, channels).permute(0, 3, 1, 2)
    if output_mask[2]:
        of_bias = rows.sum(dim=0)
    return of_features, of_kernel, of_bias


def _places(features: Tensor) -> tuple[int, int, int]:
    return features.shape[0], features.shape[2], features.shape[3]


def _windows(features: Tensor) -> Tensor:
    """im2col: [B * h * w, 9 * F], the window of the convolution at each place."""
    padded = F.pad(features.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))
    image, row, column, channel = padded.stride()
    shape = (*_places(features), 3, 3, padded.shape[3])
    return padded.as_strided(shape, (image, row, column, row, column, channel)).flatten(3).flatten(0, 2)


def _folded(of_windows: Tensor) -> Tensor:
    """col2im: [B, F, h, w], channels_last, the sums over all windows [B, h, w, 3, 3, F] that hold a place."""
    images, height, width, *_, channels = of_windows.shape
    total = of_windows.new_zeros(
        images, height + 2, width + 2, channels, dtype=torch.promote_types(of_windows.dtype, torch.float32)
    )
    for row in range(3):
        for column in range(3):
            total[:, row : row + height, column : column + width] += of_windows[:, :, :, row, column]
    return total[:, 1:-1, 1:-1].permute(0, 3, 1, 2)
