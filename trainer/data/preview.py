"""A contact sheet: images of a split side by side, with their boxes."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from trainer.data.explore import Picture, open_view
from trainer.errors import DataError

TILE = 320
"""Side of a picture's field on the sheet, pixels."""
_CAPTION, _GAP = 18, 8
_PAPER, _INK, _MISSING = (250, 250, 250), (40, 40, 40), (160, 30, 30)
_COLORS = (
    "#0b84a5", "#d1495b", "#2e933c", "#8f2d9b", "#e07a1f", "#3d5a98", "#8a6d1b", "#00897b",
)  # fmt: skip
"""Of the labels, in turn."""


def contact_sheet(text: str, count: int, split: str = "", seed: int = 0) -> tuple[Image.Image, list[Picture]]:
    """Draw some images with their boxes.

    Args:
        text: a URI of shards or raw images, or a source.
        count: how many images, at most.
        split: train, val or test; "" is the first there is.
        seed: which images: another one, others.

    Returns:
        the sheet, RGB, and what is on it; an image that cannot be read is a field that says so.

    Raises:
        DataError: there is no such split, or it is empty.
        StorageError: the data cannot be reached.
    """
    view = open_view(text)
    if split and split not in view.splits:
        raise DataError(f"no split {split!r} in {text}", fix=f"splits are: {', '.join(view.splits)}")
    split = split or view.splits[0]
    pictures = view.pictures(split, count, np.random.default_rng(seed))
    if not pictures:
        raise DataError(f"the split {split!r} of {text} holds no images", fix="name another with --split")
    return _sheet(pictures, view.names), pictures


def _sheet(pictures: Sequence[Picture], names: Sequence[str]) -> Image.Image:
    """Lay pictures out in rows, as near to a square as they go."""
    columns = int(np.ceil(np.sqrt(len(pictures))))
    rows = -(-len(pictures) // columns)
    step_x, step_y = TILE + _GAP, TILE + _CAPTION + _GAP
    sheet = Image.new("RGB", (columns * step_x + _GAP, rows * step_y + _GAP), _PAPER)
    for number, picture in enumerate(pictures):
        row, column = divmod(number, columns)
        sheet.paste(_tile(picture, names), (_GAP + column * step_x, _GAP + row * step_y))
    return sheet


def _tile(picture: Picture, names: Sequence[str]) -> Image.Image:
    """One picture in its field, with its name below."""
    tile = Image.new("RGB", (TILE, TILE + _CAPTION), _PAPER)
    font = ImageFont.load_default(12)
    pen = ImageDraw.Draw(tile)
    pen.text((0, TILE + 2), _cut(picture.file_name, pen, font), fill=_INK, font=font)
    if picture.image is None:
        text = "\n".join(picture.fault[at : at + 44] for at in range(0, min(len(picture.fault), 440), 44))
        pen.rectangle((0, 0, TILE - 1, TILE - 1), outline=_MISSING)
        pen.multiline_text((8, 8), text, fill=_MISSING, font=font)
        return tile
    scale = TILE / max(picture.image.size)
    size = [max(1, round(side * scale)) for side in picture.image.size]
    tile.paste(picture.image.resize((size[0], size[1]), Image.Resampling.LANCZOS), (0, 0))
    # Large boxes first: small ones and their names stay visible.
    for label, bbox, crowd in sorted(picture.boxes, key=lambda box: -box[1][2] * box[1][3]):
        if np.isfinite(bbox).all():
            name = names[label] if 0 <= label < len(names) else "?"
            _draw_box(pen, [scale * value for value in bbox], label, name + (" (crowd)" if crowd else ""))
    shown = Image.new("RGB", tile.size, _PAPER)
    shown.paste(tile.crop((0, 0, size[0], size[1])), (0, 0))
    shown.paste(tile.crop((0, TILE, TILE, TILE + _CAPTION)), (0, TILE))
    return shown


def _draw_box(pen: ImageDraw.ImageDraw, bbox: list[float], label: int, name: str) -> None:
    color = _COLORS[label % len(_COLORS)]
    x, y, width, height = bbox
    pen.rectangle((x, y, x + max(width, 1), y + max(height, 1)), outline=color, width=2)
    font = ImageFont.load_default(11)
    left, top, right, bottom = pen.textbbox((0, 0), name, font=font)
    high, wide = bottom - top + 4, right - left + 6
    text_x, text_y = max(0, min(x, TILE - wide)), max(0, y - high if y >= high else y)
    pen.rectangle((text_x, text_y, text_x + wide, text_y + high), fill=color)
    pen.text((text_x + 3 - left, text_y + 2 - top), name, fill="white", font=font)


def _cut(text: str, pen: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """Return the end of a name, as much as fits below a picture."""
    whole = text
    while pen.textlength(text if text == whole else f"…{text}", font=font) > TILE:
        text = text[1:]
    return text if text == whole else f"…{text}"
