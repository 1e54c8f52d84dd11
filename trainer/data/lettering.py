"""Text in pictures: letters of every script for which this machine has a font.

DejaVu Sans, which comes with matplotlib, has Latin, Greek, Cyrillic, Arabic, Hebrew and more. For letters
that it lacks the fonts of the system are searched, once for each letter. What no font has is spelled out.
"""

import os
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from PIL import ImageDraw, ImageFont

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


class Lettering:
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
def lettering(size: int) -> Lettering:
    """Return the lettering of a size, pixels."""
    return Lettering(size)


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
