"""Batches for training and for evaluation, decoded by threads ahead of the device.

Decoding and resizing release the interpreter's lock, so threads reach nearly the decoder's
limit without the copies and start-up time of worker processes. They live as long as the run.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import simplejpeg
import torch
from torch import Tensor

from trainer.config import LoaderConfig
from trainer.data.order import SampleStream, forward_passes, rank_positions
from trainer.data.shard_index import ShardDataset
from trainer.data.transforms import (
    Sample,
    View,
    color_map,
    move_boxes,
    random_view,
    render,
    whole_view,
)
from trainer.distributed import World
from trainer.errors import DataError
from trainer.model.loss import PADDING

_ANNOUNCEMENTS = 8
"""How often in a window of shards it is said which are read next."""
_BATCHES_AHEAD = 64
"""Batches of an evaluation after which that is said anew."""


class Batch(NamedTuple):
    """What a training step or an evaluation step reads."""

    images: Tensor
    """uint8 [B, 3, S, S], in the memory format channels_last."""
    boxes: Tensor
    """fp32 [B, M, 4] in pixels of the square; zeros where padded."""
    labels: Tensor
    """int64 [B, M]; PADDING where padded."""
    color: Tensor | None
    """fp32 [B, 3, 4] colour maps, or None."""
    image_ids: list[int]
    """Ids of the images, on the host."""
    scales: list[float]
    """Pixels of the square for one pixel of each stored image."""

    def to(self, device: torch.device) -> "Batch":
        """Copy to the device; from pinned memory the copy does not block."""
        if device.type == "cpu":
            return self
        color = self.color.to(device, non_blocking=True) if self.color is not None else None
        images, boxes, labels = (
            part.to(device, non_blocking=True) for part in (self.images, self.boxes, self.labels)
        )
        return Batch(images, boxes, labels, color, self.image_ids, self.scales)


Loaded: TypeAlias = tuple[int, Sample, np.ndarray | None]
"""Image id, sample and colour map."""


class TrainLoader:
    """Training batches from a position of the sample stream on, without end.

    Iterating gives the forward passes of one rank in order; `passes` of them make a step.
    """

    def __init__(
        self, dataset: ShardDataset, config: LoaderConfig, *, global_batch: int, batch_size: int, seed: int,
        world: World,
    ) -> None:  # fmt: skip
        self._dataset, self._config, self._world = dataset, config, world
        self._global_batch, self._batch_size, self._seed = global_batch, batch_size, seed
        self.passes = forward_passes(global_batch, batch_size, world.size)
        self._stream = SampleStream(dataset.shard_sizes, seed)
        self._pool = ThreadPoolExecutor(config.workers, thread_name_prefix="decode")

    def batches(self, start: int) -> Generator[Batch, None, None]:
        """Batches of this rank from stream position `start` on, on the device."""
        pending: deque[_Pending] = deque()
        source = self._positions(start)
        try:
            while True:
                while len(pending) < self._config.prefetch:
                    pending.append(_Pending(self._pool, self._load, next(source), self._config, self._world))
                yield pending.popleft().batch(self._world.device)
        finally:
            for batch in pending:
                batch.cancel()

    def close(self) -> None:
        """End the decoding threads, and let go of the shards."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._dataset.expect(np.zeros(0, np.int64))

    def _positions(self, start: int) -> Iterator[list[tuple[int, int]]]:
        announced = start
        while True:
            if start >= announced:
                ahead = self._stream.ahead(start)
                self._dataset.expect(ahead)
                announced = start + max(1, len(ahead) // _ANNOUNCEMENTS)
            for positions in rank_positions(
                start, self._global_batch, self._batch_size, world_size=self._world.size,
                rank=self._world.rank,
            ):  # fmt: skip
                yield [self._stream[position] for position in positions]
            start += self._global_batch

    def _load(self, place: tuple[int, int], square: np.ndarray) -> Loaded:
        # The randomness of a sample depends on nothing but seed, epoch and index, so that a
        # resumed run, or one on another number of ranks, sees the same pictures.
        epoch, index = place
        generator = np.random.default_rng([self._seed, epoch, index])
        data, record = self._dataset.read(index)
        view = random_view(record["width"], record["height"], self._config, generator)
        _draw(self._dataset, data, record, view, square)
        boxes, labels = move_boxes(*targets(record), view, len(square))
        color = color_map(self._config, generator)
        return record["image_id"], Sample(_planes(square), boxes, labels, view.scale), color


class EvalLoader:
    """The images of a split for evaluation, each once over all ranks: rank, rank + size, ..."""

    def __init__(self, dataset: ShardDataset, config: LoaderConfig, *, batch_size: int, world: World) -> None:
        self._dataset, self._config, self._world = dataset, config, world
        indices = range(world.rank, len(dataset), world.size)
        self._batches = [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        with ThreadPoolExecutor(self._config.workers, thread_name_prefix="decode") as pool:
            pending: deque[_Pending] = deque()
            for number, indices in enumerate(self._batches):
                if number % _BATCHES_AHEAD == 0:
                    coming = self._batches[number : number + 4 * _BATCHES_AHEAD]
                    self._dataset.expect(np.concatenate(coming))
                pending.append(_Pending(pool, self._load, indices, self._config, self._world))
                if len(pending) > self._config.prefetch:
                    yield pending.popleft().batch(self._world.device)
            while pending:
                yield pending.popleft().batch(self._world.device)
            self._dataset.expect(np.zeros(0, np.int64))

    def _load(self, index: int, square: np.ndarray) -> Loaded:
        data, record = self._dataset.read(index)
        view = whole_view(record["width"], record["height"], len(square))
        _draw(self._dataset, data, record, view, square)
        nothing = np.zeros((0, 4), np.float32), np.zeros(0, np.int64)
        return record["image_id"], Sample(_planes(square), *nothing, view.scale), None


class _Pending:
    """A batch whose images are being drawn, each straight to its place in it."""

    def __init__(
        self, pool: ThreadPoolExecutor, load: Callable[[Any, np.ndarray], Loaded], places: Sequence[Any],
        config: LoaderConfig, world: World,
    ) -> None:  # fmt: skip
        size = config.image_size
        self._pin = world.device.type == "cuda"
        self._images = torch.empty(len(places), size, size, 3, dtype=torch.uint8, pin_memory=self._pin)
        squares = self._images.numpy()
        self._futures = [pool.submit(load, *pair) for pair in zip(places, squares, strict=True)]

    def batch(self, device: torch.device) -> Batch:
        """Wait for the images; give the batch on a device."""
        # Woken once, not for every image: the two threads would take the interpreter's lock from each other.
        wait(self._futures, return_when=FIRST_EXCEPTION)
        loaded = [future.result() for future in self._futures]
        return collate(loaded, pin=self._pin, images=self._images.permute(0, 3, 1, 2)).to(device)

    def cancel(self) -> None:
        """Leave out what was not begun."""
        for future in self._futures:
            future.cancel()


def _draw(dataset: ShardDataset, data: bytes, record: dict[str, Any], view: View, square: np.ndarray) -> None:
    """Decode a sample and draw a view of it."""
    render(decode_sample(dataset.uri, data, record, view.divisor), view, square)


def _planes(square: np.ndarray) -> Tensor:
    """The pixels [S, S, 3] as [3, S, S], without a copy."""
    return torch.from_numpy(square).permute(2, 0, 1)


def read_sample(dataset: ShardDataset, index: int) -> tuple[Tensor, dict[str, Any]]:
    """Read and decode one sample.

    Returns:
        The image as uint8 RGB [3, H, W], and its record (image_id, width, height, annotations).

    Raises:
        DataError: the stored bytes are no JPEG any more, naming the image.
    """
    data, record = dataset.read(index)
    return decode_sample(dataset.uri, data, record), record


def decode(jpeg: bytes, width: int, height: int, divisor: int = 1) -> Tensor:
    """Decode a JPEG.

    Args:
        jpeg: its bytes.
        width: of the stored image, pixels.
        height: of the stored image, pixels.
        divisor: 1, 2, 4 or 8: by how much the sides are to be divided, rounded up.

    Returns:
        uint8 RGB [3, H, W].

    Raises:
        ValueError: it is no JPEG of that size.
    """
    wanted = (-(-height // divisor), -(-width // divisor))
    least = wanted if divisor > 1 else (0, 0)
    pixels = simplejpeg.decode_jpeg(jpeg, colorspace="RGB", min_height=least[0], min_width=least[1])
    if pixels.shape[:2] != wanted:
        raise ValueError(f"it is of {pixels.shape[1]}x{pixels.shape[0]} pixels, not {wanted[1]}x{wanted[0]}")
    return torch.from_numpy(pixels).permute(2, 0, 1)


def decode_sample(uri: str, data: bytes, record: dict[str, Any], divisor: int = 1) -> Tensor:
    """Decode a sample of the shards at a URI, see `decode`.

    Raises:
        DataError: naming the image, where that fails.
    """
    try:
        return decode(data, record["width"], record["height"], divisor)
    except ValueError as error:
        raise DataError(
            f"image {record['file_name']} in the shards at {uri} cannot be decoded: {error}",
            fix="the shard has changed since it was written: delete that folder and run the shard step again",
        ) from None


def targets(record: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Boxes fp32 [M, 4] (x1 y1 x2 y2) and labels int64 [M] of a sample, crowd regions left out."""
    kept = [item for item in record["annotations"] if not item["iscrowd"]]
    boxes = np.array([item["bbox"] for item in kept], np.float32).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    return boxes, np.array([item["category_id"] for item in kept], np.int64)


def collate(loaded: Sequence[Loaded], *, pin: bool, images: Tensor | None = None) -> Batch:
    """Put samples into one batch, targets padded to the longest (at least one row).

    Args:
        loaded: image id, sample and colour map of each.
        pin: whether to use memory from which a GPU copies by itself.
        images: uint8 [B, 3, S, S], the samples' images, where they lie side by side already.
    """
    samples = [sample for _, sample, _ in loaded]
    rows = max(1, *(len(sample.labels) for sample in samples))
    # Filled with NumPy: for a handful of numbers each operation of torch costs several times as much.
    padded = np.zeros((len(samples), rows, 4), np.float32)
    names = np.full((len(samples), rows), PADDING, np.int64)
    for row, sample in enumerate(samples):
        padded[row, : len(sample.labels)] = sample.boxes
        names[row, : len(sample.labels)] = sample.labels
    boxes, labels = torch.from_numpy(padded), torch.from_numpy(names)
    maps = [color for _, _, color in loaded if color is not None]
    color = torch.from_numpy(np.stack(maps)) if maps else None
    if images is None:
        stacked = torch.stack([sample.image for sample in samples])
        images = stacked.pin_memory() if pin else stacked
    if pin:
        boxes, labels = boxes.pin_memory(), labels.pin_memory()
        color = color.pin_memory() if color is not None else None
    ids, scales = [image_id for image_id, _, _ in loaded], [sample.scale for sample in samples]
    return Batch(images, boxes, labels, color, ids, scales)
