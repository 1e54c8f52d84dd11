"""The gradients of a 3x3 convolution with thousands of outputs, such as a class head's last one."""

import torch
import torch.nn.functional as F
from torch import Tensor


def conv_backward(
    gradient: Tensor, features: Tensor, kernel: Tensor, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a convolution with stride 1 and padding 1.

    Args:
        gradient: [B, O, h, w] of the convolution's output, channels_last.
        features: [B, F, h, w] its input, channels_last.
        kernel: [O, F, 3, 3], channels_last.
        wanted: which of the three gradients are asked for.

    Returns:
        Of features, kernel and bias, in the type of the kernel; of no meaning where not asked for.
    """
    if products_pay(gradient):
        return by_products(gradient, features, kernel, wanted)
    return by_library(gradient, features, kernel, wanted)


def products_pay(gradient: Tensor) -> bool:
    """Whether products of matrices take less time, by the numbers of outputs and of places.

    oneDNN takes a CPU's kernel gradient through layouts of its own, at a cost that is the kernel's: 0.1 s a
    call with 5409 outputs, however small the map. The price of products is the map's, in nine copies.
    """
    places = gradient.shape[0] * gradient.shape[2] * gradient.shape[3]
    return gradient.device.type == "cpu" and places <= 2 * gradient.shape[1]


def by_library(
    gradient: Tensor, features: Tensor, kernel: Tensor, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as torch computes it: by oneDNN or cuDNN."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        gradient, features, kernel, [len(kernel)], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, wanted
    )
    return found


def by_products(
    gradient: Tensor, features: Tensor, kernel: Tensor, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as products of matrices with a row for each place: im2col and col2im."""
    rows = gradient.permute(0, 2, 3, 1).flatten(0, 2)
    channels = features.shape[1]
    of_features = of_kernel = of_bias = rows.new_empty(0)
    if wanted[0]:
        of_windows = rows @ kernel.permute(0, 2, 3, 1).flatten(1)
        of_features = _folded(of_windows.view(*_places(features), 3, 3, channels)).to(kernel.dtype)
    if wanted[1]:
        of_kernel = (rows.t() @ _windows(features)).view(-1, 3, 3, channels).permute(0, 3, 1, 2)
    if wanted[2]:
        of_bias = rows.sum(dim=0)
    return of_features, of_kernel, of_bias


def _places(features: Tensor) -> tuple[int, int, int]:
    return features.shape[0], features.shape[2], features.shape[3]


def _windows(features: Tensor) -> Tensor:
    """[B * h * w, 9 * F]: what the convolution sees at each place, row by row of its window."""
    padded = F.pad(features.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))
    image, row, column, channel = padded.stride()
    shape = (*_places(features), 3, 3, padded.shape[3])
    return padded.as_strided(shape, (image, row, column, row, column, channel)).flatten(3).flatten(0, 2)


def _folded(of_windows: Tensor) -> Tensor:
    """[B, F, h, w], channels_last: sums of what [B, h, w, 3, 3, F] windows hold of each place."""
    images, height, width, *_, channels = of_windows.shape
    total = of_windows.new_zeros(
        images, height + 2, width + 2, channels, dtype=torch.promote_types(of_windows.dtype, torch.float32)
    )
    for row in range(3):
        for column in range(3):
            total[:, row : row + height, column : column + width] += of_windows[:, :, :, row, column]
    return total[:, 1:-1, 1:-1].permute(0, 3, 1, 2)
