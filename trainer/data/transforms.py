"""From a decoded image with boxes to the network's square, with and without augmentation.

The geometry runs here, for each image, in the loader's threads. Photometric changes are one
affine map of the colours for each image, applied to the whole batch on the device.
"""

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


class Sample(NamedTuple):
    """One image in the network's square."""

    image: Tensor
    """uint8 [3, S, S]."""
    boxes: Tensor
    """fp32 [M, 4], x1 y1 x2 y2 in pixels of the square."""
    labels: Tensor
    """int64 [M]."""
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
    height, width = image.shape[-2:]
    scale = size / max(height, width)
    resized = _resize(image, round(height * scale), round(width * scale))
    return _place(resized, size, 0, 0), scale


def augment(
    image: Tensor, boxes: Tensor, labels: Tensor, config: LoaderConfig, generator: np.random.Generator
) -> Sample:
    """Scale jitter with crop or padding at a random place, and flips.

    Args:
        image: uint8 [3, H, W].
        boxes: fp32 [M, 4] in pixels of the image.
        labels: int64 [M].
        config: sizes and probabilities.
        generator: source of all randomness; five numbers are drawn whatever the configuration.
    """
    jitter, place_x, place_y, flip, flip_vertical = generator.random(5)
    size = config.image_size
    low, high = config.scale
    # Uniform in log scale: as often half as large as twice as large.
    factor = low * (high / low) ** jitter
    height, width = image.shape[-2:]
    scale = size / max(height, width) * factor
    new_height, new_width = max(1, round(height * scale)), max(1, round(width * scale))
    left = _offset(place_x, size, new_width)
    top = _offset(place_y, size, new_height)
    square = _place(_resize(image, new_height, new_width), size, left, top)
    ratio = torch.tensor([new_width / width, new_height / height] * 2)
    moved = boxes * ratio + torch.tensor([left, top] * 2, dtype=torch.float32)
    boxes, labels = _visible(moved, labels, size)
    if flip < config.flip:
        square = square.flip(-1)
        boxes = torch.stack([size - boxes[:, 2], boxes[:, 1], size - boxes[:, 0], boxes[:, 3]], dim=1)
    if flip_vertical < config.flip_vertical:
        square = square.flip(-2)
        boxes = torch.stack([boxes[:, 0], size - boxes[:, 3], boxes[:, 2], size - boxes[:, 1]], dim=1)
    return Sample(square, boxes, labels, scale)


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


def _resize(image: Tensor, height: int, width: int) -> Tensor:
    if image.shape[-2:] == (height, width):
        return image
    return tv.resize(image, [max(1, height), max(1, width)], antialias=True)


def _offset(place: float, size: int, length: int) -> int:
    """Where an edge of that length goes in the square: inside it, or cropped at random."""
    return round(place * (size - length))


def _place(image: Tensor, size: int, left: int, top: int) -> Tensor:
    """Copy an image into a square of FILL at (left, top), which may be negative."""
    height, width = image.shape[-2:]
    square = torch.full((3, size, size), FILL, dtype=torch.uint8)
    y0, y1 = max(top, 0), min(top + height, size)
    x0, x1 = max(left, 0), min(left + width, size)
    square[:, y0:y1, x0:x1] = image[:, y0 - top : y1 - top, x0 - left : x1 - left]
    return square


def _visible(boxes: Tensor, labels: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Clip boxes to the square and drop those that are mostly outside."""
    clipped = boxes.clamp(0, size)
    whole = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    sides = clipped[:, 2:] - clipped[:, :2]
    kept = (sides.prod(dim=1) >= MIN_VISIBLE * whole) & (sides > 1).all(dim=1)
    return clipped[kept], labels[kept]
