"""Text of other people, such as names of classes and files, as one line that shifts no column."""

import unicodedata

from rich.cells import cell_len, set_cell_size

_JOINING = {"\u200c", "\u200d"}
"""Format characters that belong to words (Persian, Indic scripts) and to emoji."""


def one_line(text: str) -> str:
    """Return a text in which every character takes its place and does nothing else.

    Line breaks, tabs, control characters and those that turn the direction of writing become spaces;
    letters and their accents become one character where there is one.
    """
    composed = unicodedata.normalize("NFC", text)
    return "".join(" " if _acts(character) else character for character in composed)


def _acts(character: str) -> bool:
    category = unicodedata.category(character)
    return category in ("Cc", "Cs", "Zl", "Zp") or (category == "Cf" and character not in _JOINING)


def cells(text: str) -> int:
    """Return how many columns of a terminal a text takes: a Chinese letter takes two."""
    return cell_len(text)


def aligned(text: str, width: int, *, right: bool = False) -> str:
    """Return a text as one line of a number of columns, filled up with spaces; a longer one ends in `…`."""
    line = one_line(text)
    if cells(line) > width:
        line = set_cell_size(line, width - 1).rstrip() + "…"
    filling = " " * (width - cells(line))
    return filling + line if right else line + filling
