"""The box of an annotation of a COCO JSON: from its bbox, or from its segmentation.

A segmentation is a list of polygons, of which COCO's own boxes are the extent, or a run-length encoded mask
(RLE), whose runs pycocotools reads.
"""

import re
from typing import Any

from trainer.data import problem_counts as reasons
from trainer.data.sources.source import AS_PUBLISHED, Reading

_LARGEST = 1e9
_MOST_PIXELS = 2**31
_COMMA = re.compile(r"-?\d+,\d+")
_CONTINUED = 0x20
"""Bit of a character of a compressed RLE that says that its number goes on."""


def box_of(annotation: dict[str, Any], reading: Reading = AS_PUBLISHED) -> tuple[float, ...] | str:
    """Return an annotation's box [x, y, width, height], or the reason why it has none.

    Args:
        annotation: an object of the list `annotations`.
        reading: whether the box is that of the segmentation, where there is one, and how a bbox is written.
    """
    if reading.boxes_from == "segmentation" and annotation.get("segmentation"):
        return _box_of_segmentation(annotation["segmentation"]) or reasons.SEGMENTATION_UNUSABLE
    box = _box_of_bbox(annotation)
    if reading.box_format == "xyxy" and not isinstance(box, str):
        left, top, right, bottom = box
        return left, top, right - left, bottom - top
    return box


def _box_of_bbox(annotation: dict[str, Any]) -> tuple[float, ...] | str:
    value = annotation.get("bbox")
    if value is None or value == []:
        return reasons.BOX_ONLY_SEGMENTATION if annotation.get("segmentation") else reasons.BOX_ABSENT
    if isinstance(value, str):
        return reasons.BOX_DECIMAL_COMMA if len(_COMMA.findall(value)) >= 4 else reasons.BOX_OF_TEXT
    if not isinstance(value, list):
        return reasons.BOX_NOT_FINITE
    if any(isinstance(part, str) for part in value):
        commas = any(isinstance(part, str) and _COMMA.fullmatch(part.strip()) for part in value)
        return reasons.BOX_DECIMAL_COMMA if commas else reasons.BOX_OF_TEXT
    if len(value) != 4:
        # Unquoted decimal commas make two numbers of each: [1,5, 2,5, 3,5, 4,5].
        return reasons.BOX_DECIMAL_COMMA if len(value) == 8 else reasons.BOX_OTHER_LENGTH
    numbers = _finite(value)
    return tuple(numbers) if numbers else reasons.BOX_NOT_FINITE


def _box_of_segmentation(segmentation: Any) -> tuple[float, ...] | None:
    return _box_of_rle(segmentation) if isinstance(segmentation, dict) else _box_of_polygons(segmentation)


def _box_of_polygons(polygons: Any) -> tuple[float, ...] | None:
    """Return the extent of polygons [[x1, y1, x2, y2, ...], ...]."""
    if not isinstance(polygons, list):
        return None
    if all(isinstance(part, int | float) for part in polygons):
        polygons = [polygons]
    xs: list[float] = []
    ys: list[float] = []
    for polygon in polygons:
        numbers = _finite(polygon) if isinstance(polygon, list) else None
        if numbers is None or len(numbers) < 4 or len(numbers) % 2:
            return None
        xs += numbers[::2]
        ys += numbers[1::2]
    return min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)


def _box_of_rle(mask: dict[str, Any]) -> tuple[float, ...] | None:
    """Return the extent of a mask {"size": [height, width], "counts": runs}, compressed or not."""
    size, counts = mask.get("size"), mask.get("counts")
    if not isinstance(size, list) or len(size) != 2 or not all(isinstance(side, int) for side in size):
        return None
    if min(size) < 1 or size[0] * size[1] >= _MOST_PIXELS:
        return None
    from pycocotools import mask as runs

    # The library reads past the end of runs that are not whole, and trusts their sum.
    if isinstance(counts, list):
        whole = all(isinstance(run, int) and run >= 0 for run in counts) and sum(counts) == size[0] * size[1]
        encoded = runs.frPyObjects({"size": size, "counts": counts}, *size) if whole else None
    else:
        data = counts.encode("ascii", "replace") if isinstance(counts, str) else b""
        whole = _is_whole(data, size[0] * size[1])
        encoded = {"size": size, "counts": data} if whole else None
    return tuple(map(float, runs.toBbox(encoded))) if encoded else None


def _is_whole(data: bytes, pixels: int) -> bool:
    """Tell whether a compressed RLE is made of whole numbers whose runs fill the mask."""
    runs: list[int] = []
    number = bits = 0
    for byte in data:
        part = byte - 48
        if not 0 <= part < 64 or bits > 30:
            return False
        number |= (part & 0x1F) << bits
        bits += 5
        if not part & _CONTINUED:
            if part & 0x10:
                number -= 1 << bits
            # From the third run on each is told as the difference to the one before the last.
            runs.append(number + (runs[-2] if len(runs) > 2 else 0))
            number = bits = 0
    return bits == 0 and all(run >= 0 for run in runs) and sum(runs) == pixels


def _finite(value: list[Any]) -> list[float] | None:
    """Return numbers as floats; None if one is no finite number."""
    if not all(
        isinstance(part, int | float) and not isinstance(part, bool) and abs(part) < _LARGEST
        for part in value
    ):  # fmt: skip
        return None
    return [float(part) for part in value]
