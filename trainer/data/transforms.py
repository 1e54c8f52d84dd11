"""Transforms a decoded image and its boxes to the network's square input, with or without augmentation.

Geometric transforms run in the loader's threads. Photometric changes are an affine color map for each image,
which is applied to the whole batch on the device.
"""

import itertools
import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.config.schema import LoaderConfig
from trainer.config.types import FILL, NetworkInput
from trainer.data.samples import Annotation, Record
from trainer.data.tiles import MIN_VISIBLE, Window

Scales = tuple[float, float, float, float]  # of x1, y1, x2, y2
EXTRA = 6  # first part number of `random_numbers` that mosaic and mix-up do not use
_MAX_ZOOM = 4.0  # largest side after a zoom-out, relative to the image
_OVERLAPS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)  # minimum IoU of a crop with a box; 1: no crop
_CROP_TRIALS = 40  # crops that are tried for each minimum IoU
_MIN_CROP = 0.3  # smallest side of a crop, relative to the image
_MAX_ASPECT = 2.0  # largest ratio of the sides of a crop
_DRAWS = struct.Struct("<9I")
_PERMUTATIONS = tuple(itertools.permutations(range(3)))
_LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601


class View(NamedTuple):
    """The part of an image that is shown, its place in the square, and the padding around it."""

    divisor: int  # The image is decoded at 1/divisor of its size (1, 2, 4 or 8), then cropped.
    crop: tuple[int, int, int, int]  # left, top, width, height
    target: tuple[int, int, int, int]  # left, top, width, height in pixels of the square
    flip: bool
    flip_vertical: bool
    fill: int = FILL
    by_center: bool = False  # Keep boxes whose center is visible, rather than a quarter of their area.

    @property
    def scales(self) -> Scales:
        """Pixels of the square per pixel of the stored image, for x1, y1, x2, y2."""
        across, down = (self.target[axis] / (self.crop[axis] * self.divisor) for axis in (2, 3))
        return across, down, across, down


def fit_image(image: Tensor, target: NetworkInput) -> tuple[Tensor, Scales]:
    """Fit uint8 [3, H, W] into the square input of a trained model.

    `letterbox` scales the longer side to the size and fills the rest; `squash` scales both sides. Returns the
    square, uint8 [3, size, size], and `View.scales`.
    """
    view = full_view(image.shape[-1], image.shape[-2], target)
    square = np.empty((target.size, target.size, 3), np.uint8)
    render(image, view, square)
    return torch.from_numpy(square).permute(2, 0, 1).contiguous(), view.scales


def full_view(width: int, height: int, target: NetworkInput) -> View:
    """Return the view that `fit_image` uses for an image of this size."""
    size = target.size
    scale = size / max(height, width)
    drawn = (size, size) if target.resize == "squash" else (round(width * scale), round(height * scale))
    return View(
        1, (0, 0, width, height), (0, 0, max(1, drawn[0]), max(1, drawn[1])), False, False, target.fill
    )


def random_numbers(seed: int, epoch: int, index: int, *part: int) -> list[float]:
    """Return nine numbers, uniform in [0, 1), that depend only on seed, epoch, sample and part.

    `random_view` uses five of them and `color_map` four; parts from `EXTRA` on are for other options. A hash
    (BLAKE2b, RFC 7693) takes a tenth of the time of a new generator.
    """
    key = b"%d %d %d" % (seed, epoch, index)
    for number in part:
        key += b" %d" % number
    digest = blake2b(key, digest_size=_DRAWS.size).digest()
    return [word * 2.0**-32 for word in _DRAWS.unpack(digest)]


def random_window(record: Record, config: LoaderConfig, draw: Callable[[], float]) -> Window:
    """Return a random part of an image for `zoom_out` and `iou_crop`; it may extend beyond the image.

    Both are from SSD (Liu et al. 2016, arXiv:1512.02325), and drawn like RandomZoomOut and RandomIoUCrop of
    torchvision 0.29. `draw` returns numbers uniform in [0, 1).
    """
    width, height = record["width"], record["height"]
    left, top = 0, 0
    if draw() < config.zoom_out:
        ratio = 1 + (_MAX_ZOOM - 1) * draw()
        zoomed = int(width * ratio), int(height * ratio)
        left, top = -int((zoomed[0] - width) * draw()), -int((zoomed[1] - height) * draw())
        width, height = zoomed
    boxes = np.array([item["bbox"] for item in record["annotations"] if not item["iscrowd"]])
    if draw() >= config.iou_crop or not len(boxes):
        return left, top, width, height
    corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1) - (left, top, left, top)
    centers, areas = (corners[:, :2] + corners[:, 2:]) / 2, boxes[:, 2] * boxes[:, 3]
    canvas = np.array([width, height])
    while (least := _OVERLAPS[int(draw() * len(_OVERLAPS))]) < 1:
        numbers = np.array([draw() for _ in range(4 * _CROP_TRIALS)]).reshape(_CROP_TRIALS, 4)
        sides = (canvas * (_MIN_CROP + (1 - _MIN_CROP) * numbers[:, :2])).astype(int)
        starts = ((canvas - sides) * numbers[:, 2:]).astype(int)
        first, last = starts[:, None], (starts + sides)[:, None]
        inside = ((first < centers) & (centers < last)).all(axis=2)
        overlap = np.minimum(corners[:, 2:], last) - np.maximum(corners[:, :2], first)
        shared = overlap.clip(0).prod(axis=2)
        union = areas + sides.prod(axis=1)[:, None] - shared
        fits = (inside & (shared >= least * union)).any(axis=1) & (sides.min(axis=1) > 0)
        fits &= sides.max(axis=1) <= _MAX_ASPECT * sides.min(axis=1)
        if fits.any():
            chosen = int(fits.argmax())
            x, y = starts[chosen].tolist()
            return (left + x, top + y, *sides[chosen].tolist())
    return left, top, width, height


def random_view(
    width: int,
    height: int,
    config: LoaderConfig,
    draws: Sequence[float],
    canvas: tuple[int, int],
    window: Window | None = None,
) -> View:
    """Return a view with random scale, position and flips.

    The window, by default the whole image, is fitted to the canvas (width, height): its longer side, or with
    `resize=squash` both sides. Then it is scaled at random. `draws` are five numbers, uniform in [0, 1).
    """
    jitter, place_x, place_y, flip, flip_vertical = draws
    canvas_width, canvas_height = canvas
    low, high = config.scale
    left, top, shown_width, shown_height = window or (0, 0, width, height)
    sides = (shown_width, shown_height)
    if config.resize == "letterbox":
        sides = (max(sides), max(sides))
    scales = [max(canvas_width, canvas_height) / side for side in sides]
    if config.scale_draw == "log":
        scale_x, scale_y = (scale * low * (high / low) ** jitter for scale in scales)
    else:
        scale_x, scale_y = (scale * (low + (high - low) * jitter) for scale in scales)
    # Decoding at a fraction of the size is cheaper than decoding fully and resizing.
    largest = max(scale_x, scale_y)
    divisor = next(number for number in (8, 4, 2, 1) if number * largest <= 1 or number == 1)
    left, crop_width, x, place_width = _place_axis(
        width, (left, shown_width), scale_x, divisor, canvas_width, place_x
    )
    top, crop_height, y, place_height = _place_axis(
        height, (top, shown_height), scale_y, divisor, canvas_height, place_y
    )
    return View(
        divisor,
        (left, top, crop_width, crop_height),
        (x, y, place_width, place_height),
        flip < config.flip,
        flip_vertical < config.flip_vertical,
        config.fill,
        by_center=window is not None,
    )


def _place_axis(
    length: int, window: tuple[int, int], scale: float, divisor: int, size: int, place: float
) -> tuple[int, int, int, int]:
    """Return the crop (start, length) and its target (start, length) on one axis of a view.

    `window` is start and length of the shown part, which may extend beyond the image.
    """
    decoded, (start, extent) = -(-length // divisor), window
    first, last = round(start / divisor), round((start + extent) / divisor)
    last = decoded if start + extent == length else max(first + 1, last)
    x, shown = 0, max(1, round(extent * scale))
    if shown <= size:
        x = round(place * (size - shown))
    else:
        seen = min(last - first, max(1, round(size / (scale * divisor))))
        first += round(place * (last - first - seen))
        last, shown = first + seen, size
    if first >= 0 and last <= decoded:
        return first, last - first, x, shown
    # The image covers only a part of the window, at least one pixel.
    begin = min(max(first, 0), decoded - 1)
    end = max(begin + 1, min(last, decoded))
    step = shown / (last - first)
    left = min(max(0, round((begin - first) * step)), shown - 1)
    right = min(max(left + 1, round((end - first) * step)), shown)
    return begin, end - begin, x + left, right - left


def render(image: Tensor, view: View, square: np.ndarray) -> None:
    """Draw the view of an image into uint8 [S, S, 3].

    The image is uint8 [3, H, W], decoded with the view's divisor: RGB, or BGR if the view is flipped.
    """
    pixels = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
    Drawing(pixels, view, square, np.empty_like(square)).finish()


class Drawing:
    """Draws a view of an image; all but the pixels is prepared before the image is decoded.

    Decoding evicts everything else from the processor's caches, and small steps right after it take several
    times as long. A flipped image is decoded as BGR: reversing the bytes of a row then reverses both the
    picture and the order of its channels.
    """

    def __init__(self, pixels: np.ndarray, view: View, square: np.ndarray, spare: np.ndarray) -> None:
        """Fill the padding, and determine the sources and targets of all copies.

        All arrays are uint8 [H, W, 3] and contiguous: `pixels` will contain the image, `square` its view, and
        `spare`, at least as large as `square`, intermediate results.
        """
        self.pixels, self.view, self.square = pixels, view, square
        left, top, width, height = view.crop
        x, y, place_width, place_height = view.target
        whole_height, whole_width = square.shape[:2]
        x = whole_width - x - place_width if view.flip else x
        y = whole_height - y - place_height if view.flip_vertical else y
        below, right = y + place_height, x + place_width
        for padding in (square[:y], square[below:], square[y:below, :x], square[y:below, right:]):
            padding.fill(view.fill)
        resized = (height, width) != (place_height, place_width)
        turned = view.flip or view.flip_vertical
        crop, place = pixels[top : top + height, left : left + width], square[y:below, x:right]
        self._resized: tuple[Tensor, Tensor] | None = None
        self._copies: list[tuple[np.ndarray, np.ndarray]] = []
        if resized and place_width == whole_width and not turned:
            self._resized = _to_tensor(crop), _to_tensor(place)
            return
        if resized:
            drawn = spare.reshape(-1)[: place.size].reshape(place.shape)
            self._resized = _to_tensor(crop), _to_tensor(drawn)
            source = _byte_rows(drawn, 0, place_width)
        else:
            source = _byte_rows(pixels, left, width)[top : top + height]
        target = _byte_rows(square, x, place_width)[y:below][:: -1 if view.flip_vertical else 1]
        if not view.flip:
            self._copies.append((source, target))
            return
        # Reading a word in the other byte order reverses eight bytes at once.
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
            # The operator behind torch.nn.functional.interpolate, which has no `out` and would need a copy.
            # Integer arithmetic gives the same pixels on every machine.
            torch.ops.aten._upsample_bilinear2d_aa.out(
                source, target.shape[2:], align_corners=False, out=target
            )
        for source_pixels, place in self._copies:
            place[...] = source_pixels


def _to_tensor(pixels: np.ndarray) -> Tensor:
    """Return uint8 [H, W, 3] as a tensor [1, 3, H, W]."""
    return torch.from_numpy(pixels[None]).permute(0, 3, 1, 2)


def _byte_rows(pixels: np.ndarray, left: int, width: int) -> np.ndarray:
    """Return the bytes of some columns of an image uint8 [H, W, 3]: uint8 [H, 3 * width]."""
    return pixels.reshape(len(pixels), -1)[:, 3 * left : 3 * (left + width)]


def transform_boxes(
    annotations: Sequence[Annotation], view: View, canvas: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Transform the boxes of an image to its view in a `canvas` (width, height), in pixels.

    Crowd regions and boxes that are mostly outside (see `View.by_center`) are dropped. Returns boxes fp32
    [M, 4], x1 y1 x2 y2, and labels int64 [M].
    """
    right, below = canvas
    left_end, right_end, top_end, below_end = 0, right, 0, below
    crop_left, crop_top, crop_width, crop_height = view.crop
    place_left, place_top, place_width, place_height = view.target
    # From the stored image to the canvas.
    factor_x, factor_y = place_width / crop_width, place_height / crop_height
    plus_x, plus_y = place_left - crop_left * factor_x, place_top - crop_top * factor_y
    factor_x, factor_y = factor_x / view.divisor, factor_y / view.divisor
    if view.flip:
        factor_x, plus_x, place_left = -factor_x, right - plus_x, right - place_left - place_width
    if view.flip_vertical:
        factor_y, plus_y, place_top = -factor_y, below - plus_y, below - place_top - place_height
    if view.by_center:  # The window may be surrounded by padding.
        left_end, right_end = place_left, place_left + place_width
        top_end, below_end = place_top, place_top + place_height
    boxes: list[float] = []
    labels: list[int] = []
    # For up to a hundred boxes, this loop is faster than NumPy.
    for item in annotations:
        if item["iscrowd"]:
            continue
        left, top, width, height = item["bbox"]
        x1, x2 = factor_x * left + plus_x, factor_x * (left + width) + plus_x
        y1, y2 = factor_y * top + plus_y, factor_y * (top + height) + plus_y
        whole = abs((x2 - x1) * (y2 - y1))
        # A flip swaps the corners.
        (x1, x2), (y1, y2) = sorted((x1, x2)), sorted((y1, y2))
        centered = left_end < (x1 + x2) / 2 < right_end and top_end < (y1 + y2) / 2 < below_end
        x1, y1, x2, y2 = max(x1, left_end), max(y1, top_end), min(x2, right_end), min(y2, below_end)
        width, height = x2 - x1, y2 - y1
        visible = centered if view.by_center else width * height >= MIN_VISIBLE * whole
        if width > 1 and height > 1 and visible:
            boxes += (x1, y1, x2, y2)
            labels.append(item["category_id"])
    return np.array(boxes, np.float32).reshape(-1, 4), np.array(labels, np.int64)


def color_map(
    config: LoaderConfig, draws: Sequence[float], chances: Sequence[float] = (0.0,) * 6
) -> np.ndarray | None:
    """Return an affine map of RGB in 0..1 for brightness, contrast (about mid gray), saturation and hue.

    The map is fp32 [3, 4] (matrix and offset), or None if no change is configured. `draws` are four numbers,
    uniform in [0, 1), for the amounts. `chances` are six: four decide whether each change is applied, and two
    whether channels are permuted, and how.
    """
    limits = (config.brightness, config.contrast, config.saturation, config.hue)
    if not any(limits) and not config.channel_shuffle:
        return None
    turns = [
        (2 * draw - 1) * limit * (chance < config.color_probability)
        for draw, limit, chance in zip(draws, limits, chances[:4], strict=True)
    ]
    brightness, contrast, saturation, hue = 1 + turns[0], 1 + turns[1], 1 + turns[2], turns[3]
    gray = np.tile(_LUMA, (3, 1))
    # Hue rotates the chroma plane of YIQ (NTSC, 1953) by a fraction of a full turn.
    to_yiq = np.array([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
    cosine, sine = np.cos(2 * np.pi * hue), np.sin(2 * np.pi * hue)
    rotation = np.array([[1, 0, 0], [0, cosine, -sine], [0, sine, cosine]])
    rotation = np.linalg.inv(to_yiq) @ rotation @ to_yiq
    matrix = brightness * (saturation * np.eye(3) + (1 - saturation) * gray) @ rotation
    offset = np.full((3, 1), 0.5 * (1 - contrast))
    changed = np.concatenate([contrast * matrix, offset], axis=1).astype(np.float32)
    if chances[4] < config.channel_shuffle:
        changed = changed[list(_PERMUTATIONS[int(chances[5] * len(_PERMUTATIONS))])]
    return changed
