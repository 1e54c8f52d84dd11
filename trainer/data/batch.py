"""Batches of images and targets, and copies between host and device."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PADDING = -1  # label of padding targets


class Batch(NamedTuple):
    """A batch of images for training or evaluation; targets are padded to the same length."""

    images: Tensor  # uint8 [B, 3, S, S], in the memory format channels_last
    boxes: Tensor  # fp32 [B, M, 4] in pixels of the square; zeros where padded
    labels: Tensor  # int64 [B, M]; PADDING where padded
    color: Tensor | None  # fp32 [B, 3, 4] color maps, or None
    image_ids: list[int]  # on the host
    scales: list[tuple[float, float, float, float]]  # pixels of the square per stored pixel, for x1 y1 x2 y2
    counts: list[int]  # number of targets of each image
    windows: Sequence[tuple[int, int, int, int]] = ()
    """In an evaluation: left, top, width and height of the shown part of each image."""

    def to(self, device: torch.device) -> "Batch":
        """Copy the batch to the device, for use on the current stream.

        A copy from pinned memory neither blocks nor waits for earlier work on that stream.
        """
        if device.type == "cpu":
            return self
        computing, copying = torch.cuda.current_stream(device), _copy_stream(device)

        def copy_to_device(part: Tensor) -> Tensor:
            copy = part.to(device, non_blocking=True)
            # The copying stream must not reuse the memory before the computing stream has used it.
            copy.record_stream(computing)
            return copy

        with torch.cuda.stream(copying):
            images, boxes, labels = (copy_to_device(part) for part in (self.images, self.boxes, self.labels))
            color = copy_to_device(self.color) if self.color is not None else None
        computing.wait_stream(copying)
        return self._replace(images=images, boxes=boxes, labels=labels, color=color)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy values from the host to a device without waiting for earlier work on it."""
    # A copy from memory that is not pinned would wait.
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def copy_to_host(values: Tensor) -> Callable[[], Tensor]:
    """Start a copy to the host; the returned function waits for it and returns the values."""
    if values.device.type != "cuda":
        return lambda: values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> Tensor:
        copied.synchronize()
        return host

    return wait


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a device's stream for copies; always the same one, so that its memory can be reused."""
    return torch.cuda.Stream(device)
