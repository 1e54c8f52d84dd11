"""Transforms a decoded image with boxes to the network's square, with and without augmentation.

The loader's threads do the geometry. Photometric changes are one affine map of the colours for each image,
applied to the whole batch on the device.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.config.schema import LoaderConfig
from trainer.data.samples import Annotation

FILL = 114  # grey of the padding, 0..255
MIN_VISIBLE = 0.25  # a cropped box is kept while at least this share of its area is visible
_DRAWS = struct.Struct("<9I")
_LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601


class View(NamedTuple):
    """Which part of an image is shown, and where in the square."""

    divisor: int
    """The decoder divides the sides by it: 1, 2, 4 or 8. The crop is in pixels of the divided image."""
    crop: tuple[int, int, int, int]  # left, top, width, height
    place: tuple[int, int, int, int]  # left, top, width, height in pixels of the square
    flip: bool
    flip_vertical: bool
    scale: float  # pixels of the square for one pixel of the stored image


def letterbox(image: Tensor, size: int) -> tuple[Tensor, float]:
    """Fit uint8 [3, H, W] into a square: longer side = size, at the top left, rest FILL.

    Returns the square, uint8 [3, size, size], and the scale: divide boxes in the square by it.
    """
    view = whole_view(image.shape[-1], image.shape[-2], size)
    square = np.empty((size, size, 3), np.uint8)
    render(image, view, square)
    return torch.from_numpy(square).permute(2, 0, 1).contiguous(), view.scale


def whole_view(width: int, height: int, size: int) -> View:
    """Return the view of `letterbox` for an image of that size."""
    scale = size / max(height, width)
    place = (0, 0, max(1, round(width * scale)), max(1, round(height * scale)))
    return View(1, (0, 0, width, height), place, False, False, scale)


def sample_draws(seed: int, epoch: int, index: int, *part: int) -> list[float]:
    """Return nine numbers, uniform in [0, 1), as a function of seed, epoch, sample (and part of its picture).

    Five are for `random_view`, four for `color_map`. A hash (BLAKE2b, RFC 7693) takes a tenth of the time of
    setting up a generator.
    """
    key = b"%d %d %d" % (seed, epoch, index)
    for number in part:
        key += b" %d" % number
    digest = blake2b(key, digest_size=_DRAWS.size).digest()
    return [word * 2.0**-32 for word in _DRAWS.unpack(digest)]


def random_view(
    width: int, height: int, config: LoaderConfig, draws: Sequence[float], canvas: tuple[int, int]
) -> View:
    """Return a view with scale jitter, crop or padding at a random place, and flips.

    Before the jitter the longer side of the image is that of the canvas (width and height). `draws` are five
    numbers, uniform in [0, 1).
    """
    jitter, place_x, place_y, flip, flip_vertical = draws
    canvas_width, canvas_height = canvas
    low, high = config.scale
    scale = max(canvas_width, canvas_height) / max(height, width)
    if config.scale_draw == "log":
        scale = scale * low * (high / low) ** jitter
    else:
        scale *= low + (high - low) * jitter
    # libjpeg divides the sides for less than it costs to decode and resize.
    divisor = next(number for number in (8, 4, 2, 1) if number * scale <= 1 or number == 1)
    left, crop_width, x, place_width = _span(width, scale, divisor, canvas_width, place_x)
    top, crop_height, y, place_height = _span(height, scale, divisor, canvas_height, place_y)
    return View(
        divisor, (left, top, crop_width, crop_height), (x, y, place_width, place_height),
        flip < config.flip, flip_vertical < config.flip_vertical, scale,
    )  # fmt: skip


def _span(length: int, scale: float, divisor: int, size: int, place: float) -> tuple[int, int, int, int]:
    """Return one axis of a view: start and length of the crop, start and length in the square."""
    decoded = -(-length // divisor)
    scaled = max(1, round(length * scale))
    if scaled <= size:
        return 0, decoded, round(place * (size - scaled)), scaled
    shown = min(decoded, max(1, round(size / (scale * divisor))))
    return round(place * (decoded - shown)), shown, 0, size


def render(image: Tensor, view: View, square: np.ndarray) -> None:
    """Draw the view of an image into uint8 [S, S, 3].

    The image is uint8 [3, H, W] as decoded with the view's divisor: RGB, or BGR if the view is flipped.
    """
    pixels = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
    Drawing(pixels, view, square, np.empty_like(square)).finish()


class Drawing:
    """Draws a view of an image; everything but the pixels is prepared before the image is decoded.

    Decoding evicts everything else from the processor's caches, and small steps after it take several times
    as long. A flipped image is decoded as BGR: reversing the bytes of a row then reverses both the picture
    and the order of its channels.
    """

    def __init__(self, pixels: np.ndarray, view: View, square: np.ndarray, spare: np.ndarray) -> None:
        """Fill the padding, and prepare the sources and targets of all copies.

        `pixels` will contain the image, `square` its view, and `spare`, at least as large as `square`,
        intermediate pixels: all are uint8 [H, W, 3], contiguous.
        """
        self.pixels, self.view, self.square = pixels, view, square
        left, top, width, height = view.crop
        x, y, place_width, place_height = view.place
        whole_height, whole_width = square.shape[:2]
        x = whole_width - x - place_width if view.flip else x
        y = whole_height - y - place_height if view.flip_vertical else y
        below, right = y + place_height, x + place_width
        if y:
            square[:y].fill(FILL)
        if below < whole_height:
            square[below:].fill(FILL)
        if x:
            square[y:below, :x].fill(FILL)
        if right < whole_width:
            square[y:below, right:].fill(FILL)
        resized = (height, width) != (place_height, place_width)
        turned = view.flip or view.flip_vertical
        crop, place = pixels[top : top + height, left : left + width], square[y:below, x:right]
        self._resized: tuple[Tensor, Tensor] | None = None
        self._copies: list[tuple[np.ndarray, np.ndarray]] = []
        if resized and place_width == whole_width and not turned:
            self._resized = _as_images(crop), _as_images(place)
            return
        if resized:
            drawn = spare.reshape(-1)[: place.size].reshape(place.shape)
            self._resized = _as_images(crop), _as_images(drawn)
            source = _rows(drawn, 0, place_width)
        else:
            source = _rows(pixels, left, width)[top : top + height]
        target = _rows(square, x, place_width)[y:below][:: -1 if view.flip_vertical else 1]
        if not view.flip:
            self._copies.append((source, target))
            return
        # Bytes are reversed eight at once: reading a word in the other byte order reverses them.
        length = source.shape[1]
        rest = length % 8
        words = source[:, : length - rest].view(">u8"), target[:, rest:].view("<u8")[:, ::-1]
        self._copies.append(words)
        if rest:
            self._copies.append((source[:, length - rest :], target[:, rest - 1 :: -1]))

    def finish(self) -> None:
        """Draw the view, after the image has been decoded."""
        if self._resized:
            source, target = self._resized
            # The operator of torch.nn.functional.interpolate, which has no `out`: it would allocate
            # an image that has to be copied. In integers, so that the pixels are the same on every machine.
            torch.ops.aten._upsample_bilinear2d_aa.out(
                source, target.shape[2:], align_corners=False, out=target
            )
        for source_pixels, place in self._copies:
            place[...] = source_pixels


def _as_images(pixels: np.ndarray) -> Tensor:
    """Return uint8 [H, W, 3] as [1, 3, H, W]."""
    return torch.from_numpy(pixels[None]).permute(0, 3, 1, 2)


def _rows(pixels: np.ndarray, left: int, width: int) -> np.ndarray:
    """Return the bytes of some columns of an image uint8 [H, W, 3]: uint8 [H, 3 * width]."""
    return pixels.reshape(len(pixels), -1)[:, 3 * left : 3 * (left + width)]


def move_boxes(
    annotations: Sequence[Annotation], view: View, canvas: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Transform the boxes of an image to its square or tile of `canvas` (width and height) pixels.

    Crowd regions and boxes that are mostly outside are dropped. Returns boxes fp32 [M, 4], x1 y1 x2 y2, and
    labels int64 [M].
    """
    right, below = canvas
    crop_left, crop_top, crop_width, crop_height = view.crop
    place_left, place_top, place_width, place_height = view.place
    # From the stored image to the canvas.
    factor_x, factor_y = place_width / crop_width, place_height / crop_height
    plus_x, plus_y = place_left - crop_left * factor_x, place_top - crop_top * factor_y
    factor_x, factor_y = factor_x / view.divisor, factor_y / view.divisor
    if view.flip:
        factor_x, plus_x = -factor_x, right - plus_x
    if view.flip_vertical:
        factor_y, plus_y = -factor_y, below - plus_y
    boxes: list[float] = []
    labels: list[int] = []
    # Up to a hundred boxes this loop takes less time than NumPy's calls on arrays.
    for item in annotations:
        if item["iscrowd"]:
            continue
        left, top, width, height = item["bbox"]
        x1, x2 = factor_x * left + plus_x, factor_x * (left + width) + plus_x
        y1, y2 = factor_y * top + plus_y, factor_y * (top + height) + plus_y
        whole = abs((x2 - x1) * (y2 - y1))
        # A flip exchanges the corners.
        (x1, x2), (y1, y2) = sorted((x1, x2)), sorted((y1, y2))
        x1, y1, x2, y2 = max(x1, 0), max(y1, 0), min(x2, right), min(y2, below)
        width, height = x2 - x1, y2 - y1
        if width > 1 and height > 1 and width * height >= MIN_VISIBLE * whole:
            boxes += (x1, y1, x2, y2)
            labels.append(item["category_id"])
    return np.array(boxes, np.float32).reshape(-1, 4), np.array(labels, np.int64)


def color_map(config: LoaderConfig, draws: Sequence[float]) -> np.ndarray | None:
    """Return an affine map of RGB in 0..1 for brightness, contrast (about mid grey), saturation and hue.

    It is fp32 [3, 4] (matrix and offset), or None if the configuration has no such change. `draws` are four
    numbers, uniform in [0, 1).
    """
    limits = (config.brightness, config.contrast, config.saturation, config.hue)
    if not any(limits):
        return None
    turns = [(2 * draw - 1) * limit for draw, limit in zip(draws, limits, strict=True)]
    brightness, contrast, saturation, hue = 1 + turns[0], 1 + turns[1], 1 + turns[2], turns[3]
    grey = np.tile(_LUMA, (3, 1))
    # Hue turns the chroma plane of YIQ (NTSC, 1953) by a share of the full circle.
    to_yiq = np.array([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
    cosine, sine = np.cos(2 * np.pi * hue), np.sin(2 * np.pi * hue)
    rotation = np.array([[1, 0, 0], [0, cosine, -sine], [0, sine, cosine]])
    rotation = np.linalg.inv(to_yiq) @ rotation @ to_yiq
    matrix = brightness * (saturation * np.eye(3) + (1 - saturation) * grey) @ rotation
    offset = np.full((3, 1), 0.5 * (1 - contrast))
    return np.concatenate([contrast * matrix, offset], axis=1).astype(np.float32)
