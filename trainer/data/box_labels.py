"""Draws boxes and their names into images, in colors that color-blind people can distinguish."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from trainer.base.safe_text import one_line


class TextRenderer:
    """Writes lines of text of one size."""

    def __init__(self, size: int) -> None:
        """Use letters of `size` pixels."""
        self._size = size
        _, top, _, bottom = _font(_dejavu(), size).getbbox("ÅÉgj", anchor="ls")
        self._ascent = -int(top)
        self.height = self._ascent + int(bottom)  # Pixels of a line of any text.

    def width(self, text: str) -> int:
        """Return the width of a text in pixels."""
        return round(self._font(text).getlength(one_line(text)))

    def write(self, pen: ImageDraw.ImageDraw, place: tuple[float, float], text: str, fill: object) -> None:
        """Write a text; `place` is its upper left corner, `fill` a color."""
        at = (place[0], place[1] + self._ascent)
        pen.text(at, one_line(text), font=self._font(text), fill=fill, anchor="ls")  # type: ignore[arg-type]

    def shortened(self, text: str, most: float, *, end: bool = False) -> str:
        """Return as much of the beginning (or `end`) of a text as fits into `most` pixels, with `…`."""
        text = one_line(text)
        if self.width(text) <= most:
            return text
        # By bisection: a name may have thousands of letters.
        fitting, too_long = 0, len(text)
        while too_long - fitting > 1:
            middle = (fitting + too_long) // 2
            kept = text[-middle:] if end else text[:middle]
            fitting, too_long = (middle, too_long) if self.width(f"…{kept}") <= most else (fitting, middle)
        kept = text[len(text) - fitting :] if end else text[:fitting]
        return f"…{kept}" if end else f"{kept}…"

    def _font(self, text: str) -> ImageFont.FreeTypeFont:
        return _font(_font_with(frozenset(one_line(text)) - {"…"}), self._size)


text_renderer = cache(TextRenderer)  # By the size of the letters in pixels.


@cache
def _font_with(letters: frozenset[str]) -> Path:
    """Return DejaVu Sans, or if it lacks letters the first font of the system that has all of them."""
    numbers = set(map(ord, letters))
    if numbers <= _characters(_dejavu()):
        return _dejavu()
    return next((path for path in _system_fonts() if numbers <= _characters(path)), _dejavu())


@cache
def _dejavu() -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")


@cache
def _system_fonts() -> list[Path]:
    from matplotlib.font_manager import findSystemFonts

    return sorted(map(Path, findSystemFonts()))


@cache
def _characters(path: Path) -> frozenset[int]:
    """Return the numbers of the characters that a font has."""
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(str(path)).get_charmap())
    except (OSError, RuntimeError):  # Damaged, or no font in spite of its name.
        return frozenset()


@cache
def _font(path: Path, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(path), size)


Corners = tuple[float, float, float, float]

COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#000000")
"""Of the labels, in turn: the palette of Okabe and Ito."""
_SIDE, _EDGE = 3, 2  # Margin of a name at its sides, and above and below it, in pixels.
_ROWS = 4  # Rows above and below a box that are tried for its name.


@dataclass(frozen=True)
class LabeledBox:
    """A box to be drawn."""

    corners: Corners  # x1, y1, x2, y2 in pixels of the image.
    label: int  # Class, which determines the color.
    text: str


def ink(paper: str) -> str:
    """Return the color of letters, white or black, that has the higher contrast to a color."""
    brightness = _luminance(paper)
    return "#ffffff" if 1.05 / (brightness + 0.05) >= (brightness + 0.05) / 0.05 else "#000000"


def _luminance(paper: str) -> float:
    """Return the relative luminance of a color, as WCAG 2 defines it."""
    parts = [int(paper[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def draw_boxes(image: Image.Image, boxes: Sequence[LabeledBox], *, line: int, size: int) -> None:
    """Draw boxes, the most important first, and their names into an RGB image, which is changed.

    The frames are `line` pixels wide, the letters `size` pixels high.
    """
    pen, letters = ImageDraw.Draw(image), text_renderer(size)
    papers = [COLORS[box.label % len(COLORS)] for box in boxes]
    for box, paper in reversed(list(zip(boxes, papers, strict=True))):
        x1, y1, x2, y2 = box.corners
        # A thin line around the frame makes it visible on any picture.
        pen.rectangle((x1 - 1, y1 - 1, x2 + 1, y2 + 1), outline=ink(paper), width=1)
        pen.rectangle(box.corners, outline=paper, width=line)
    texts = [letters.shortened(box.text, image.width - 2 * _SIDE) for box in boxes]
    sizes = [(letters.width(text) + 2 * _SIDE, letters.height + 2 * _EDGE) for text in texts]
    places = place_labels([box.corners for box in boxes], sizes, image.size)
    names = reversed(list(zip(papers, texts, sizes, places, strict=True)))
    for paper, text, (width, height), (x, y) in names:
        pen.rectangle((x, y, x + width - 1, y + height - 1), fill=paper)
        letters.write(pen, (x + _SIDE, y + _EDGE), text, ink(paper))


def place_labels(
    boxes: Sequence[Corners], sizes: Sequence[tuple[int, int]], canvas: tuple[int, int]
) -> list[tuple[int, int]]:
    """Choose the top left corner of each box's name: near the box, inside the image, covering few other
    names.

    The first boxes (x1, y1, x2, y2) choose first; `sizes` and `canvas` are widths and heights.
    """
    taken = np.zeros((len(boxes), 4))
    places: list[tuple[int, int]] = []
    for number, (box, (width, height)) in enumerate(zip(boxes, sizes, strict=True)):
        least, best = np.inf, (0, 0)
        for x, y in _candidates(box, (width, height), canvas):
            wide = np.minimum(taken[:number, 2], x + width) - np.maximum(taken[:number, 0], x)
            high = np.minimum(taken[:number, 3], y + height) - np.maximum(taken[:number, 1], y)
            covered = float((wide.clip(0) * high.clip(0)).sum())
            if covered < least:
                least, best = covered, (x, y)
            if not covered:
                break
        taken[number] = (*best, best[0] + width, best[1] + height)
        places.append(best)
    return places


def _candidates(box: Corners, size: tuple[int, int], canvas: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the places for a name, the most usual first."""
    (left, top, right, bottom), (width, height) = box, size
    corners = [(x, y) for y in (top - height, top) for x in (left, right - width)]
    corners += [(x, y) for x in (right, left - width) for y in (top, bottom - height)]
    rows = [bottom, bottom - height]
    for row in range(1, _ROWS):
        rows += [top - (row + 1) * height, bottom + row * height]
    corners += [(x, y) for y in rows for x in (left, right - width)]
    for x, y in corners:
        if 0 <= y <= canvas[1] - height:
            yield round(max(0, min(x, canvas[0] - width))), round(y)
    # Without room the name is over its box, moved into the image.
    for y in (top, top - height, bottom):
        yield round(max(0, min(left, canvas[0] - width))), round(max(0, min(y, canvas[1] - height)))
