"""Splits large images into overlapping tiles of equal size, so that small objects keep their resolution."""

from collections.abc import Mapping
from typing import Any

from trainer.data.samples import Annotation

MIN_VISIBLE = 0.25  # a box is kept in a crop or tile if at least this share of its area is visible
Window = tuple[int, int, int, int]  # left, top, width, height in pixels of the stored image
TILE_ID_STEP = 2**32  # A tile's id is its image's id plus a multiple of this, so that ids stay unique.
_OVERLAP = 0.2  # overlap of models that are older than the option
_MIN_SIDE = 1.0  # pixels; thinner parts of boxes are dropped


def tile_settings(trained: Mapping[str, Any], size: int) -> tuple[int, float]:
    """Return side and overlap of the tiles for a model, given the configuration of its training.

    `size` is `evaluation.tile`; -1 means the side of the tiles in training.
    """
    data = trained.get("data", {})
    return data.get("tile", 0) if size < 0 else size, data.get("tile_overlap", _OVERLAP)


def tiling(width: int, height: int, size: int, overlap: float) -> list[Window]:
    """Return the tiles of an image, row by row; with `size` 0 the whole image.

    A side of a tile is `size` pixels, or the image's side if that is shorter. The smallest number of tiles
    whose neighbors share at least `overlap` of a side is spread evenly over the image.
    """
    across, down = (_tile_starts(side, size, overlap) if size else [0] for side in (width, height))
    wide, high = min(width, size or width), min(height, size or height)
    return [(left, top, wide, high) for top in down for left in across]


def _tile_starts(side: int, size: int, overlap: float) -> list[int]:
    if side <= size:
        return [0]
    shared = round(size * overlap)
    gaps = -(-(side - size) // (size - shared))
    return [round(number * (side - size) / gaps) for number in range(gaps + 1)]


def crop_boxes(annotations: list[Annotation], window: Window) -> list[Annotation]:
    """Return the boxes of an image that are visible in a tile, in pixels of the tile.

    Boxes are clipped to the tile. A box is kept if at least a quarter of its area is inside, as in crops of
    the augmentation; a crowd is always kept. Parts with a side below one pixel are dropped.
    """
    left, top, width, height = window
    kept: list[Annotation] = []
    for item in annotations:
        x, y, w, h = item["bbox"]
        x1, y1 = max(x - left, 0.0), max(y - top, 0.0)
        x2, y2 = min(x + w - left, float(width)), min(y + h - top, float(height))
        if min(x2 - x1, y2 - y1) < _MIN_SIDE:
            continue
        share = (x2 - x1) * (y2 - y1) / (w * h)
        if item["iscrowd"] or share >= MIN_VISIBLE:
            kept.append({**item, "bbox": [x1, y1, x2 - x1, y2 - y1], "area": item["area"] * share})
    return kept
