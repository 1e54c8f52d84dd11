"""Boxes and their names in images: frames in colours that everybody tells apart, names beside each other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from trainer.data.lettering import lettering

Corners = tuple[float, float, float, float]

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#000000")
"""Of the labels, in turn: Okabe and Ito's, which people tell apart whatever colours their eyes see."""
_LIGHT, _DARK = "#ffffff", "#000000"
_SIDE, _EDGE = 3, 2
"""Room beside a name and above it, pixels."""
_ROWS = 4
"""Rows above and below a box in which a name may stand where others are nearer."""


@dataclass(frozen=True)
class LabelledBox:
    """A box to be drawn."""

    corners: Corners
    """x1, y1, x2, y2 in pixels of the image."""
    label: int
    """Class, which decides on the colour."""
    text: str
    """What is written beside it."""


def colour(label: int) -> str:
    """Return the colour of a class."""
    return COLOURS[label % len(COLOURS)]


def ink(paper: str) -> str:
    """Return the colour of letters, white or black, that is read best on a colour."""
    brightness = _luminance(paper)
    return _LIGHT if 1.05 / (brightness + 0.05) >= (brightness + 0.05) / 0.05 else _DARK


def _luminance(paper: str) -> float:
    """Return the relative luminance of a colour, as WCAG 2 defines it."""
    parts = [int(paper[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def draw_boxes(image: Image.Image, boxes: Sequence[LabelledBox], *, line: int, size: int) -> None:
    """Draw boxes and their names into an image, which is changed.

    The first boxes lie on top and have the first choice of where their names stand. No frame runs
    through a name, and no name covers another as long as there is room beside the boxes.

    Args:
        image: RGB.
        boxes: the most important first.
        line: width of the frames, pixels.
        size: of the letters, pixels.
    """
    pen, letters = ImageDraw.Draw(image), lettering(size)
    for box in reversed(boxes):
        paper = colour(box.label)
        x1, y1, x2, y2 = box.corners
        # A thin line around it: no colour is seen on every picture.
        pen.rectangle((x1 - 1, y1 - 1, x2 + 1, y2 + 1), outline=ink(paper), width=1)
        pen.rectangle(box.corners, outline=paper, width=line)
    texts = [letters.shortened(box.text, image.width - 2 * _SIDE) for box in boxes]
    sizes = [(letters.width(text) + 2 * _SIDE, letters.height + 2 * _EDGE) for text in texts]
    places = place_labels([box.corners for box in boxes], sizes, image.size)
    for box, text, (width, height), (x, y) in reversed(list(zip(boxes, texts, sizes, places, strict=True))):
        paper = colour(box.label)
        pen.rectangle((x, y, x + width - 1, y + height - 1), fill=paper)
        letters.write(pen, (x + _SIDE, y + _EDGE), text, ink(paper))


def place_labels(
    boxes: Sequence[Corners], sizes: Sequence[tuple[int, int]], canvas: tuple[int, int]
) -> list[tuple[int, int]]:
    """Choose where the names of boxes stand: near each its own, inside the image, and not on each other.

    Args:
        boxes: x1, y1, x2, y2 in pixels; the first ones choose first.
        sizes: width and height of the name of each, pixels.
        canvas: width and height of the image.

    Returns:
        The upper left corner of each name. Where every place would cover another name it is the one that
        covers least.
    """
    taken = np.zeros((len(boxes), 4))
    places: list[tuple[int, int]] = []
    for number, (box, size) in enumerate(zip(boxes, sizes, strict=True)):
        least, best = np.inf, (0, 0)
        for x, y in _candidates(box, size, canvas):
            covered = _covered(taken[:number], (x, y, x + size[0], y + size[1]))
            if covered < least:
                least, best = covered, (x, y)
            if not covered:
                break
        taken[number] = (*best, best[0] + size[0], best[1] + size[1])
        places.append(best)
    return places


def _candidates(box: Corners, size: tuple[int, int], canvas: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the places for a name, the one where people look for it first."""
    (left, top, right, bottom), (width, height) = box, size
    columns = (left, right - width)
    rows = [top - height, top, bottom, bottom - height]
    for row in range(1, _ROWS):
        rows += [top - (row + 1) * height, bottom + row * height]
    corners = [(x, y) for y in rows for x in columns]
    # Beside the box before below it.
    corners[4:4] = [(x, y) for x in (right, left - width) for y in (top, bottom - height)]
    for x, y in corners:
        if 0 <= y <= canvas[1] - height:
            yield round(max(0, min(x, canvas[0] - width))), round(y)
    # Where there is no room it stands over its box, as near to a free place as the image goes.
    for y in (top, top - height, bottom):
        yield round(max(0, min(left, canvas[0] - width))), round(max(0, min(y, canvas[1] - height)))


def _covered(taken: np.ndarray, name: tuple[int, int, int, int]) -> float:
    """Return how many pixels of other names a name would cover."""
    wide = np.minimum(taken[:, 2], name[2]) - np.maximum(taken[:, 0], name[0])
    high = np.minimum(taken[:, 3], name[3]) - np.maximum(taken[:, 1], name[1])
    return float((wide.clip(0) * high.clip(0)).sum())
