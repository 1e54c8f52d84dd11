"""Batches for training and for evaluation, decoded by threads ahead of the device.

Decoding and resizing release the interpreter's lock, so threads reach nearly the decoder's
limit without the copies and start-up time of worker processes. They live as long as the run.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.config.schema import LoaderConfig
from trainer.data.augmentation import Augmentation, Composition, Plan
from trainer.data.batch import PADDING, Batch
from trainer.data.decoding import Decoder, Sample
from trainer.data.sample_order import Place, SampleStream, forward_passes, rank_positions
from trainer.data.shard_index import ShardDataset
from trainer.data.transforms import View, move_boxes, random_view, sample_draws, whole_view
from trainer.launching.distributed import World

_ANNOUNCEMENTS = 8
"""How often in a window of shards the next ones are announced."""
_BATCHES_AHEAD = 64
"""Batches of an evaluation after which the next shards are announced."""
_RUN = 8
"""Images of a thread's task, at most."""
_NO_TARGETS = np.zeros((0, 4), np.float32), np.zeros(0, np.int64)


class Loaded(NamedTuple):
    """A sample in a batch, without its pixels."""

    image_id: int
    boxes: np.ndarray
    """fp32 [M, 4], x1 y1 x2 y2 in pixels of the square."""
    labels: np.ndarray
    """int64 [M]."""
    scale: float
    """Pixels of the square for one pixel of the stored image."""
    color: np.ndarray | None
    """fp32 [3, 4], or None."""
    verified: np.ndarray | None = None
    """bool [C], or None."""


class TrainLoader:
    """Training batches from a position of the sample stream on, without end.

    Iterating gives the forward passes of one rank in order; `passes` of them make a step.
    """

    def __init__(
        self, dataset: ShardDataset, config: LoaderConfig, *, global_batch: int, batch_size: int, seed: int,
        world: World, max_bad_fraction: float, epochs: int | None = None, weights: np.ndarray | None = None,
        verified: bool = False,
    ) -> None:  # fmt: skip
        """Prepare.

        Args:
            dataset: the training split.
            config: sizes, augmentation, threads.
            global_batch: samples of a step on all ranks.
            batch_size: most images of a forward pass.
            seed: of the run.
            world: this rank.
            max_bad_fraction: share of the samples that may be damaged.
            epochs: of the training, before whose end the plain ones come; None where it has no end.
            weights: how often each sample is read, see `image_weights`; None reads each once an epoch.
            verified: whether batches tell which classes may be negatives of an image.
        """
        self._verified = verified
        self._dataset, self._config, self._world = dataset, config, world
        self._global_batch, self._batch_size, self._seed = global_batch, batch_size, seed
        self.passes = forward_passes(global_batch, batch_size, world.size)
        self._stream = SampleStream(dataset.shard_sizes, seed, weights)
        self._augmentation = Augmentation(config, self._stream, dataset.sizes, seed=seed, epochs=epochs)
        self._decoder = _decoder(dataset, max_bad_fraction, world, config.decoder)
        self._pool = ThreadPoolExecutor(config.workers, thread_name_prefix="decode")

    def batches(self, start: int) -> Generator[Batch, None, None]:
        """Batches of this rank from stream position `start` on, on the device."""
        pending: deque[_Pending] = deque()
        source = self._positions(start)
        try:
            while True:
                while len(pending) < self._config.prefetch:
                    size, plans = next(source)
                    pending.append(_Pending(self._pool, self._load, plans, size, self._config, self._decoder))
                yield pending.popleft().batch(self._world.device)
        finally:
            for batch in pending:
                batch.cancel()

    def close(self) -> None:
        """End the decoding threads, and close the shards."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._decoder.close()
        self._dataset.expect(np.zeros(0, np.int64))

    def _positions(self, start: int) -> Iterator[tuple[int, list[Plan]]]:
        """Side of the square and samples of each forward pass."""
        announced = start
        while True:
            if start >= announced:
                ahead = self._stream.ahead(start)
                self._dataset.expect(ahead)
                announced = start + max(1, len(ahead) // _ANNOUNCEMENTS)
            step, epoch = start // self._global_batch, start // len(self._dataset)
            size = self._augmentation.size(step, epoch)
            for positions in rank_positions(
                start, self._global_batch, self._batch_size, world_size=self._world.size,
                rank=self._world.rank,
            ):  # fmt: skip
                yield size, [self._augmentation.plan(position) for position in positions]
            start += self._global_batch

    def _load(self, plans: Sequence[Plan], squares: Any) -> list[Loaded]:
        if not self._augmentation.composes:
            return self._load_single([plan[0] for plan in plans], squares)
        size = len(squares[0])
        pictures = [self._augmentation.compose(plan, size) for plan in plans]
        if not any(pictures):
            return self._load_single([plan.place for plan in plans], squares)
        loaded: list[Loaded] = []
        for number, (plan, picture) in enumerate(zip(plans, pictures, strict=True)):
            part = squares[number : number + 1]
            loaded += self._load_composed(plan, picture, part) if picture else self._load_single(
                [plan.place], part
            )  # fmt: skip
        return loaded

    def _load_single(self, places: Sequence[Place], squares: Any) -> list[Loaded]:
        """Samples that have their squares for themselves."""
        # Step by step for all images: decoding evicts everything else from the processor's caches,
        # and small steps take several times as long after it.
        size, augmentation = len(squares[0]), self._augmentation
        canvas, count = (size, size), len(self._dataset)
        indices = [index % count for _, index in places]
        configs = [augmentation.config(epoch) for epoch, _ in places]
        samples = [self._dataset.read(index) for index in indices]
        # The randomness of a sample depends on nothing but seed, epoch and index, so that a
        # resumed run, or one on another number of ranks, sees the same pictures.
        draws = [sample_draws(self._seed, *place) for place in places]
        views = [
            random_view(record["width"], record["height"], config, numbers[:5], canvas)
            for (_, record), config, numbers in zip(samples, configs, draws, strict=True)
        ]
        loaded = [
            Loaded(
                record["image_id"], *move_boxes(record["annotations"], view, size), view.scale,
                augmentation.color(config, numbers), self._negatives([record]) if self._verified else None,
            )
            for (_, record), config, view, numbers in zip(samples, configs, views, draws, strict=True)
        ]  # fmt: skip
        return _draw(self._decoder, indices, samples, views, squares, loaded)

    def _load_composed(self, plan: Plan, picture: Composition, squares: Any) -> list[Loaded]:
        """A sample that shares its square with others."""
        samples = [[self._dataset.read(tile.sample) for tile in tiles] for tiles in picture.layers]
        decoded = self._decoder.compose(samples, picture, squares[0])
        boxes, labels = [_NO_TARGETS[0]], [_NO_TARGETS[1]]
        for tiles, records, sound in zip(picture.layers, samples, decoded, strict=True):
            for tile, (_, record), whole in zip(tiles, records, sound, strict=True):
                if whole:
                    moved, names = move_boxes(record["annotations"], tile.view, tile.area[2:])
                    boxes.append(moved + np.array(tile.area[:2] * 2, np.float32))
                    labels.append(names)
        own = samples[0][0][1]
        config = self._augmentation.config(plan.place.epoch)
        color = self._augmentation.color(config, sample_draws(self._seed, *plan.place))
        scale = picture.layers[0][0].view.scale
        verified = self._negatives([record for tiles in samples for _, record in tiles])
        targets = np.concatenate(boxes), np.concatenate(labels)
        return [Loaded(own["image_id"], *targets, scale, color, verified)]

    def _negatives(self, records: Sequence[dict[str, Any]]) -> np.ndarray | None:
        """Classes that may be negatives in a picture: those that may be in each of its images."""
        if not self._verified:
            return None
        flags = np.zeros((len(records), len(self._dataset.categories)), bool)
        for row, record in zip(flags, records, strict=True):
            row[self._dataset.names.negatives(record)] = True
        return np.logical_and.reduce(flags, axis=0)


class EvalLoader:
    """The images of a split for evaluation, each once over all ranks: rank, rank + size, ..."""

    def __init__(
        self, dataset: ShardDataset, config: LoaderConfig, *, batch_size: int, world: World,
        max_bad_fraction: float,
    ) -> None:  # fmt: skip
        self._dataset, self._config, self._world = dataset, config, world
        self._decoder = _decoder(dataset, max_bad_fraction, world)
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
                pending.append(
                    _Pending(pool, self._load, indices, self._config.image_size, self._config, self._decoder)
                )
                if len(pending) > self._config.prefetch:
                    yield pending.popleft().batch(self._world.device)
            while pending:
                yield pending.popleft().batch(self._world.device)
            self._dataset.expect(np.zeros(0, np.int64))

    def _load(self, indices: Sequence[int], squares: Any) -> list[Loaded]:
        samples = [self._dataset.read(index) for index in indices]
        views = [
            whole_view(record["width"], record["height"], self._config.image_size) for _, record in samples
        ]
        loaded = [
            Loaded(record["image_id"], *_NO_TARGETS, view.scale, None)
            for (_, record), view in zip(samples, views, strict=True)
        ]
        return _draw(self._decoder, indices, samples, views, squares, loaded)


def _decoder(dataset: ShardDataset, max_bad_fraction: float, world: World, name: str = "cpu") -> Decoder:
    if name == "gpu":
        from trainer.data.device_decode import DeviceDecoder

        return DeviceDecoder(dataset, world.device)
    return Decoder(dataset, max_bad_fraction, pin=world.device.type == "cuda")


class _Pending:
    """A batch whose images are being drawn, each directly into the batch."""

    def __init__(
        self, pool: ThreadPoolExecutor, load: Callable[[Sequence[Any], Any], list[Loaded]],
        places: Sequence[Any], size: int, config: LoaderConfig, decoder: Decoder,
    ) -> None:  # fmt: skip
        # Long runs, but short enough that every thread has work in the prefetched batches.
        run = min(_RUN, -(-len(places) * config.prefetch // config.workers))
        parts = [slice(first, first + run) for first in range(0, len(places), run)]
        self._canvas = decoder.canvas(len(places), size)
        squares = self._canvas.squares
        self._futures = [pool.submit(load, places[part], squares[part]) for part in parts]
        self._canvas.start(self._futures)

    def batch(self, device: torch.device) -> Batch:
        """Wait for the images; give the batch on a device."""
        # The last one first: waking up for every future costs, as all threads compete for the lock.
        parts = [future.result() for future in reversed(self._futures)][::-1]
        loaded = [sample for part in parts for sample in part]
        return collate(loaded, self._canvas.take(), pin=device.type == "cuda").to(device)

    def cancel(self) -> None:
        """Cancel the tasks that have not begun."""
        for future in self._futures:
            future.cancel()


def _draw(
    decoder: Decoder, indices: Sequence[int], samples: Sequence[Sample], views: Sequence[View], squares: Any,
    loaded: list[Loaded],
) -> list[Loaded]:  # fmt: skip
    """Decode samples and draw their views; an image that cannot be decoded has no boxes."""
    drawn = decoder.draw(indices, samples, views, squares)
    return [
        sample if decoded else sample._replace(boxes=_NO_TARGETS[0], labels=_NO_TARGETS[1])
        for sample, decoded in zip(loaded, drawn, strict=True)
    ]


def collate(loaded: Sequence[Loaded], images: Tensor, *, pin: bool) -> Batch:
    """Put samples into one batch, targets padded to the longest (at least one row).

    Args:
        loaded: the samples, without their pixels.
        images: uint8 [B, 3, S, S].
        pin: whether to use pinned memory.
    """
    rows = max(1, *(len(sample.labels) for sample in loaded))
    # By NumPy: for a handful of numbers each torch operation costs several times as much.
    padded = np.zeros((len(loaded), rows, 4), np.float32)
    names = np.full((len(loaded), rows), PADDING, np.int64)
    for row, sample in enumerate(loaded):
        padded[row, : len(sample.labels)] = sample.boxes
        names[row, : len(sample.labels)] = sample.labels
    boxes, labels = torch.from_numpy(padded), torch.from_numpy(names)
    maps = [sample.color for sample in loaded if sample.color is not None]
    color = torch.from_numpy(np.stack(maps)) if maps else None
    verified = None
    if loaded[0].verified is not None:
        verified = torch.from_numpy(
            np.stack([sample.verified for sample in loaded if sample.verified is not None])
        )
    if pin:
        boxes, labels = boxes.pin_memory(), labels.pin_memory()
        color = color.pin_memory() if color is not None else None
        verified = verified.pin_memory() if verified is not None else None
    ids, scales = [sample.image_id for sample in loaded], [sample.scale for sample in loaded]
    counts = [len(sample.labels) for sample in loaded]
    return Batch(images, boxes, labels, color, ids, scales, counts, verified)
