"""Reads YOLO's label files: a line for each object, in shares of the image's sides.

class x y width height            a box by its centre
class x1 y1 x2 y2 x3 y3 ...       an outline, or a turned box by its corners: the box around it
class x y width height keypoints  where data.yaml has kpt_shape
"""

import math
from collections.abc import Mapping

from trainer.data.sources.source import Box

_SLACK = 0.01
"""How far a coordinate may be outside, as rounding leaves it; what is outside is cut off."""

_ROUNDING = 1e-5
"""What is less far outside is no mistake: labels have six digits, and half of a width is subtracted."""

_SHOWN = 60


def parse_labels(
    data: bytes, positions: Mapping[int, int], keypoints: bool = False
) -> tuple[list[Box], list[tuple[int, str]]]:
    """Return the boxes of a label file, and what is wrong: line (from 1) and why.

    Args:
        data: the file's content; nothing means that there are no objects.
        positions: of each class in the listing's categories, by its number.
        keypoints: whether key points follow the box.
    """
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data:
        return [], [(1, "it is UTF-16 or no text: save it as UTF-8")]
    boxes: list[Box] = []
    wrong: list[tuple[int, str]] = []
    for number, line in enumerate(data.decode("utf-8-sig", "replace").splitlines(), 1):
        words = line.split()
        if not words:
            continue
        box_or_fault = _box(words, positions, keypoints)
        if isinstance(box_or_fault, Box):
            boxes.append(box_or_fault)
        else:
            wrong.append((number, f"{line.strip()[:_SHOWN]!r} {box_or_fault}"))
    # The same line twice is one object.
    return list(dict.fromkeys(boxes)), wrong


def _box(words: list[str], positions: Mapping[int, int], keypoints: bool) -> Box | str:
    """Return the box of a line, or why it has none."""
    values = [_number(word) for word in words]
    if None in values:
        word = words[values.index(None)]
        return f"has {word!r}, a decimal comma" if _is_comma(word) else f"has {word!r}, which is no number"
    numbers = [value for value in values if value is not None]
    label, coordinates = numbers[0], numbers[1:]
    if not label.is_integer() or int(label) not in positions:
        return f"is of class {words[0]}, but the classes are {_range(positions)}"
    if keypoints and len(coordinates) > 4:
        coordinates = coordinates[:4]
    problem = _misfit(coordinates)
    if problem:
        return problem
    if len(coordinates) == 4:
        x, y, width, height = coordinates
        if min(x - width / 2, y - height / 2) >= 0 and max(x + width / 2, y + height / 2) <= 1:
            return Box(positions[int(label)], (x - width / 2, y - height / 2, width, height), 0.0, 0)
        edges = (x - width / 2, x + width / 2), (y - height / 2, y + height / 2)
    else:
        edges = (
            (min(coordinates[::2]), max(coordinates[::2])),
            (min(coordinates[1::2]), max(coordinates[1::2])),
        )
    (left, right), (top, bottom) = (tuple(map(_rounded, pair)) for pair in edges)
    return Box(positions[int(label)], (left, top, right - left, bottom - top), 0.0, 0)


def _rounded(edge: float) -> float:
    """Return the image's edge for what is outside of it by no more than six digits leave."""
    if -_ROUNDING < edge < 0 or 1 < edge < 1 + _ROUNDING:
        return float(edge > 0.5)
    return edge


def _misfit(coordinates: list[float]) -> str:
    """Return why these numbers are neither a box nor an outline; "" if they are one."""
    count = len(coordinates)
    if count < 4:
        return f"has {count} numbers after the class, not four"
    if count == 5:
        return "has five numbers after the class: is the last a confidence? leave it out"
    if count % 2:
        return f"has {count} numbers after the class: neither four nor pairs of x and y"
    outside = [value for value in coordinates if not -_SLACK <= value <= 1 + _SLACK]
    if outside and max(outside) > 2:
        return f"has {outside[0]:g}, no share of a side: divide pixels by the image's width or height"
    return f"has {outside[0]:g}, which is outside of 0 to 1" if outside else ""


def _number(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in word else None


def _is_comma(word: str) -> bool:
    return "," in word and _number(word.replace(",", ".")) is not None


def _range(positions: Mapping[int, int]) -> str:
    """Name the numbers of the classes: 0 to 5."""
    low, high = min(positions), max(positions)
    return f"{low} to {high}" if len(positions) == high - low + 1 else ", ".join(map(str, positions))[:_SHOWN]
