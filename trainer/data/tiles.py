"""Tiles: windows of equal size that cover a large image, so that small objects keep their pixels."""

from collections.abc import Mapping
from typing import Any

from trainer.data.samples import Annotation

MIN_VISIBLE = 0.25  # a box is kept in a crop or tile while at least this share of its area is visible
Window = tuple[int, int, int, int]  # left, top, width, height in pixels of the stored image
TILE_ID_STEP = 2**32  # The id of a tile is its image's id plus a multiple of it, so that ids stay unique.
_OVERLAP = 0.2  # of models that are older than the option
_MIN_SIDE = 1.0  # pixels; thinner parts of boxes are dropped


def tile_settings(trained: Mapping[str, Any], size: int) -> tuple[int, float]:
    """Return side and overlap of the tiles for a model, by the configuration of its training.

    `size` is `evaluation.tile`: -1 takes the side of the training's tiles.
    """
    data = trained.get("data", {})
    return data.get("tile", 0) if size < 0 else size, data.get("tile_overlap", _OVERLAP)


def tiling(width: int, height: int, size: int, overlap: float) -> list[Window]:
    """Return the tiles of an image, row by row; with `size` 0 the whole image.

    A tile has `size` pixels a side, or the image's side if that is shorter. Neighbors share at least
    `overlap` of it: the least number of tiles that does so is spread evenly, to the image's borders.
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
    """Return the boxes of an image in pixels of a tile.

    A box is clipped to the tile, and kept if at least a quarter of it is inside, as in crops of the
    augmentation. Crowds are kept whatever their share. Parts with a side below one pixel are dropped.
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
