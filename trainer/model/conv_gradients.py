"""The gradients of a 3x3 convolution with thousands of outputs, such as a class head's last one."""

import torch
import torch.nn.functional as F
from torch import Tensor


def conv_backward(
    gradient: Tensor, features: Tensor, kernel: Tensor, output_mask: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of features [B, F, h, w], kernel [O, F, 3, 3] and bias, for stride 1 and padding 1.

    `gradient` [B, O, h, w] is that of the output; all are channels_last. Gradients that `output_mask` leaves
    out are undefined.
    """
    compute = by_products if products_pay(gradient) else by_library
    return compute(gradient, features, kernel, output_mask)


def products_pay(gradient: Tensor) -> bool:
    """Whether matrix products take less time than the library.

    On a CPU oneDNN converts the kernel gradient's layout, which takes 0.1 s a call with 5409 outputs, however
    small the map. Matrix products copy the map nine times instead.
    """
    places = gradient.shape[0] * gradient.shape[2] * gradient.shape[3]
    return gradient.device.type == "cpu" and places <= 2 * gradient.shape[1]


def by_library(
    gradient: Tensor, features: Tensor, kernel: Tensor, output_mask: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by oneDNN or cuDNN."""
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        gradient, features, kernel, [len(kernel)], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, output_mask
    )
    return gradients


def by_products(
    gradient: Tensor, features: Tensor, kernel: Tensor, output_mask: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by matrix products with a row for each place: im2col and col2im."""
    rows = gradient.permute(0, 2, 3, 1).flatten(0, 2)
    images, channels, height, width = features.shape
    shape = images, height, width, 3, 3, channels
    of_features = of_kernel = of_bias = rows.new_empty(0)
    if output_mask[0]:
        of_windows = (rows @ kernel.permute(0, 2, 3, 1).flatten(1)).view(shape)
        exact = torch.promote_types(of_windows.dtype, torch.float32)
        total = of_windows.new_zeros(images, height + 2, width + 2, channels, dtype=exact)
        for row in range(3):
            for column in range(3):
                total[:, row : row + height, column : column + width] += of_windows[:, :, :, row, column]
        of_features = total[:, 1:-1, 1:-1].permute(0, 3, 1, 2).to(kernel.dtype)
    if output_mask[1]:
        padded = F.pad(features.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))
        image, row_step, column_step, channel = padded.stride()
        windows = padded.as_strided(
            shape, (image, row_step, column_step, row_step, column_step, channel)
        ).reshape(len(rows), -1)
        of_kernel = (rows.t() @ windows).view(-1, 3, 3, channels).permute(0, 3, 1, 2)
    if output_mask[2]:
        of_bias = rows.sum(dim=0)
    return of_features, of_kernel, of_bias
