"""From a decoded image with boxes to the network's square, with and without augmentation.

The geometry runs here, for each image, in the loader's threads. Photometric changes are one
affine map of the colours for each image, applied to the whole batch on the device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from trainer.config import LoaderConfig

FILL = 114
"""Grey of the padding, 0..255."""
MIN_VISIBLE = 0.25
"""A cropped box is kept while at least this share of its area is visible."""
_LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601


class View(NamedTuple):
    """Which part of an image is seen, and where in the square."""

    divisor: int
    """What the decoder divides the sides by: 1, 2, 4 or 8. The crop is in pixels of what it gives."""
    crop: tuple[int, int, int, int]
    """Left, top, width, height."""
    place: tuple[int, int, int, int]
    """Left, top, width, height in pixels of the square."""
    flip: bool
    flip_vertical: bool
    scale: float
    """Pixels of the square for one pixel of the stored image."""


def letterbox(image: Tensor, size: int) -> tuple[Tensor, float]:
    """Fit an image into a square: longer side = size, at the top left, rest FILL.

    Args:
        image: uint8 [3, H, W].
        size: side of the square, pixels.

    Returns:
        uint8 [3, size, size], and the scale: divide boxes in the square by it.
    """
    view = whole_view(image.shape[-1], image.shape[-2], size)
    square = np.empty((size, size, 3), np.uint8)
    render(image, view, square)
    return torch.from_numpy(square).permute(2, 0, 1).contiguous(), view.scale


def whole_view(width: int, height: int, size: int) -> View:
    """The view of `letterbox` for an image of that size."""
    scale = size / max(height, width)
    place = (0, 0, max(1, round(width * scale)), max(1, round(height * scale)))
    return View(1, (0, 0, width, height), place, False, False, scale)


def random_view(width: int, height: int, config: LoaderConfig, generator: np.random.Generator) -> View:
    """Scale jitter with crop or padding at a random place, and flips.

    Args:
        width: of the stored image, pixels.
        height: of the stored image, pixels.
        config: sizes and probabilities.
        generator: source of all randomness; five numbers are drawn whatever the configuration.
    """
    jitter, place_x, place_y, flip, flip_vertical = generator.random(5).tolist()
    low, high = config.scale
    # Uniform in log scale: as often half as large as twice as large.
    scale = config.image_size / max(height, width) * low * (high / low) ** jitter
    # libjpeg decodes by halves for less than it costs to decode and resize.
    divisor = next(number for number in (8, 4, 2, 1) if number * scale <= 1 or number == 1)
    left, crop_width, x, place_width = _span(width, scale, divisor, config.image_size, place_x)
    top, crop_height, y, place_height = _span(height, scale, divisor, config.image_size, place_y)
    return View(
        divisor, (left, top, crop_width, crop_height), (x, y, place_width, place_height),
        flip < config.flip, flip_vertical < config.flip_vertical, scale,
    )  # fmt: skip


def _span(length: int, scale: float, divisor: int, size: int, place: float) -> tuple[int, int, int, int]:
    """One axis of a view: start and length of the crop, start and length in the square."""
    decoded = -(-length // divisor)
    wanted = max(1, round(length * scale))
    if wanted <= size:
        return 0, decoded, round(place * (size - wanted)), wanted
    seen = min(decoded, max(1, round(size / (scale * divisor))))
    return round(place * (decoded - seen)), seen, 0, size


def render(image: Tensor, view: View, square: np.ndarray) -> None:
    """Draw what a view shows of an image.

    Args:
        image: uint8 [3, H, W], as the decoder gave it with the view's divisor: RGB, but BGR where the
            view is flipped. Turning a row around byte by byte, which takes a third of the time of doing
            so pixel by pixel, then turns both the picture and the order of the channels.
        view: of this image.
        square: uint8 [S, S, 3], receives it. The channels of a pixel lie side by side, as decoders
            give them and networks read them: by planes it takes ten times as long.
    """
    left, top, width, height = view.crop
    x, y, place_width, place_height = view.place
    seen = image[:, top : top + height, left : left + width]
    if (height, width) != (place_height, place_width):
        seen = tv.resize(seen, [place_height, place_width], antialias=True)
    pixels = seen.permute(1, 2, 0)
    if view.flip:
        pixels = pixels.reshape(place_height, -1).flip(1).view(place_height, place_width, 3)
        x = len(square) - x - place_width
    if view.flip_vertical:
        y = len(square) - y - place_height
    below, right = y + place_height, x + place_width
    for border in (square[:y], square[below:], square[y:below, :x], square[y:below, right:]):
        border.fill(FILL)
    square[y:below, x:right] = pixels.numpy()[:: -1 if view.flip_vertical else 1]


def move_boxes(
    boxes: np.ndarray, image_of: np.ndarray, views: Sequence[View], size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Bring the boxes of some images into their squares; those that are mostly outside are dropped.

    Of several images at once: for a handful of boxes the calls cost more than what they compute.

    Args:
        boxes: fp32 [M, 4], x1 y1 x2 y2 in pixels of the stored image.
        image_of: int64 [M], the image of each box, a place in `views`.
        views: of the images.
        size: side of the squares, pixels.

    Returns:
        The K boxes that remain, fp32 [K, 4] in pixels of the square, and which these are, bool [M].
    """
    crops, places = (np.array([getattr(view, name) for view in views]) for name in ("crop", "place"))
    ratios = (places[:, 2:] / crops[:, 2:]).astype(np.float32)
    shifts = places[:, :2].astype(np.float32) - crops[:, :2].astype(np.float32) * ratios
    divisors = np.array([[view.divisor] for view in views], np.float32)
    table = np.concatenate([ratios / divisors] * 2 + [shifts] * 2, axis=1)[image_of]
    moved = boxes * table[:, :4] + table[:, 4:]
    clipped = moved.clip(0, size)
    sides = clipped[:, 2:] - clipped[:, :2]
    whole = (moved[:, 2:] - moved[:, :2]).prod(axis=1)
    kept = (sides.prod(axis=1) >= MIN_VISIBLE * whole) & (sides > 1).all(axis=1)
    inside = clipped[kept]
    for axis, flips in enumerate(([view.flip for view in views], [view.flip_vertical for view in views])):
        if any(flips):
            turned = np.array(flips)[image_of[kept]]
            inside[turned, axis::2] = size - inside[turned, axis::2][:, ::-1]
    return inside, kept


def color_map(config: LoaderConfig, generator: np.random.Generator) -> np.ndarray | None:
    """Draw an affine map of RGB in 0..1: brightness, contrast, saturation and hue in one.

    Hue turns the colours in the YIQ plane; contrast is about mid grey.

    Returns:
        fp32 [3, 4] (matrix and offset), or None where the configuration has no such change.
    """
    limits = (config.brightness, config.contrast, config.saturation, config.hue)
    if not any(limits):
        return None
    brightness, contrast, saturation = 1 + (2 * generator.random(3) - 1) * limits[:3]
    hue = (2 * generator.random() - 1) * config.hue
    grey = np.tile(_LUMA, (3, 1))
    matrix = brightness * (saturation * np.eye(3) + (1 - saturation) * grey) @ _hue_rotation(hue)
    offset = np.full((3, 1), 0.5 * (1 - contrast))
    return np.concatenate([contrast * matrix, offset], axis=1).astype(np.float32)


def _hue_rotation(turns: float) -> np.ndarray:
    """Rotation of the chroma plane of YIQ (NTSC, 1953) by a share of the full circle."""
    to_yiq = np.array([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
    cosine, sine = np.cos(2 * np.pi * turns), np.sin(2 * np.pi * turns)
    rotation = np.array([[1, 0, 0], [0, cosine, -sine], [0, sine, cosine]])
    return np.linalg.inv(to_yiq) @ rotation @ to_yiq
