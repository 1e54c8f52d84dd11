"""Boxes and their names in images, in colours that everybody tells apart, and in letters of every script.

DejaVu Sans, which comes with matplotlib, has Latin, Greek, Cyrillic, Arabic, Hebrew and more. For letters
that it lacks the fonts of the system are searched, once for each letter. What no font has is spelled out.
"""

import os
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from trainer.base.visible_text import one_line

_SUFFIXES = (".ttf", ".ttc", ".otf")
_MAC_FOLDERS = ("/System/Library/Fonts", "/Library/Fonts", "~/Library/Fonts")
_WIDE = ("cjk", "wqy", "droidsansfallback", "hiragino", "pingfang", "notosans-regular", "notosans")
"""Parts of the names of fonts with many letters, plain ones: they are looked at first."""
_SLANTED = ("bold", "italic", "oblique", "black", "light", "thin", "mono", "serif")
_PROBE = 16
"""Size at which a font shows whether it draws a letter."""
_MARKS = ("Mn", "Mc", "Me")
_WITHOUT_SHAPE = {"\u200c", "\u200d", *map(chr, range(0xFE00, 0xFE10))}
"""They join letters or choose a form of one, where a font has it, and are left out where not."""
_NAMED = ("So", "Sk", "Sm", "Sc", "Po")
"""Categories of characters whose Unicode name says what they are: 🐈 is CAT."""


class TextRenderer:
    """Writes lines of text of one size."""

    def __init__(self, size: int) -> None:
        """Prepare for letters of `size` pixels from the top of the highest to the bottom of the lowest."""
        self._size = size
        _, top, _, bottom = self._font(_dejavu()).getbbox("ÅÉgj", anchor="ls")
        self._above, self._below = -int(top), int(bottom)

    @property
    def height(self) -> int:
        """Pixels that a line takes, whatever is in it."""
        return self._above + self._below

    def width(self, text: str) -> int:
        """Pixels that a text takes."""
        return round(sum(self._font(path).getlength(part) for path, part in _parts(text)))

    def write(self, pen: ImageDraw.ImageDraw, place: tuple[float, float], text: str, fill: object) -> None:
        """Write a text; `place` is its upper left corner, `fill` a colour."""
        x, baseline = place[0], place[1] + self._above
        for path, part in _parts(text):
            font = self._font(path)
            pen.text((x, baseline), part, font=font, fill=fill, anchor="ls")  # type: ignore[arg-type]
            x += font.getlength(part)

    def shortened(self, text: str, most: float, *, end: bool = False) -> str:
        """Return the beginning of a text, or its end, as much of it as `most` pixels take, with `…`."""
        text = one_line(text)
        if self.width(text) <= most:
            return text
        # By halves: a name may have thousands of letters.
        fitting, too_long = 0, len(text)
        while too_long - fitting > 1:
            middle = (fitting + too_long) // 2
            kept = text[-middle:] if end else text[:middle]
            fitting, too_long = (middle, too_long) if self.width(f"…{kept}") <= most else (fitting, middle)
        kept = text[len(text) - fitting :] if end else text[:fitting]
        return f"…{kept}" if end else f"{kept}…"

    def _font(self, path: Path) -> ImageFont.FreeTypeFont:
        return _opened(path, self._size)


@cache
def text_renderer(size: int) -> TextRenderer:
    """Return the renderer of text of a size, pixels."""
    return TextRenderer(size)


@cache
def _parts(text: str) -> tuple[tuple[Path, str], ...]:
    """Divide a line of text into parts and the font of each."""
    parts: list[tuple[Path, str]] = []
    for letter in one_line(text):
        if parts and _joins(letter, parts[-1][0]):
            parts[-1] = (parts[-1][0], parts[-1][1] + letter)
            continue
        if letter in _WITHOUT_SHAPE:
            continue
        path = _dejavu() if _has(_dejavu(), letter) else _font_with(letter)
        shown = letter if path else _spelled(letter)
        path = path or _dejavu()
        if parts and parts[-1][0] == path:
            parts[-1] = (path, (parts[-1][1] + shown).replace("][U+", " "))  # One pair of brackets for all.
        else:
            parts.append((path, shown))
    return tuple(parts)


def _joins(letter: str, path: Path) -> bool:
    """Whether a character goes with the one before it, whose font is `path`, and is not drawn alone."""
    joining = unicodedata.category(letter) in _MARKS or letter in _WITHOUT_SHAPE
    return joining and _has(path, letter)


def _spelled(letter: str) -> str:
    """Return a character in letters that every font has: [cat], or [U+732B] where its name says no more."""
    name = unicodedata.name(letter, "") if unicodedata.category(letter) in _NAMED else ""
    return f"[{name.lower() or f'U+{ord(letter):04X}'}]"


@cache
def _dejavu() -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")


@cache
def _opened(path: Path, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(path), size)


def _has(path: Path, letter: str) -> bool:
    letters = _letters(path)
    at = int(np.searchsorted(letters, ord(letter)))
    return at < len(letters) and int(letters[at]) == ord(letter)


@cache
def _letters(path: Path) -> np.ndarray:
    """Return the numbers of the characters that a font has, in order."""
    from matplotlib.ft2font import FT2Font

    try:
        return np.array(sorted(FT2Font(str(path)).get_charmap()), np.int32)
    except (OSError, RuntimeError):
        return np.empty(0, np.int32)  # No font in spite of its name, or not to be read.


@cache
def _font_with(letter: str) -> Path | None:
    """Return a font of the system that has a letter; None where there is none."""
    return next((path for path in _system_fonts() if _has(path, letter) and _draws(path, letter)), None)


def _draws(path: Path, letter: str) -> bool:
    try:
        return letter.isspace() or _opened(path, _PROBE).getmask(letter).getbbox() is not None
    except OSError:  # E.g. coloured pictures, which come in one size alone.
        return False


@cache
def _system_fonts() -> tuple[Path, ...]:
    """Return the files of fonts of this machine, those with many letters first."""
    paths = sorted(path for folder in _folders() for path in _fonts_below(folder))
    return tuple(sorted(dict.fromkeys(paths), key=_rank))


def _folders() -> Iterator[Path]:
    home = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    shared = os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share"
    for name in (home, *shared.split(":")):
        yield Path(name, "fonts").expanduser()
    yield from (Path(name).expanduser() for name in ("~/.fonts", *_MAC_FOLDERS))


def _fonts_below(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder):
        yield from (Path(place, name) for name in names if name.lower().endswith(_SUFFIXES))


def _rank(path: Path) -> tuple[int, bool]:
    name = path.name.lower()
    wide = next((place for place, part in enumerate(_WIDE) if part in name), len(_WIDE))
    return wide, any(part in name for part in _SLANTED)


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
    pen, letters = ImageDraw.Draw(image), text_renderer(size)
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
