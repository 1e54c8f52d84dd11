"""Decodes the stored bytes of samples into reused memory, and handles images that are damaged inside.

Sharding reads only headers unless `data.decode_check` is set, so damage inside an image shows up here,
long after. A few such images must not end a training of days, but are reported: see `Decoder`.
"""

import logging
import math
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import simplejpeg
import torch
from torch import Tensor

from trainer.base.errors import DataError
from trainer.base.os_errors import check_resources, name_resource_errors
from trainer.data.augmentation import Composition, Tile
from trainer.data.shard_index import ShardDataset
from trainer.data.transforms import FILL, Drawing, View


class Memory:
    """A pool of buffers for images; a buffer returns to it when nothing references the images any more.

    The system fills fresh memory with zeros first, which takes a twentieth of the time of decoding.
    PyTorch pools pinned memory the same way.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    def __call__(self, shape: tuple[int, ...]) -> Tensor:
        """Return uint8 of a shape, of any content."""
        size = math.prod(shape)
        buffer = self._free.pop() if self._free else np.empty(size, np.uint8)
        if len(buffer) < size:
            buffer = np.empty(size, np.uint8)
        lent = buffer[:size].reshape(shape)
        # All tensors and arrays of these pixels reference `lent`, which is finalised with the last of them.
        weakref.finalize(lent, self._free.append, buffer).atexit = False
        return torch.from_numpy(lent)


class Scratch(threading.local):
    """Buffers of each thread, for the one image that it draws at a time."""

    def __init__(self) -> None:
        self._parts: dict[str, np.ndarray] = {}

    def __call__(self, use: str, height: int, width: int) -> np.ndarray:
        """Return uint8 [height, width, 3], contiguous, of any content: the same memory for the same use."""
        size = height * width * 3
        if len(self._parts.get(use, ())) < size:
            self._parts[use] = np.empty(size, np.uint8)
        return self._parts[use][:size].reshape(height, width, 3)

    def image(self, record: dict[str, Any], view: View) -> np.ndarray:
        """Return memory for a decoded sample, of the size that the view's divisor gives."""
        return self("image", *(-(-record[side] // view.divisor) for side in ("height", "width")))


_NAMED = 20
_EXAMPLES = 10
logger = logging.getLogger(__name__)
_REMEDY = (
    "mend the source, or run the shard step again with data.decode_check=true, which leaves such images out"
)

Sample = tuple[bytes, dict[str, Any]]
"""A stored image, and its record (image_id, file_name, width, height, annotations)."""


def decode(jpeg: bytes, width: int, height: int, divisor: int = 1, *, bgr: bool = False) -> Tensor:
    """Decode a JPEG.

    Args:
        jpeg: its bytes.
        width: of the stored image, pixels.
        height: of the stored image, pixels.
        divisor: 1, 2, 4 or 8: by how much the sides are to be divided, rounded up.
        bgr: give the channels in the reverse order.

    Returns:
        uint8 RGB [3, H, W], of which the channels of a pixel lie side by side.

    Raises:
        ValueError: it is no JPEG of that size, or damaged.
    """
    pixels = np.empty((-(-height // divisor), -(-width // divisor), 3), np.uint8)
    decode_into(pixels, jpeg, divisor, bgr=bgr)
    return torch.from_numpy(pixels).permute(2, 0, 1)


def decode_into(
    pixels: np.ndarray, jpeg: bytes, divisor: int = 1, *, bgr: bool = False, strict: bool = True
) -> None:
    """Decode a JPEG into memory that is there already.

    Args:
        pixels: uint8 [H, W, 3], contiguous, receives the image; H and W are what it must have when its
            sides are divided.
        jpeg: its bytes.
        divisor: see `decode`.
        bgr: see `decode`.
        strict: refuse images that are damaged inside; otherwise they are decoded as far as possible.

    Raises:
        ValueError: it is no JPEG of that size, or damaged.
    """
    least = pixels.shape[:2] if divisor > 1 else (0, 0)
    try:
        shape = simplejpeg.decode_jpeg(
            jpeg, colorspace="BGR" if bgr else "RGB", min_height=least[0], min_width=least[1],
            buffer=pixels, strict=strict,
        ).shape[:2]  # fmt: skip
    except (ValueError, MemoryError) as error:
        check_resources(error)
        # If the image does not fit into the buffer, the decoder's message counts bytes: tell the sizes.
        shape = simplejpeg.decode_jpeg_header(jpeg, *least)[:2]
        if shape == pixels.shape[:2]:
            raise
    if shape != pixels.shape[:2]:
        raise ValueError(f"it is of {shape[1]}x{shape[0]} pixels, not {pixels.shape[1]}x{pixels.shape[0]}")


def decode_sample(uri: str, data: bytes, record: dict[str, Any]) -> Tensor:
    """Decode a sample of the shards at a URI, see `decode`.

    Raises:
        DataError: naming the image, where that fails.
    """
    try:
        return decode(data, record["width"], record["height"])
    except ValueError as error:
        raise DataError(
            f"image {record['file_name']} in the shards at {uri} cannot be decoded: {error}",
            fix=_REMEDY,
        ) from None


def read_sample(dataset: ShardDataset, index: int) -> tuple[Tensor, dict[str, Any]]:
    """Read and decode one sample.

    Returns:
        The image as uint8 RGB [3, H, W], and its record (image_id, width, height, annotations).

    Raises:
        DataError: the image is damaged, naming it.
    """
    data, record = dataset.read(index)
    return decode_sample(dataset.uri, data, record), record


def blend(square: np.ndarray, layer: np.ndarray, share: int) -> None:
    """Blend a layer into a square of the same shape, in integers: the same on every machine.

    Args:
        square: uint8; afterwards the mean of both.
        layer: uint8.
        share: of the square, in 1/256.
    """
    mean = square * np.uint16(share)
    mean += layer * np.uint16(256 - share)
    mean += 128
    mean >>= 8
    square[...] = mean


class Canvas:
    """The images of one batch while they are drawn."""

    def __init__(self, images: Tensor) -> None:
        """Take uint8 [B, S, S, 3], which receive the images."""
        self._images = images

    @property
    def squares(self) -> Any:
        """Where each image is drawn, as a sequence: uint8 [B, S, S, 3]. Its items have the side as length."""
        return self._images.numpy()

    def start(self, tasks: Sequence[Future[Any]]) -> None:
        """Take the tasks that fill the squares, when all are submitted."""

    def take(self) -> Tensor:
        """Return the images, uint8 [B, 3, S, S] in channels_last, when all tasks are done."""
        return self._images.permute(0, 3, 1, 2)


class Decoder:
    """Decodes the samples of a split for any number of threads, and counts the damaged ones.

    A damaged image is decoded as far as possible, as viewers do; without any decodable part it is empty.
    Both are logged the first time. The result depends on the bytes alone, so that a resumed run sees the
    same. If more than a share of all images is damaged, the run ends.
    """

    def __init__(self, dataset: ShardDataset, max_bad_fraction: float, *, pin: bool = False) -> None:
        """Prepare.

        Args:
            dataset: the split.
            max_bad_fraction: the share of its images that may be damaged.
            pin: whether batches are in pinned memory, to be copied to a GPU.
        """
        self._dataset, self._max_bad_fraction, self._pin = dataset, max_bad_fraction, pin
        self._damaged: dict[int, str] = {}
        self._lock = threading.Lock()
        self._memory = Memory()
        self._scratch = Scratch()

    def canvas(self, count: int, size: int) -> Canvas:
        """Return what receives a batch of `count` squares of side `size`, pixels."""
        shape = (count, size, size, 3)
        return Canvas(
            torch.empty(shape, dtype=torch.uint8, pin_memory=True) if self._pin else self._memory(shape)
        )

    def close(self) -> None:
        """End its threads, if it has any."""

    def draw(
        self, indices: Sequence[int], samples: Sequence[Sample], views: Sequence[View], squares: Any
    ) -> list[bool]:
        """Decode some samples and draw a view of each.

        Args:
            indices: of the samples in their split.
            samples: the stored image of each, and its record.
            views: of the images.
            squares: of `Canvas.squares`, receive them; filled with grey if nothing can be decoded.

        Returns:
            Which of them could be decoded.

        Raises:
            DataError: too many images are damaged.
        """
        spare = self._scratch("square", *squares.shape[1:3])
        ready = []
        for (_, record), view, square in zip(samples, views, squares, strict=True):
            pixels = self._scratch.image(record, view)
            ready.append((pixels, Drawing(pixels, view, square, spare)))
        return [
            self._finish(index, sample, view, square, *prepared)
            for index, sample, view, square, prepared in zip(
                indices, samples, views, squares, ready, strict=True
            )
        ]

    def compose(
        self, samples: Sequence[Sequence[Sample]], picture: Composition, square: Any
    ) -> list[list[bool]]:
        """Decode the samples of a picture and draw it.

        Args:
            samples: of each layer's tiles, as for `draw`.
            picture: what is shown of them, and where.
            square: one of `Canvas.squares`, receives it.

        Returns:
            Which of them could be decoded, layer by layer; the tiles of the others are grey.

        Raises:
            DataError: too many images are damaged.
        """
        size = len(square)
        spare, decoded = self._scratch("square", size, size), []
        for number, (tiles, layer_samples) in enumerate(zip(picture.layers, samples, strict=True)):
            layer = self._scratch("layer", size, size) if number else square
            decoded.append(
                [
                    self._draw_tile(tile, sample, layer, spare)
                    for tile, sample in zip(tiles, layer_samples, strict=True)
                ]
            )
            if number:
                blend(square, layer, picture.share)
        return decoded

    def _draw_tile(self, tile: Tile, sample: Sample, layer: np.ndarray, spare: np.ndarray) -> bool:
        left, top, width, height = tile.area
        covers_all = (height, width) == layer.shape[:2]
        canvas = layer if covers_all else self._scratch("tile", height, width)
        pixels = self._scratch.image(sample[1], tile.view)
        drawing = Drawing(pixels, tile.view, canvas, spare)
        decoded = self._finish(tile.sample, sample, tile.view, canvas, pixels, drawing)
        if not covers_all:
            layer[top : top + height, left : left + width] = canvas
        return decoded

    def _finish(
        self, index: int, sample: Sample, view: View, canvas: np.ndarray, pixels: np.ndarray, drawing: Drawing
    ) -> bool:
        """Decode a sample as far as possible and draw it; tell whether any pixels could be decoded."""
        data, record = sample
        decoded, reason = True, ""
        try:
            with name_resource_errors(record["file_name"]):
                decode_into(pixels, data, view.divisor, bgr=view.flip)
        except ValueError as error:
            reason = str(error)
            try:
                decode_into(pixels, data, view.divisor, bgr=view.flip, strict=False)
            except ValueError:
                decoded = False
        if reason:
            self._note(index, record["file_name"], reason, used=decoded)
        if decoded:
            drawing.finish()
        else:
            canvas.fill(FILL)
        return decoded

    def _note(self, index: int, name: str, reason: str, *, used: bool) -> None:
        """Log a damaged image the first time; raise DataError if too many are damaged."""
        dataset = self._dataset
        shard = dataset.shards[int(dataset.samples["shard"][index])].name
        with self._lock:
            if index in self._damaged:
                return
            self._damaged[index] = f"{name} ({shard}): {reason}"
            damaged, total = len(self._damaged), len(dataset)
            if damaged > self._max_bad_fraction * total:
                shown = "".join(f"\n    {text}" for text in list(self._damaged.values())[:_EXAMPLES])
                raise DataError(
                    f"{damaged} of {total} images of {dataset.split} in the shards at {dataset.uri} are "
                    f"damaged, more than data.max_bad_fraction {self._max_bad_fraction:g} allows; the first "
                    f"ten:{shown}",
                    fix=f"{_REMEDY}, or let more pass with data.max_bad_fraction",
                )
        if damaged <= _NAMED:
            more = "; more are counted, and `kubedet data verify` names all" if damaged == _NAMED else ""
            logger.warning(
                "damaged image %s in %s: %s; %s (%d of %d so far)%s", name, shard, reason,
                "it is used as far as it can be decoded" if used else "an empty picture takes its place",
                damaged, total, more,
            )  # fmt: skip
