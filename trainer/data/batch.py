"""What a training step reads: a batch of images with its targets, padded to one length."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PADDING = -1  # label of a target that is only padding


class Batch(NamedTuple):
    """What a training step or an evaluation step reads."""

    images: Tensor  # uint8 [B, 3, S, S], in the memory format channels_last
    boxes: Tensor  # fp32 [B, M, 4] in pixels of the square; zeros where padded
    labels: Tensor  # int64 [B, M]; PADDING where padded
    color: Tensor | None  # fp32 [B, 3, 4] color maps, or None
    image_ids: list[int]  # ids of the images, on the host
    scales: list[tuple[float, float, float, float]]  # pixels of the square for a stored one, x y x y
    counts: list[int]  # targets of each image, on the host
    windows: Sequence[tuple[int, int, int, int]] = ()
    """Left, top, width and height of each picture in its image, in an evaluation."""

    def to(self, device: torch.device) -> "Batch":
        """Copy to the device, for its current stream.

        From pinned memory the copy does not block, nor wait for earlier work of the stream.
        """
        if device.type == "cpu":
            return self
        computing, copying = torch.cuda.current_stream(device), _copy_stream(device)

        def copy_to_device(part: Tensor) -> Tensor:
            copy = part.to(device, non_blocking=True)
            # Its memory belongs to the copying stream, which must not reuse it before the other is done.
            copy.record_stream(computing)
            return copy

        with torch.cuda.stream(copying):
            images, boxes, labels = (copy_to_device(part) for part in (self.images, self.boxes, self.labels))
            color = copy_to_device(self.color) if self.color is not None else None
        computing.wait_stream(copying)
        return self._replace(images=images, boxes=boxes, labels=labels, color=color)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy values of the host to a device without waiting for its earlier work."""
    # From other memory than pinned memory the copy would wait.
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
    """The stream on which batches are copied; always the same, as memory is reused by its own stream."""
    return torch.cuda.Stream(device)
