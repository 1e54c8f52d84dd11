"""A contact sheet: images of a split side by side, with their boxes, also as a training sees them."""

import textwrap
from collections.abc import Sequence
from contextlib import closing

import numpy as np
import torch
from PIL import Image, ImageDraw

from trainer.base.errors import ConfigError, DataError
from trainer.config.schema import Config, DataConfig
from trainer.data.box_labels import LabeledBox, draw_boxes, text_renderer
from trainer.data.data_views import Picture, Shards, open_view, pictures
from trainer.data.loader import TrainLoader
from trainer.data.sample_order import image_weights
from trainer.data.shard_index import ShardDataset
from trainer.launching.distributed import World

TILE = 320  # side of a picture's field on the sheet, pixels
_CAPTION, _GAP = 18, 8
_MAX_LETTERS, _MAX_LINES = 46, 10
"""Of the text in the field of an unreadable image."""
_LETTER = 12  # size of all letters, pixels
_PAPER, _INK, _MISSING = (250, 250, 250), (40, 40, 40), (160, 30, 30)


def contact_sheet(
    text: str, count: int, split: str = "", seed: int = 0, config: DataConfig | None = None
) -> tuple[Image.Image, list[Picture], str]:
    """Draw some images of a view (see `open_view`) with their boxes, of the first split by default.

    Returns the sheet, RGB, its pictures, and their split.
    """
    view = open_view(text, config)
    if split and split not in view.splits:
        raise DataError(f"no split {split!r} in {text}", fix=f"the splits are: {', '.join(view.splits)}")
    split = split or view.splits[0]
    drawn = pictures(view, split, count, np.random.default_rng(seed))
    if not drawn:
        raise DataError(f"the split {split!r} of {text} has no images", fix="choose another with --split")
    return sheet(drawn, view.names), drawn, split


def training_sheet(
    uri: str, config: Config, count: int, epoch: int = 0
) -> tuple[Image.Image, list[Picture], str]:
    """Draw the first samples of an epoch (from 0) as a training on one CPU sees them; see `contact_sheet`."""
    view = open_view(uri)
    if not isinstance(view, Shards):
        fix = "pass a folder DATA_ROOT/shards/FINGERPRINT; `kubedet run --until shards` creates one"
        raise DataError(f"{uri} is {view.kind}: a training reads shards", fix=fix)
    if epoch >= config.train.epochs:
        fix = f"use one from 0 to {config.train.epochs - 1}, or set train.epochs"
        raise ConfigError(f"epoch {epoch} does not exist: the training has {config.train.epochs}", fix=fix)
    dataset = ShardDataset(view.uri, "train")
    samples = len(dataset)
    whole = min(config.train.global_batch or config.train.batch_size, samples)
    world = World(0, 1, torch.device("cpu"))
    loader = TrainLoader(
        dataset,
        config.loader,
        global_batch=whole,
        batch_size=config.train.batch_size,
        seed=config.train.seed,
        world=world,
        max_bad_fraction=config.data.max_bad_fraction,
        epochs=config.train.epochs,
        weights=image_weights(dataset, config.loader, world),
    )
    # The first step that begins in the epoch.
    batches = loader.batches(-(-epoch * samples // whole) * whole)
    drawn: list[Picture] = []
    with closing(loader), closing(batches):
        while len(drawn) < min(count, samples):
            batch = next(batches)
            for row, (image_id, number) in enumerate(zip(batch.image_ids, batch.counts, strict=True)):
                targets = zip(batch.labels[row].tolist(), batch.boxes[row, :number].tolist(), strict=False)
                boxes = [(label, [x1, y1, x2 - x1, y2 - y1], False) for label, (x1, y1, x2, y2) in targets]
                pixels = batch.images[row].permute(1, 2, 0).numpy()
                if batch.color is not None:
                    color = batch.color[row].numpy()
                    values = pixels @ color[:, :3].T + 255 * color[:, 3]
                    pixels = np.clip(np.round(values), 0, 255).astype(np.uint8)
                image = Image.fromarray(np.ascontiguousarray(pixels))
                name = f"image id {image_id}, at {batch.images.shape[-1]} px"
                drawn.append(Picture(name, image, boxes))
    return sheet(drawn[:count], view.names), drawn[:count], f"train as epoch {epoch} sees them"


def sheet(pictures: Sequence[Picture], names: Sequence[str], columns: int = 0) -> Image.Image:
    """Lay pictures out in rows of some columns; 0 makes the sheet nearly square."""
    columns = columns or int(np.ceil(np.sqrt(len(pictures))))
    tiles = [_tile(picture, names) for picture in pictures]
    rows = [tiles[first : first + columns] for first in range(0, len(tiles), columns)]
    heights = [max(tile.height for tile in row) for row in rows]
    size = (columns * (TILE + _GAP) + _GAP, sum(heights) + _GAP * (len(rows) + 1))
    laid_out = Image.new("RGB", size, _PAPER)
    y = _GAP
    for row, height in zip(rows, heights, strict=True):
        for column, tile in enumerate(row):
            laid_out.paste(tile, (_GAP + column * (TILE + _GAP), y))
        y += height + _GAP
    return laid_out


def _tile(picture: Picture, names: Sequence[str]) -> Image.Image:
    """Draw one picture with its name below."""
    letters = text_renderer(_LETTER)
    if picture.image is None:
        shown = Image.new("RGB", (TILE, TILE // 2), _PAPER)
        pen = ImageDraw.Draw(shown)
        pen.rectangle((0, 0, TILE - 1, TILE // 2 - 1), outline=_MISSING)
        for number, line in enumerate(textwrap.wrap(picture.fault, _MAX_LETTERS)[:_MAX_LINES]):
            text = letters.shortened(line, TILE - 16)
            letters.write(pen, (8, 8 + number * (letters.height + 1)), text, fill=_MISSING)
    else:
        scale = TILE / max(picture.image.size)
        width, height = (max(1, round(side * scale)) for side in picture.image.size)
        shown = picture.image.resize((width, height), Image.Resampling.LANCZOS)
        boxes = []
        # Small boxes on top of large ones.
        for label, bbox, crowd in sorted(picture.boxes, key=lambda box: box[1][2] * box[1][3]):
            if np.isfinite(bbox).all():
                x, y, w, h = (scale * value for value in bbox)
                box_name = names[label] if 0 <= label < len(names) else "?"
                corners = (x, y, x + max(w, 1), y + max(h, 1))
                boxes.append(LabeledBox(corners, label, box_name + (" (crowd)" if crowd else "")))
        draw_boxes(shown, boxes, line=2, size=_LETTER)
    tile = Image.new("RGB", (TILE, shown.height + _CAPTION), _PAPER)
    tile.paste(shown, (0, 0))
    name = letters.shortened(picture.file_name, TILE, end=True)
    letters.write(ImageDraw.Draw(tile), (0, shown.height + 2), name, fill=_INK)
    return tile
