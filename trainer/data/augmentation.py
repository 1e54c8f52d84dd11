"""Chooses the augmentation of each sample: square size, mosaic, mix-up, and none in the last epochs.

A mosaic shows four images around a point near the square's middle (Bochkovskiy et al. 2020,
arXiv:2004.10934). Mix-up blends two images and keeps the boxes of both (Zhang et al. 2018, arXiv:1710.09412;
for detection Zhang et al. 2019, arXiv:1902.04103). All choices depend on seed, epoch and index only. The size
depends on seed and step, so it is the same on all ranks.
"""

import dataclasses
import math
from collections.abc import Sequence
from hashlib import blake2b
from random import Random
from typing import NamedTuple

import numpy as np

from trainer.config.schema import LoaderConfig
from trainer.data.sample_order import SamplePosition, SampleStream
from trainer.data.samples import Record
from trainer.data.tiles import Window
from trainer.data.transforms import EXTRA, View, color_map, random_numbers, random_view, random_window

MAX_LOOK_AHEAD = 256  # The other samples of a picture are among this many next ones in the stream.
_CENTER = (0.3, 0.4)  # least position of a mosaic's center, and the range above it, as shares of the side
_BLEND = (0.4, 0.2)  # least share of the first image in mix-up, and the range above it
_IDENTITY = np.eye(3, 4, dtype=np.float32)


class PicturePlan(NamedTuple):
    """A sample of a batch, and the samples that are combined with it."""

    position: SamplePosition
    mosaic: tuple[int, ...] = ()  # indices of the three other samples of a mosaic; empty without a mosaic
    mixed: int = -1  # index of the sample that is blended in; -1 without mix-up
    draws: tuple[float, ...] = ()  # numbers in [0, 1): the mosaic's center (x, y), and the share in mix-up


class Tile(NamedTuple):
    """A view of an image, drawn into part of the square."""

    sample: int  # index of the sample in the split
    view: View  # in pixels of the tile
    area: Window  # left, top, width, height of the tile in the square


class Composition(NamedTuple):
    """A picture of several samples in one layer, or in two that are blended."""

    layers: tuple[tuple[Tile, ...], ...]
    share: int  # weight of the first layer, in 1/256


class Augmentation:
    """Decides how each sample of a split is shown in training."""

    def __init__(
        self, config: LoaderConfig, stream: SampleStream, sizes: np.ndarray, *, seed: int, epochs: int | None
    ) -> None:
        """Set the samples' widths and heights, [N, 2]; `epochs` is None for endless training."""
        self._config, self._stream, self._sizes, self._seed = config, stream, sizes, seed
        self._plain_config = dataclasses.replace(
            config,
            scale=[1.0, 1.0],
            zoom_out=0.0,
            iou_crop=0.0,
            brightness=0.0,
            contrast=0.0,
            saturation=0.0,
            hue=0.0,
            channel_shuffle=0.0,
        )
        last = config.plain_epochs
        self._plain_from = epochs - last if last and epochs is not None else math.inf
        self._combines_samples = bool(config.mosaic or config.mixup)
        self._look_ahead = min(MAX_LOOK_AHEAD, max(1, len(sizes) - 1))

    def start_plain_epochs(self, epoch: int) -> None:
        """Start the plain epochs at `epoch`; -1 changes nothing."""
        if epoch >= 0:
            self._plain_from = epoch

    def is_plain_epoch(self, epoch: int) -> bool:
        """Return whether an epoch is one of the last ones, without strong augmentation."""
        return epoch >= self._plain_from

    def input_size(self, step: int, epoch: int) -> int:
        """Return the side of the square for a step (counted from 0) that begins in an epoch.

        The first step uses the largest size, so that a run that would exceed the memory fails immediately.
        """
        sizes = self._config.sizes
        if not sizes or self.is_plain_epoch(epoch):
            return self._config.image_size
        if step == 0:
            return max(sizes)
        digest = blake2b(b"size %d %d" % (self._seed, step), digest_size=4).digest()
        return sizes[int.from_bytes(digest, "little") * len(sizes) >> 32]

    def plan(self, number: int) -> PicturePlan:
        """Return the sample at a position of the stream, and the samples that are combined with it."""
        position, config = self._stream[number], self._config
        if not self._combines_samples or self.is_plain_epoch(position.epoch):
            return PicturePlan(position)
        mosaic, mixup, *others, x, y, share = random_numbers(self._seed, *position, 0)
        near = [self._stream[number + 1 + int(draw * self._look_ahead)] for draw in others]
        *three, last = (other.sample % len(self._sizes) for other in near)
        mixed = last if mixup < config.mixup else -1
        return PicturePlan(position, tuple(three) if mosaic < config.mosaic else (), mixed, (x, y, share))

    def view(self, position: SamplePosition, record: Record, draws: Sequence[float], size: int) -> View:
        """Return the view of a sample that fills a square of this side alone."""
        config = self._plain_config if self.is_plain_epoch(position.epoch) else self._config
        window = None
        if config.zoom_out or config.iou_crop:
            # Random.random gives the same numbers for a seed in every version of Python.
            seed = random_numbers(self._seed, *position, EXTRA)[0]
            window = random_window(record, config, Random(int(seed * 2**32)).random)
        return random_view(record["width"], record["height"], config, draws[:5], (size, size), window)

    def color(self, position: SamplePosition, draws: Sequence[float]) -> np.ndarray | None:
        """Return the color map of a sample; see `color_map`."""
        changed = color_map(self._config, draws[5:], random_numbers(self._seed, *position, EXTRA + 1)[:6])
        # If one image of a batch has a map, all need one: plain images get the identity.
        return _IDENTITY if changed is not None and self.is_plain_epoch(position.epoch) else changed

    def compose(self, plan: PicturePlan, size: int) -> Composition | None:
        """Return the composition of a sample and others in a square; None if there are no others."""
        if not plan.mosaic and plan.mixed < 0:
            return None
        own, whole = plan.position.sample % len(self._sizes), (0, 0, size, size)
        x, y, share = plan.draws
        if plan.mosaic:
            middle_x, middle_y = (round(size * (_CENTER[0] + _CENTER[1] * draw)) for draw in (x, y))
            areas = [
                (left, top, width, height)
                for top, height in ((0, middle_y), (middle_y, size - middle_y))
                for left, width in ((0, middle_x), (middle_x, size - middle_x))
            ]
            shown = zip((own, *plan.mosaic), areas, range(1, 5), strict=True)
            first = tuple(self._tile(plan.position, index, area, part) for index, area, part in shown)
        else:
            first = (self._tile(plan.position, own, whole),)
        if plan.mixed < 0:
            return Composition((first,), 256)
        second = self._tile(plan.position, plan.mixed, whole, 5)
        return Composition((first, (second,)), round(256 * (_BLEND[0] + _BLEND[1] * share)))

    def _tile(self, position: SamplePosition, index: int, area: Window, *part: int) -> Tile:
        draws = random_numbers(self._seed, *position, *part)
        width, height = self._sizes[index].tolist()
        return Tile(index, random_view(width, height, self._config, draws[:5], area[2:]), area)
