"""Decodes stored samples, and tolerates a few damaged images.

Unless `data.decode_check` is set, sharding reads only headers, so damaged images may reach training.
"""

import logging
import threading
from collections.abc import Sequence

import numpy as np
import simplejpeg
import torch
from torch import Tensor

from trainer.base.errors import DataError
from trainer.base.os_errors import name_resource_errors, raise_if_exhausted
from trainer.data.augmentation import Composition
from trainer.data.problem_counts import max_bad
from trainer.data.samples import Record, Sample
from trainer.data.shard_index import ShardDataset
from trainer.data.transforms import Drawing, View

_MAX_NAMED = 20
_MAX_EXAMPLES = 10
logger = logging.getLogger(__name__)
_REMEDY = (
    "repair the source, or run the shard step again with data.decode_check=true, which leaves such images out"
)


class ScratchBuffer(threading.local):
    """Reusable buffers of each thread, which draws one image at a time."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def __call__(self, use: str, height: int, width: int) -> np.ndarray:
        """Return a contiguous uint8 [height, width, 3]; arrays for the same use share memory."""
        size = height * width * 3
        if len(self._buffers.get(use, ())) < size:
            self._buffers[use] = np.empty(size, np.uint8)
        return self._buffers[use][:size].reshape(height, width, 3)


def decode(jpeg: bytes, width: int, height: int, divisor: int = 1, *, bgr: bool = False) -> Tensor:
    """Decode a JPEG of this size to uint8 RGB (or BGR) [3, H, W] in the memory format channels_last.

    The sides are divided by `divisor` (1, 2, 4 or 8) and rounded up. Raises ValueError if it is damaged.
    """
    pixels = np.empty((-(-height // divisor), -(-width // divisor), 3), np.uint8)
    decode_into(pixels, jpeg, divisor, bgr=bgr)
    return torch.from_numpy(pixels).permute(2, 0, 1)


def decode_into(
    pixels: np.ndarray, jpeg: bytes, divisor: int = 1, *, bgr: bool = False, strict: bool = True
) -> None:
    """Decode a JPEG into contiguous uint8 [H, W, 3] of the divided size; see `decode`.

    If it is damaged and not `strict`, as much as possible is decoded.
    """
    min_sides = pixels.shape[:2] if divisor > 1 else (0, 0)
    try:
        shape = simplejpeg.decode_jpeg(
            jpeg,
            colorspace="BGR" if bgr else "RGB",
            min_height=min_sides[0],
            min_width=min_sides[1],
            buffer=pixels,
            strict=strict,
        ).shape[:2]
    except (ValueError, MemoryError) as error:
        raise_if_exhausted(error)
        # If the image does not fit into the buffer, report the sizes in pixels instead of bytes.
        shape = simplejpeg.decode_jpeg_header(jpeg, *min_sides)[:2]
        if shape == pixels.shape[:2]:
            raise
    if shape != pixels.shape[:2]:
        raise ValueError(f"its size is {shape[1]}x{shape[0]} pixels, not {pixels.shape[1]}x{pixels.shape[0]}")


def read_sample(dataset: ShardDataset, index: int) -> tuple[Tensor, Record]:
    """Read and decode one sample: the image as uint8 RGB [3, H, W], and its record."""
    data, record = dataset.read(index)
    try:
        return decode(data, record["width"], record["height"]), record
    except ValueError as error:
        problem = f"image {record['file_name']} in the shards at {dataset.uri} cannot be decoded: {error}"
        raise DataError(problem, fix=_REMEDY) from None


class Decoder:
    """Decodes and draws the samples of a split for any number of threads, and counts the damaged ones.

    A damaged image is decoded as far as possible; one that cannot be decoded at all becomes gray. Each is
    logged once. The result depends only on the bytes, so a resumed run gets the same images.
    """

    def __init__(self, dataset: ShardDataset, max_bad_fraction: float, *, pin: bool = False) -> None:
        """Create a decoder that allows this share of damaged images; `pin` uses pinned memory."""
        self._dataset, self._max_bad_fraction, self._pin = dataset, max_bad_fraction, pin
        self._damaged: dict[int, str] = {}
        self._lock = threading.Lock()
        self._scratch = ScratchBuffer()

    def allocate_squares(self, count: int, size: int) -> Tensor:
        """Allocate uint8 [count, size, size, 3], which `draw` and `compose` fill."""
        return torch.empty((count, size, size, 3), dtype=torch.uint8, pin_memory=self._pin)

    def draw(
        self, indices: Sequence[int], samples: Sequence[Sample], views: Sequence[View], squares: Tensor
    ) -> list[bool]:
        """Decode samples (by their indices in the split) and draw a view of each into uint8 [N, S, S, 3].

        A sample object that follows itself is decoded once; its views must have the same divisor and no flip.
        Returns which samples could be decoded; the squares of the others are gray.
        """
        # All drawings are prepared before the first image is decoded; see `Drawing`.
        drawings = [
            self._prepare(record, view, canvas)
            for (_, record), view, canvas in zip(samples, views, squares.numpy(), strict=True)
        ]
        decoded: list[bool] = []
        for number, (index, sample, drawing) in enumerate(zip(indices, samples, drawings, strict=True)):
            if number and sample is samples[number - 1] and decoded[-1]:
                drawing.finish()  # Another window of the image that was just decoded.
                decoded.append(True)
            else:
                decoded.append(self._decode_and_draw(index, sample, drawing))
        return decoded

    def compose(
        self, samples: Sequence[Sequence[Sample]], picture: Composition, square: Tensor
    ) -> list[list[bool]]:
        """Decode the samples of each layer of a picture and draw it into uint8 [S, S, 3]; see `draw`."""
        target = square.numpy()
        decoded: list[list[bool]] = []
        for number, (tiles, layer_samples) in enumerate(zip(picture.layers, samples, strict=True)):
            layer = self._scratch("layer", *target.shape[:2]) if number else target
            decoded.append([])
            for tile, sample in zip(tiles, layer_samples, strict=True):
                left, top, width, height = tile.area
                covers_all = (height, width) == layer.shape[:2]
                canvas = layer if covers_all else self._scratch("tile", height, width)
                drawing = self._prepare(sample[1], tile.view, canvas)
                decoded[-1].append(self._decode_and_draw(tile.sample, sample, drawing))
                if not covers_all:
                    layer[top : top + height, left : left + width] = canvas
            if number:
                # Integer arithmetic gives the same result on every machine.
                mean = target * np.uint16(picture.share)
                mean += layer * np.uint16(256 - picture.share)
                mean += 128
                mean >>= 8
                target[...] = mean
        return decoded

    def _prepare(self, record: Record, view: View, canvas: np.ndarray) -> Drawing:
        sides = (-(-record["height"] // view.divisor), -(-record["width"] // view.divisor))
        pixels, spare = self._scratch("image", *sides), self._scratch("spare", *canvas.shape[:2])
        return Drawing(pixels, view, canvas, spare)

    def _decode_and_draw(self, index: int, sample: Sample, drawing: Drawing) -> bool:
        """Decode a sample as far as possible and draw it; return whether any pixels could be decoded."""
        (data, record), view = sample, drawing.view
        try:
            with name_resource_errors(record["file_name"]):
                decode_into(drawing.pixels, data, view.divisor, bgr=view.flip)
        except ValueError as error:
            try:
                decode_into(drawing.pixels, data, view.divisor, bgr=view.flip, strict=False)
            except ValueError:
                self._report_damaged(index, record["file_name"], str(error), "a gray image is used instead")
                drawing.square.fill(view.fill)
                return False
            self._report_damaged(index, record["file_name"], str(error), "its decodable part is used")
        drawing.finish()
        return True

    def _report_damaged(self, index: int, name: str, reason: str, consequence: str) -> None:
        """Count a damaged image, log it the first time, and raise DataError if there are too many."""
        dataset = self._dataset
        shard = dataset.shards[int(dataset.samples["shard"][index])].name
        with self._lock:
            is_new = index not in self._damaged
            self._damaged[index] = f"{name} ({shard}): {reason}"
            damaged, total = len(self._damaged), len(dataset)
            if damaged > max_bad(total, self._max_bad_fraction):
                shown = "".join(f"\n    {text}" for text in list(self._damaged.values())[:_MAX_EXAMPLES])
                where = f"images of {dataset.split} in the shards at {dataset.uri}"
                allowed = f"data.max_bad_fraction {self._max_bad_fraction:g} allows"
                problem = f"{damaged} of {total} {where} are damaged, more than {allowed}"
                fix = f"{_REMEDY}, or raise data.max_bad_fraction"
                raise DataError(f"{problem}; the first ten:{shown}", fix=fix)
        if is_new and damaged <= _MAX_NAMED:
            more = "; `kubedet data verify` names all others" if damaged == _MAX_NAMED else ""
            logger.warning(
                "damaged image %s in %s: %s; %s (%d of %d so far)%s",
                name,
                shard,
                reason,
                consequence,
                damaged,
                total,
                more,
            )
