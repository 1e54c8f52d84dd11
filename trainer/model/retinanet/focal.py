"""Sigmoid focal loss (Lin et al. 2017, arXiv:1708.02002) on integer labels, with its own gradient.

One pass over the logits computes the loss and its gradient, which replaces the logits in memory.
`conv_focal_loss` computes the last convolution, the loss and the gradients for a few images of one level at a
time, so that the network's largest tensor is never allocated as a whole.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.model.fused_functions import fused

ALPHA = 0.25
BACKGROUND = -1  # label of an anchor without an object: all its classes are negative
IGNORED = -2  # label of an anchor that the loss ignores
CHUNK_BYTES = 128 * 1024 * 1024
"""Maximum size of the logits in memory in `conv_focal_loss`, unless one image of one level has more."""


@fused
def focal_and_gradient_(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Return the loss of each row of logits, and overwrite the logits with their gradient.

    Let s be the sigmoid. A positive logit x has z = -x and w = alpha, a negative one z = x and w = 1 - alpha:
    loss = w s(z)^2 softplus(z), d loss / dz = w s(z)^2 (2 s(-z) softplus(z) + s(z)).

    Args:
        logits: [R, C], a row for each anchor; replaced by the gradient of the sum of the result.
        labels: int [R], class of each row; any negative number makes all classes negative.
        weights: [R], fp32 (fp64 for fp64 logits), factor of each row's loss; 0 for an ignored row.

    Returns:
        [R] in the type of the weights.
    """
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    classes = torch.arange(values.shape[1], dtype=labels.dtype, device=labels.device)
    positive = labels[:, None] == classes
    z = torch.where(positive, -values, values)
    e = torch.exp(-z.abs())
    # One division serves the sigmoid and log1p(e) = 2 artanh(t), t = e / (2 + e) <= 1/3, whose
    # series to t^15 is exact to fp32 and takes two thirds of the time of the library's log1p.
    inverse = 1 / ((1 + e) * (2 + e))
    larger, t = (2 + e) * inverse, e * (1 + e) * inverse
    u = t * t
    series = 1 / 9 + u * (1 / 11 + u * (1 / 13 + u * (1 / 15)))
    log1p = 2 * t * (1 + u * (1 / 3 + u * (1 / 5 + u * (1 / 7 + u * series))))
    rising = z >= 0
    sigmoid = torch.where(rising, larger, e * larger)
    opposite = torch.where(rising, e * larger, larger)
    softplus = z.clamp(min=0) + log1p
    factor = torch.where(positive, ALPHA, 1 - ALPHA) * (sigmoid * sigmoid)
    slope = factor * (2 * opposite * softplus + sigmoid) * weights[:, None]
    loss = factor * softplus
    logits.copy_(torch.where(positive, -slope, slope))
    return loss.sum(dim=1) * weights


class _FocalLoss(torch.autograd.Function):
    """Focal loss of logits, which keep their values."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        # The loss scale is not applied yet, so the gradient may be out of the range of fp16.
        dtype = torch.float32 if logits.dtype == torch.float16 else logits.dtype
        gradient = logits.detach().to(dtype, copy=True)
        loss = focal_and_gradient_(gradient, labels, weights).sum()
        ctx.save_for_backward(gradient)
        ctx.dtype = logits.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grad).to(ctx.dtype), None, None


def focal_loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of the focal loss, differentiable once; labels may be IGNORED."""
    loss: Tensor = _FocalLoss.apply(logits, labels, torch.where(labels == IGNORED, 0.0, weights))
    return loss


class _ConvFocalLoss(torch.autograd.Function):
    """Computes the last convolution and focal loss in chunks, with the gradients in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        dtype: torch.dtype,
        weight: Tensor,
        bias: Tensor,
        labels: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
        *levels: Tensor,
    ) -> Tensor:
        kernel, offset = weight.detach().to(dtype), bias.detach().to(dtype)
        output_mask = [any(ctx.needs_input_grad[5:]), *ctx.needs_input_grad[1:3]]
        weight_grad: Tensor | None = None
        bias_grad: Tensor | None = None
        loss = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=weight.device)
        level_grads = []
        for level, level_labels, level_weights in zip(levels, labels, weights, strict=True):
            parts = []
            # Slice the batch so that the logits fit into CHUNK_BYTES, with at least one image.
            image_bytes = weight.shape[0] * level.shape[2] * level.shape[3] * dtype.itemsize
            count = max(1, CHUNK_BYTES // image_bytes)
            for start in range(0, level.shape[0], count):
                images = slice(start, start + count)
                features = level[images].to(dtype).contiguous(memory_format=torch.channels_last)
                logits = F.conv2d(features, kernel, offset, padding=1)
                logits = logits.contiguous(memory_format=torch.channels_last)
                # `rows` are views in channels_last order, so that the gradient is written into `logits`.
                # `data` hides that they are views; otherwise torch would compile separately for square
                # levels.
                rows = logits.permute(0, 2, 3, 1).view(level_labels[images].numel(), -1).data
                chunk = level_labels[images].flatten().data, level_weights[images].flatten().data
                loss += focal_and_gradient_(rows, *chunk).sum()
                if any(output_mask):
                    grads = conv_backward(logits, features, kernel, output_mask)
                    parts.append(grads[0])
                    if output_mask[1]:
                        weight_grad = _add_gradient(weight_grad, grads[1], weight)
                    if output_mask[2]:
                        bias_grad = _add_gradient(bias_grad, grads[2], bias)
            level_grads.append(torch.cat(parts).to(level.dtype) if output_mask[0] else None)
        ctx.save_for_backward(weight_grad, bias_grad, *level_grads)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        scaled = [None if part is None else part * grad for part in ctx.saved_tensors]
        return None, scaled[0], scaled[1], None, None, *scaled[2:]


def _add_gradient(total: Tensor | None, part: Tensor, like: Tensor) -> Tensor:
    """Add a gradient to `total`; if None, start a sum with the type and memory format of `like`."""
    return torch.empty_like(like).copy_(part) if total is None else total.add_(part)


def _merge_levels(levels: list[Tensor], fill: float) -> list[Tensor]:
    """Keep the first two levels [B, X, h, w], and join the others into one map with borders of `fill`.

    With these borders, a 3x3 convolution of the map equals convolutions of the levels. A convolution with
    thousands of channels costs as much for 2x2 as for 8x8 locations, because its weights dominate.
    """
    third, rest = levels[2], levels[3:]
    width = max(level.shape[3] for level in rest)
    # Add one column to the left of the rest, and one row below each.
    column = torch.cat([F.pad(level, (1, width - level.shape[3], 0, 1), value=fill) for level in rest], dim=2)
    height = max(third.shape[2], column.shape[2])
    sides = [F.pad(side, (0, 0, 0, height - side.shape[2]), value=fill) for side in (third, column)]
    return [*levels[:2], torch.cat(sides, dim=3)]


def _merge_rows(rows: list[Tensor], levels: list[Tensor], fill: float) -> list[Tensor]:
    """Arrange values of anchors, [B, h * w * A] of each level, like the maps of `_merge_levels`."""
    maps = [
        row.view(len(row), *level.shape[2:], -1).permute(0, 3, 1, 2)
        for row, level in zip(rows, levels, strict=True)
    ]
    return [merged.permute(0, 2, 3, 1).flatten(1) for merged in _merge_levels(maps, fill)]


def conv_focal_loss(
    levels: list[Tensor], weight: Tensor, bias: Tensor, labels: list[Tensor], weights: list[Tensor]
) -> Tensor:
    """Return the focal loss of the class head's last convolution, computed for a few images at a time.

    The result is an fp32 scalar, computed in autocast's type and differentiable once. fp16 is not supported;
    see `supports_autocast`. `levels` are features [B, F, h, w], `weight` is [A * C, F, 3, 3]. `labels` (a
    class, BACKGROUND or IGNORED) and `weights` (fp32 factors of the loss) are [B, h * w * A] for each level.
    """
    kind = weight.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    counted = [
        torch.where(part == IGNORED, 0.0, factor) for part, factor in zip(labels, weights, strict=True)
    ]
    if len(levels) > 3:
        labels = _merge_rows(labels, levels, IGNORED)
        counted = _merge_rows(counted, levels, 0.0)
        levels = _merge_levels(levels, 0.0)
    inputs = dtype, weight, bias, tuple(labels), tuple(counted)
    loss: Tensor = _ConvFocalLoss.apply(*inputs, *levels)
    return loss


def supports_autocast(device: torch.device) -> bool:
    """Return whether `conv_focal_loss` supports the current autocast type: any but fp16.

    It computes gradients before the loss scale is known, so they may be out of the range of fp16.
    """
    enabled = torch.is_autocast_enabled(device.type)
    return not (enabled and torch.get_autocast_dtype(device.type) == torch.float16)


def conv_backward(
    gradient: Tensor, features: Tensor, kernel: Tensor, output_mask: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of features [B, F, h, w], kernel [O, F, 3, 3] and bias for stride 1 and padding 1.

    `gradient` [B, O, h, w] is the output's gradient; all tensors are channels_last. Gradients that
    `output_mask` excludes are undefined.
    """
    if matmul_is_faster(gradient):
        return conv_backward_by_matmul(gradient, features, kernel, output_mask)
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        gradient, features, kernel, [len(kernel)], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, output_mask
    )
    return gradients


def matmul_is_faster(gradient: Tensor) -> bool:
    """Return whether matrix products are faster than the library (oneDNN or cuDNN).

    On a CPU, oneDNN converts the layout of the kernel's gradient, which takes 0.1 s per call with 5409
    outputs even for a small map. Matrix products copy the map nine times instead.
    """
    places = gradient.shape[0] * gradient.shape[2] * gradient.shape[3]
    return gradient.device.type == "cpu" and places <= 2 * gradient.shape[1]


def conv_backward_by_matmul(
    gradient: Tensor, features: Tensor, kernel: Tensor, output_mask: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of `conv_backward` by matrix products (im2col and col2im)."""
    rows = gradient.permute(0, 2, 3, 1).flatten(0, 2)
    images, channels, height, width = features.shape
    shape = images, height, width, 3, 3, channels
    features_grad = kernel_grad = bias_grad = rows.new_empty(0)
    if output_mask[0]:
        window_grads = (rows @ kernel.permute(0, 2, 3, 1).flatten(1)).view(shape)
        exact = torch.promote_types(window_grads.dtype, torch.float32)
        total = window_grads.new_zeros(images, height + 2, width + 2, channels, dtype=exact)
        for row in range(3):
            for column in range(3):
                total[:, row : row + height, column : column + width] += window_grads[:, :, :, row, column]
        features_grad = total[:, 1:-1, 1:-1].permute(0, 3, 1, 2).to(kernel.dtype)
    if output_mask[1]:
        padded = F.pad(features.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))
        image, row_step, column_step, channel = padded.stride()
        windows = padded.as_strided(
            shape, (image, row_step, column_step, row_step, column_step, channel)
        ).reshape(len(rows), -1)
        kernel_grad = (rows.t() @ windows).view(-1, 3, 3, channels).permute(0, 3, 1, 2)
    if output_mask[2]:
        bias_grad = rows.sum(dim=0)
    return features_grad, kernel_grad, bias_grad
