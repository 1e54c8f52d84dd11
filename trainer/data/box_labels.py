"""Draws labeled boxes on images, in colors that color-blind people can distinguish."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from trainer.base.safe_text import to_one_line


class TextRenderer:
    """Draws single lines of text in one size."""

    def __init__(self, size: int) -> None:
        """Set the height of the letters in pixels."""
        self._size = size
        _, top, _, bottom = _font(_dejavu(), size).getbbox("ÅÉgj", anchor="ls")
        self._ascent = -int(top)
        self.height = self._ascent + int(bottom)  # Height of a line in pixels, for any text.

    def width(self, text: str) -> int:
        """Return the width of a text in pixels."""
        return round(self._font(text).getlength(to_one_line(text)))

    def write(self, pen: ImageDraw.ImageDraw, place: tuple[float, float], text: str, fill: object) -> None:
        """Draw a text; `place` is its upper left corner, `fill` a color."""
        at = (place[0], place[1] + self._ascent)
        pen.text(at, to_one_line(text), font=self._font(text), fill=fill, anchor="ls")  # type: ignore[arg-type]

    def shorten(self, text: str, max_width: float, *, end: bool = False) -> str:
        """Truncate a text with `…` to at most `max_width` pixels; keep the beginning, or the `end`."""
        text = to_one_line(text)
        if self.width(text) <= max_width:
            return text
        # Bisection, because a name may have thousands of letters.
        fitting, too_long = 0, len(text)
        while too_long - fitting > 1:
            middle = (fitting + too_long) // 2
            kept = text[-middle:] if end else text[:middle]
            fitting, too_long = (
                (middle, too_long) if self.width(f"…{kept}") <= max_width else (fitting, middle)
            )
        kept = text[len(text) - fitting :] if end else text[:fitting]
        return f"…{kept}" if end else f"{kept}…"

    def _font(self, text: str) -> ImageFont.FreeTypeFont:
        return _font(_find_font(frozenset(to_one_line(text)) - {"…"}), self._size)


text_renderer = cache(TextRenderer)  # One renderer per size.


@cache
def _find_font(letters: frozenset[str]) -> Path:
    """Return DejaVu Sans or, if it lacks some letters, the first system font that has all of them."""
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
    """Return the code points of the characters in a font."""
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(str(path)).get_charmap())
    except (OSError, RuntimeError):  # The file is damaged or not a font.
        return frozenset()


@cache
def _font(path: Path, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(path), size)


Corners = tuple[float, float, float, float]

COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#000000")
"""Colors of the labels, in turn (palette of Okabe and Ito)."""
TEXT_COLORS = ("#ffffff", "#000000", "#000000", "#000000", "#000000", "#000000", "#000000", "#ffffff")
"""White or black for the text on each color, whichever has the higher contrast."""
_SIDE, _EDGE = 3, 2  # Horizontal and vertical margins of a name, in pixels.


@dataclass(frozen=True)
class LabeledBox:
    """A box to draw, with its text."""

    corners: Corners  # x1, y1, x2, y2 in pixels of the image.
    label: int  # Class, which determines the color.
    text: str


def draw_boxes(image: Image.Image, boxes: Sequence[LabeledBox], *, line: int, size: int) -> None:
    """Draw boxes with their names onto an RGB image, in place; the first boxes are on top.

    Frames are `line` pixels wide, letters `size` pixels high. A name is above its box, or inside if there
    is no room.
    """
    pen, letters = ImageDraw.Draw(image), text_renderer(size)
    drawn = [
        (box, COLORS[box.label % len(COLORS)], TEXT_COLORS[box.label % len(COLORS)]) for box in boxes[::-1]
    ]
    for box, paper, ink in drawn:
        x1, y1, x2, y2 = box.corners
        # A thin line around the frame makes it visible on any picture.
        pen.rectangle((x1 - 1, y1 - 1, x2 + 1, y2 + 1), outline=ink, width=1)
        pen.rectangle(box.corners, outline=paper, width=line)
    for box, paper, ink in drawn:
        text = letters.shorten(box.text, image.width - 2 * _SIDE)
        width, height = letters.width(text) + 2 * _SIDE, letters.height + 2 * _EDGE
        left, top = box.corners[:2]
        x = round(max(0, min(left, image.width - width)))
        y = round(top - height if top >= height else max(0, min(top, image.height - height)))
        pen.rectangle((x, y, x + width - 1, y + height - 1), fill=paper)
        letters.write(pen, (x + _SIDE, y + _EDGE), text, ink)
