"""Loads batches for training and evaluation; threads decode images ahead of the device.

Decoding and resizing release the GIL, so threads are nearly as fast as worker processes, and need neither
their copies nor their start-up time.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.config.schema import LoaderConfig
from trainer.data.augmentation import Augmentation, PicturePlan
from trainer.data.batch import PADDING, Batch
from trainer.data.decoding import Decoder
from trainer.data.sample_order import SamplePosition, SampleStream, count_forward_passes, rank_positions
from trainer.data.shard_index import ShardDataset
from trainer.data.tiles import Window, tiling
from trainer.data.transforms import Scales, full_view, random_numbers, transform_boxes
from trainer.launching.distributed import World

_ANNOUNCEMENTS_PER_WINDOW = 8  # how often per window of shards the next ones are prefetched
_BATCHES_AHEAD = 64  # batches of an evaluation after which the next shards are prefetched
_MAX_IMAGES_PER_TASK = 8  # most images in one task of a thread
_NO_TARGETS = np.zeros((0, 4), np.float32), np.zeros(0, np.int64)


class LoadedSample(NamedTuple):
    """A sample in a batch, without its pixels."""

    image_id: int
    boxes: np.ndarray  # fp32 [M, 4], x1 y1 x2 y2 in pixels of the square
    labels: np.ndarray  # int64 [M]
    scales: Scales  # pixels of the square per pixel of the stored image
    color: np.ndarray | None  # fp32 [3, 4], or None
    window: Window = (0, 0, 0, 0)  # part of the image that is shown, in an evaluation


class TrainLoader:
    """Yields endless training batches of one rank; a step consists of `pass_count` batches."""

    def __init__(
        self,
        dataset: ShardDataset,
        config: LoaderConfig,
        *,
        global_batch: int,
        batch_size: int,
        seed: int,
        world: World,
        max_bad_fraction: float,
        epochs: int | None = None,
        weights: np.ndarray | None = None,
    ) -> None:
        """Set the samples per step of all ranks (`global_batch`), and per pass at most (`batch_size`).

        Up to `max_bad_fraction` of the samples may be damaged. `epochs` is None for endless training. For
        `weights` see `image_weights`.
        """
        self._dataset, self._config, self._world = dataset, config, world
        self._global_batch, self._batch_size, self._seed = global_batch, batch_size, seed
        self.pass_count = count_forward_passes(global_batch, batch_size, world.size)
        self._stream = SampleStream(dataset.shard_sizes, seed, weights)
        self._augmentation = Augmentation(config, self._stream, dataset.sizes, seed=seed, epochs=epochs)
        self._decoder = Decoder(dataset, max_bad_fraction, pin=world.device.type == "cuda")
        self._pool = ThreadPoolExecutor(config.workers, thread_name_prefix="decode")

    def batches(self, start: int) -> Generator[Batch, None, None]:
        """Yield batches on the device, beginning with stream position `start`."""
        pending: deque[_PendingBatch] = deque()
        source, config = self._positions(start), self._config
        try:
            while True:
                while len(pending) < config.prefetch:
                    size, plans = next(source)
                    batch = _PendingBatch(self._pool, self._load, plans, size, config, self._decoder)
                    pending.append(batch)
                yield pending.popleft().wait(self._world.device)
        finally:
            for batch in pending:
                batch.cancel()

    def start_plain_epochs(self, epoch: int) -> None:
        """Start the plain epochs at `epoch`, of which no sample was prefetched yet; -1 changes nothing."""
        self._augmentation.start_plain_epochs(epoch)

    def close(self) -> None:
        """Stop the decoding threads, and close the shards."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._dataset.prefetch(np.zeros(0, np.int64))

    def _positions(self, start: int) -> Iterator[tuple[int, list[PicturePlan]]]:
        """Yield the side of the square and the plans of the samples of each forward pass."""
        announced = start
        while True:
            if start >= announced:
                ahead = self._stream.next_window(start)
                self._dataset.prefetch(ahead)
                announced = start + max(1, len(ahead) // _ANNOUNCEMENTS_PER_WINDOW)
            step, epoch = start // self._global_batch, start // len(self._dataset)
            size = self._augmentation.input_size(step, epoch)
            for positions in rank_positions(
                start,
                self._global_batch,
                self._batch_size,
                world_size=self._world.size,
                rank=self._world.rank,
            ):
                yield size, [self._augmentation.plan(position) for position in positions]
            start += self._global_batch

    def _load(self, plans: Sequence[PicturePlan], squares: Tensor) -> list[LoadedSample]:
        pictures = [self._augmentation.compose(plan, squares.shape[1]) for plan in plans]
        if not any(pictures):
            return self._load_single([plan.position for plan in plans], squares)
        loaded: list[LoadedSample] = []
        for number, (plan, picture) in enumerate(zip(plans, pictures, strict=True)):
            if not picture:
                loaded += self._load_single([plan.position], squares[number : number + 1])
                continue
            samples = [[self._dataset.read(tile.sample) for tile in tiles] for tiles in picture.layers]
            decoded = self._decoder.compose(samples, picture, squares[number])
            boxes, labels = [_NO_TARGETS[0]], [_NO_TARGETS[1]]
            for tiles, layer_samples, layer_decoded in zip(picture.layers, samples, decoded, strict=True):
                for tile, (_, record), sound in zip(tiles, layer_samples, layer_decoded, strict=True):
                    if sound:
                        moved, label = transform_boxes(record["annotations"], tile.view, tile.area[2:])
                        boxes.append(moved + np.array(tile.area[:2] * 2, np.float32))
                        labels.append(label)
            color = self._augmentation.color(plan.position, random_numbers(self._seed, *plan.position))
            image_id, scales = samples[0][0][1]["image_id"], picture.layers[0][0].view.scales
            targets = np.concatenate(boxes), np.concatenate(labels)
            loaded.append(LoadedSample(image_id, *targets, scales, color))
        return loaded

    def _load_single(self, places: Sequence[SamplePosition], squares: Tensor) -> list[LoadedSample]:
        """Load samples that are not combined with others."""
        # Each step is done for all images, because decoding evicts everything else from the processor's
        # caches, and small steps right after it take several times as long.
        augmentation, count = self._augmentation, len(self._dataset)
        canvas = (squares.shape[1], squares.shape[1])
        indices = [index % count for _, index in places]
        samples = [self._dataset.read(index) for index in indices]
        # Random numbers depend only on seed, epoch and index, so that a resumed run, or one on another
        # number of ranks, gets the same pictures.
        draws = [random_numbers(self._seed, *place) for place in places]
        views = [
            augmentation.view(place, record, numbers, squares.shape[1])
            for (_, record), place, numbers in zip(samples, places, draws, strict=True)
        ]
        loaded = [
            LoadedSample(
                record["image_id"],
                *transform_boxes(record["annotations"], view, canvas),
                view.scales,
                augmentation.color(place, numbers),
            )
            for (_, record), place, view, numbers in zip(samples, places, views, draws, strict=True)
        ]
        decoded = self._decoder.draw(indices, samples, views, squares)
        return [
            sample if sound else sample._replace(boxes=_NO_TARGETS[0], labels=_NO_TARGETS[1])
            for sample, sound in zip(loaded, decoded, strict=True)
        ]


class EvalLoader:
    """Yields the images of a split, or their tiles, for evaluation; every image is on one rank."""

    def __init__(
        self,
        dataset: ShardDataset,
        config: LoaderConfig,
        *,
        batch_size: int,
        world: World,
        max_bad_fraction: float,
        tile: tuple[int, float] = (0, 0.0),
    ) -> None:
        """Plan the batches; `tile` is the side and overlap of the tiles (see `tiles.tiling`)."""
        self._dataset, self._config, self._world = dataset, config, world
        self._decoder = Decoder(dataset, max_bad_fraction, pin=world.device.type == "cuda")
        sizes = list(enumerate(dataset.sizes.tolist()))[world.rank :: world.size]
        pictures = [
            (index, window) for index, (width, height) in sizes for window in tiling(width, height, *tile)
        ]
        self.picture_count = len(pictures)
        self._batches = [pictures[i : i + batch_size] for i in range(0, len(pictures), batch_size)]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        config, pending = self._config, deque[_PendingBatch]()
        with ThreadPoolExecutor(config.workers, thread_name_prefix="decode") as pool:
            for number, pictures in enumerate(self._batches):
                if number % _BATCHES_AHEAD == 0:
                    coming = self._batches[number : number + 4 * _BATCHES_AHEAD]
                    self._dataset.prefetch(np.array([index for batch in coming for index, _ in batch]))
                size = config.image_size
                pending.append(_PendingBatch(pool, self._load, pictures, size, config, self._decoder))
                if len(pending) > config.prefetch:
                    yield pending.popleft().wait(self._world.device)
            while pending:
                yield pending.popleft().wait(self._world.device)
            self._dataset.prefetch(np.zeros(0, np.int64))

    def _load(self, pictures: Sequence[tuple[int, Window]], squares: Tensor) -> list[LoadedSample]:
        indices = [index for index, _ in pictures]
        read = {index: self._dataset.read(index) for index in dict.fromkeys(indices)}
        samples, square = [read[index] for index in indices], self._config.network_input
        views = [
            full_view(width, height, square)._replace(crop=(left, top, width, height))
            for _, (left, top, width, height) in pictures
        ]
        self._decoder.draw(indices, samples, views, squares)
        return [
            LoadedSample(record["image_id"], *_NO_TARGETS, view.scales, None, window=view.crop)
            for (_, record), view in zip(samples, views, strict=True)
        ]


class _PendingBatch:
    """A batch whose images are being decoded, directly into its memory."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        load: Callable[[Sequence[Any], Tensor], list[LoadedSample]],
        places: Sequence[Any],
        size: int,
        config: LoaderConfig,
        decoder: Decoder,
    ) -> None:
        # As many images per task as possible while every thread has work.
        count = min(_MAX_IMAGES_PER_TASK, -(-len(places) * config.prefetch // config.workers))
        parts = [slice(first, first + count) for first in range(0, len(places), count)]
        self._squares = decoder.allocate_squares(len(places), size)
        self._futures = [pool.submit(load, places[part], self._squares[part]) for part in parts]

    def wait(self, device: torch.device) -> Batch:
        """Wait for the images, and return the batch on a device."""
        # Wait for the last future first: each wake-up costs time, as all threads compete for the GIL.
        parts = [future.result() for future in reversed(self._futures)][::-1]
        loaded = [sample for part in parts for sample in part]
        rows = max(1, *(len(sample.labels) for sample in loaded))
        # NumPy, because torch's operations on a few numbers take several times as long.
        boxes = np.zeros((len(loaded), rows, 4), np.float32)
        labels = np.full((len(loaded), rows), PADDING, np.int64)
        for row, sample in enumerate(loaded):
            boxes[row, : len(sample.labels)] = sample.boxes
            labels[row, : len(sample.labels)] = sample.labels
        colors = [sample.color for sample in loaded if sample.color is not None]

        def tensor(values: np.ndarray) -> Tensor:
            made = torch.from_numpy(values)
            return made.pin_memory() if device.type == "cuda" else made

        return Batch(
            self._squares.permute(0, 3, 1, 2),
            tensor(boxes),
            tensor(labels),
            tensor(np.stack(colors)) if colors else None,
            image_ids=[sample.image_id for sample in loaded],
            scales=[sample.scales for sample in loaded],
            counts=[len(sample.labels) for sample in loaded],
            windows=[sample.window for sample in loaded],
        ).to(device)

    def cancel(self) -> None:
        """Cancel the tasks that have not begun."""
        for future in self._futures:
            future.cancel()
