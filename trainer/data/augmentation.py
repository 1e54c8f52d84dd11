"""Which picture each sample becomes: squares of several sizes, mosaics, mix-up, and plain last epochs.

A mosaic shows four images around a point near the square's middle (Bochkovskiy et al. 2020,
arXiv:2004.10934); mix-up blends another image in and keeps the boxes of both (Zhang et al. 2018,
arXiv:1710.09412; for detection Zhang et al. 2019, arXiv:1902.04103). Everything follows from seed, epoch and
index; the size from seed and step, so that it is the same on all ranks.
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
from trainer.data.transforms import EXTRA, View, color_map, random_view, random_window, sample_draws

MAX_LOOK_AHEAD = 256  # Next positions of the stream from which the other samples of a picture come.
_CENTER = (0.3, 0.4)  # least position of a mosaic's center, and the range above it, as shares of the side
_BLEND = (0.4, 0.2)  # least share of the first image in mix-up, and the range above it
_IDENTITY = np.eye(3, 4, dtype=np.float32)


class PicturePlan(NamedTuple):
    """A sample of a batch, and the samples that share its picture."""

    place: SamplePosition
    mosaic: tuple[int, ...] = ()  # indices in the split of the three others of a mosaic; empty if it is none
    mixed: int = -1  # index in the split of what is blended in; -1 for nothing
    draws: tuple[float, ...] = ()  # numbers in [0, 1): the mosaic's center (x, y), and the share in mix-up


class Tile(NamedTuple):
    """A view of an image in a part of the square."""

    sample: int  # index in the split
    view: View  # in pixels of the tile
    area: tuple[int, int, int, int]  # left, top, width, height of the tile in the square


class Composition(NamedTuple):
    """A picture of several samples, in one layer or two that are blended."""

    layers: tuple[tuple[Tile, ...], ...]
    share: int  # of the first layer, in 1/256


class Augmentation:
    """Decides how each sample of a split is shown in a training."""

    def __init__(
        self, config: LoaderConfig, stream: SampleStream, sizes: np.ndarray, *, seed: int, epochs: int | None
    ) -> None:
        """Prepare for samples with these widths and heights, [N, 2]; `epochs` is None without an end."""
        self._config, self._stream, self._sizes, self._seed = config, stream, sizes, seed
        self._plain = dataclasses.replace(
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
        self._composes = bool(config.mosaic or config.mixup)
        self._reach = min(MAX_LOOK_AHEAD, max(1, len(sizes) - 1))

    def start_plain(self, epoch: int) -> None:
        """Let the plain epochs start with `epoch`; -1 changes nothing."""
        if epoch >= 0:
            self._plain_from = epoch

    def is_plain(self, epoch: int) -> bool:
        """Return whether an epoch is one of the last, without strong augmentation."""
        return epoch >= self._plain_from

    def size(self, step: int, epoch: int) -> int:
        """Return the side of the square in a step (from 0) that begins in an epoch.

        The first step takes the largest, so that a size that does not fit into memory ends a run at once.
        """
        sizes = self._config.sizes
        if not sizes or self.is_plain(epoch):
            return self._config.image_size
        if step == 0:
            return max(sizes)
        digest = blake2b(b"size %d %d" % (self._seed, step), digest_size=4).digest()
        return sizes[int.from_bytes(digest, "little") * len(sizes) >> 32]

    def plan(self, position: int) -> PicturePlan:
        """Return the sample at a position of the stream, and those that share its picture."""
        place, config = self._stream[position], self._config
        if not self._composes or self.is_plain(place.epoch):
            return PicturePlan(place)
        mosaic, mixup, *others, x, y, share = sample_draws(self._seed, *place, 0)
        near = [self._stream[position + 1 + int(draw * self._reach)] for draw in others]
        *three, last = (other.sample % len(self._sizes) for other in near)
        mixed = last if mixup < config.mixup else -1
        return PicturePlan(place, tuple(three) if mosaic < config.mosaic else (), mixed, (x, y, share))

    def view(self, place: SamplePosition, record: Record, draws: Sequence[float], size: int) -> View:
        """Return the view of a sample that is alone in a square of this side."""
        config = self._plain if self.is_plain(place.epoch) else self._config
        window = None
        if config.zoom_out or config.iou_crop:
            # The numbers of Random.random for a seed are the same in every version of Python.
            seed = sample_draws(self._seed, *place, EXTRA)[0]
            window = random_window(record, config, Random(int(seed * 2**32)).random)
        return random_view(record["width"], record["height"], config, draws[:5], (size, size), window)

    def color(self, place: SamplePosition, draws: Sequence[float]) -> np.ndarray | None:
        """Return the color map of a sample; see `color_map`."""
        changed = color_map(self._config, draws[5:], sample_draws(self._seed, *place, EXTRA + 1)[:6])
        # A batch that begins before the plain epochs needs a map for each of its images.
        return _IDENTITY if changed is not None and self.is_plain(place.epoch) else changed

    def compose(self, plan: PicturePlan, size: int) -> Composition | None:
        """Return the picture of a sample in a square; None if the sample is alone in it."""
        if not plan.mosaic and plan.mixed < 0:
            return None
        own, whole = plan.place.sample % len(self._sizes), (0, 0, size, size)
        x, y, share = plan.draws
        if plan.mosaic:
            middle_x, middle_y = (round(size * (_CENTER[0] + _CENTER[1] * draw)) for draw in (x, y))
            areas = [
                (left, top, width, height)
                for top, height in ((0, middle_y), (middle_y, size - middle_y))
                for left, width in ((0, middle_x), (middle_x, size - middle_x))
            ]
            shown = zip((own, *plan.mosaic), areas, range(1, 5), strict=True)
            first = tuple(self._tile(plan.place, index, area, part) for index, area, part in shown)
        else:
            first = (self._tile(plan.place, own, whole),)
        if plan.mixed < 0:
            return Composition((first,), 256)
        second = self._tile(plan.place, plan.mixed, whole, 5)
        return Composition((first, (second,)), round(256 * (_BLEND[0] + _BLEND[1] * share)))

    def _tile(self, place: SamplePosition, index: int, area: tuple[int, int, int, int], *part: int) -> Tile:
        draws = sample_draws(self._seed, *place, *part)
        width, height = self._sizes[index].tolist()
        return Tile(index, random_view(width, height, self._config, draws[:5], area[2:]), area)
