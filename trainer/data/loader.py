"""Batches for training and for evaluation, decoded by threads ahead of the device.

Decoding and resizing release the interpreter's lock, so threads reach nearly the decoder's
limit without the copies and start-up time of worker processes. They live as long as the run.
"""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
import torch
from torch import Tensor

from trainer.config import LoaderConfig
from trainer.data.order import SampleStream, forward_passes, rank_positions
from trainer.data.shard_index import ShardDataset
from trainer.data.transforms import Sample, augment, color_map, letterbox
from trainer.distributed import World
from trainer.errors import DataError
from trainer.model.loss import PADDING


class Batch(NamedTuple):
    """What a training step or an evaluation step reads."""

    images: Tensor
    """uint8 [B, 3, S, S]."""
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
        pending: deque[list[Future[tuple[int, Sample, np.ndarray | None]]]] = deque()
        source = self._positions(start)
        try:
            while True:
                while len(pending) < self._config.prefetch:
                    pending.append([self._pool.submit(self._load, *item) for item in next(source)])
                loaded = [future.result() for future in pending.popleft()]
                yield collate(loaded, pin=self._world.device.type == "cuda").to(self._world.device)
        finally:
            for futures in pending:
                for future in futures:
                    future.cancel()

    def close(self) -> None:
        """End the decoding threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _positions(self, start: int) -> Iterator[list[tuple[int, int]]]:
        while True:
            for positions in rank_positions(
                start, self._global_batch, self._batch_size, world_size=self._world.size,
                rank=self._world.rank,
            ):  # fmt: skip
                yield [self._stream[position] for position in positions]
            start += self._global_batch

    def _load(self, epoch: int, index: int) -> tuple[int, Sample, np.ndarray | None]:
        # The randomness of a sample depends on nothing but seed, epoch and index, so that a
        # resumed run, or one on another number of ranks, sees the same pictures.
        generator = np.random.default_rng([self._seed, epoch, index])
        image, record = read_sample(self._dataset, index)
        boxes, labels = targets(record)
        sample = augment(image, boxes, labels, self._config, generator)
        return record["image_id"], sample, color_map(self._config, generator)


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
            pending: deque[list[Future[tuple[int, Sample, np.ndarray | None]]]] = deque()
            for batch in self._batches:
                pending.append([pool.submit(self._load, index) for index in batch])
                if len(pending) > self._config.prefetch:
                    yield self._collate(pending.popleft())
            while pending:
                yield self._collate(pending.popleft())

    def _load(self, index: int) -> tuple[int, Sample, np.ndarray | None]:
        image, record = read_sample(self._dataset, index)
        square, scale = letterbox(image, self._config.image_size)
        nothing = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
        return record["image_id"], Sample(square, *nothing, scale), None

    def _collate(self, futures: list[Future[tuple[int, Sample, np.ndarray | None]]]) -> Batch:
        pin = self._world.device.type == "cuda"
        return collate([future.result() for future in futures], pin=pin).to(self._world.device)


def read_sample(dataset: ShardDataset, index: int) -> tuple[Tensor, dict[str, Any]]:
    """Read and decode one sample.

    Returns:
        The image as uint8 RGB [3, H, W], and its record (image_id, width, height, annotations).

    Raises:
        DataError: the stored bytes are no JPEG any more, naming the image.
    """
    data, record = dataset.read(index)
    try:
        pixels = simplejpeg.decode_jpeg(data, colorspace="RGB")
    except ValueError as error:
        raise DataError(
            f"image {record['file_name']} in the shards at {dataset.uri} cannot be decoded: {error}",
            fix="the shard has changed since it was written: delete that folder and run the shard step again",
        ) from None
    return torch.from_numpy(pixels).permute(2, 0, 1), record


def targets(record: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Boxes fp32 [M, 4] (x1 y1 x2 y2) and labels int64 [M] of a sample, crowd regions left out."""
    kept = [item for item in record["annotations"] if not item["iscrowd"]]
    boxes = torch.tensor([item["bbox"] for item in kept], dtype=torch.float32).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    return boxes, torch.tensor([item["category_id"] for item in kept], dtype=torch.int64)


def collate(loaded: list[tuple[int, Sample, np.ndarray | None]], *, pin: bool) -> Batch:
    """Put samples into one batch, targets padded to the longest (at least one row)."""
    samples = [sample for _, sample, _ in loaded]
    rows = max(1, *(len(sample.labels) for sample in samples))
    boxes = torch.zeros(len(samples), rows, 4)
    labels = torch.full((len(samples), rows), PADDING, dtype=torch.int64)
    for row, sample in enumerate(samples):
        boxes[row, : len(sample.labels)] = sample.boxes
        labels[row, : len(sample.labels)] = sample.labels
    maps = [color for _, _, color in loaded if color is not None]
    color = torch.from_numpy(np.stack(maps)) if maps else None
    images = torch.stack([sample.image for sample in samples])
    if pin:
        images, boxes, labels = images.pin_memory(), boxes.pin_memory(), labels.pin_memory()
        color = color.pin_memory() if color is not None else None
    ids, scales = [image_id for image_id, _, _ in loaded], [sample.scale for sample in samples]
    return Batch(images, boxes, labels, color, ids, scales)
