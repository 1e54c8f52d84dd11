"""Draws contact sheets: images of a split side by side with their boxes, optionally augmented."""

import io
from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from PIL import Image, ImageDraw

from trainer.base.errors import DataError, StorageError
from trainer.config.schema import Config, DataConfig
from trainer.data.box_labels import LabeledBox, draw_boxes, text_renderer
from trainer.data.decoding import read_sample
from trainer.data.images import UnreadableImage, normalize, to_pixels
from trainer.data.inspection import SourceView, open_view
from trainer.data.loader import TrainLoader
from trainer.data.sample_order import image_weights
from trainer.data.samples import RawRow, to_bbox
from trainer.data.shard_folder import ShardIndex
from trainer.data.shard_index import ShardDataset
from trainer.launching.distributed import World

TILE = 320  # side of a picture on the sheet, in pixels
_CAPTION, _GAP = 18, 8
_LETTER_SIZE = 12  # in pixels
_PAPER, _INK = (250, 250, 250), (40, 40, 40)
_MAX_SIDE, _JPEG_QUALITY = 1600, 95


Box = tuple[int, list[float], bool]  # Label, [x, y, width, height] in pixels, and whether it is a crowd.


class Picture(NamedTuple):
    """An image with its boxes."""

    file_name: str
    image: Image.Image | None  # None if it cannot be read; `fault` gives the reason.
    boxes: list[Box]
    fault: str = ""


def draw_contact_sheet(
    text: str, count: int, split: str = "", seed: int = 0, config: DataConfig | None = None
) -> tuple[Image.Image, list[Picture], str]:
    """Draw random images of a split, by default the first, with their boxes; for `text` see `open_view`.

    Returns the sheet (RGB), its pictures, and the name of the split.
    """
    view = open_view(text, config)
    if split and split not in view.splits:
        raise DataError(f"no split {split!r} in {text}", fix=f"the splits are: {', '.join(view.splits)}")
    split = split or next(iter(view.splits))
    drawn = _choose_pictures(view, split, count, np.random.default_rng(seed))
    if not drawn:
        raise DataError(f"the split {split!r} of {text} has no images", fix="choose another split")
    return _draw_sheet(drawn, view.class_names), drawn, split


def draw_training_sheet(uri: str, config: Config, count: int) -> tuple[Image.Image, list[Picture], str]:
    """Draw the first samples as training sees them, with augmentation; see `draw_contact_sheet`."""
    view = open_view(uri)
    if not isinstance(view, ShardIndex):
        fix = "pass a folder DATA_ROOT/shards/FINGERPRINT; `kubedet run --until shards` creates one"
        raise DataError(f"{uri} is a source, but training reads shards", fix=fix)
    dataset = ShardDataset(view.uri, "train")
    samples = len(dataset)
    global_batch = min(config.train.global_batch or config.train.batch_size, samples)
    world = World(0, 1, torch.device("cpu"))
    loader = TrainLoader(
        dataset,
        config.loader,
        global_batch=global_batch,
        batch_size=config.train.batch_size,
        seed=config.train.seed,
        world=world,
        max_bad_fraction=config.data.max_bad_fraction,
        epochs=config.train.epochs,
        weights=image_weights(dataset, config.loader, world),
    )
    batches = loader.batches(0)
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
    return _draw_sheet(drawn[:count], view.class_names), drawn[:count], "train (augmented)"


def _choose_pictures(
    view: ShardIndex | SourceView, split: str, count: int, generator: np.random.Generator
) -> list[Picture]:
    """Return randomly chosen images of a split; rows of a source are read in one pass."""
    if isinstance(view, SourceView):
        drawn: list[tuple[float, pa.RecordBatch]] = []
        for batch in view.listing.splits[split].batches():
            lots = generator.random(batch.num_rows)
            drawn += [(float(lots[row]), batch.take([row])) for row in np.argsort(lots)[:count]]
            drawn = sorted(drawn, key=lambda pair: pair[0])[:count]
        return [_to_picture(row.to_pylist()[0], view) for _, row in drawn]
    dataset = ShardDataset(view.uri, split)
    found = []
    for index in np.sort(generator.choice(len(dataset), min(count, len(dataset)), replace=False)).tolist():
        try:
            pixels, record = read_sample(dataset, index)
            image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        except (DataError, StorageError) as error:
            name = f"image id {dataset.samples[index]['image_id']}"
            found.append(Picture(name, None, [], error.message))
            continue
        boxes = [(box["category_id"], box["bbox"], bool(box["iscrowd"])) for box in record["annotations"]]
        found.append(Picture(record["file_name"], image, boxes))
    return found


def _to_picture(row: RawRow, view: SourceView) -> Picture:
    """Return the image of a row as it would be stored in a shard."""
    name = row["file_name"]
    if row["fault_reason"]:
        return Picture(name, None, [], row["fault_detail"] or row["fault_reason"])
    try:
        normal = normalize(view.read(row), _MAX_SIDE, _JPEG_QUALITY)
        image = Image.open(io.BytesIO(normal.jpeg)).convert("RGB")
    except (StorageError, DataError) as error:
        return Picture(name, None, [], error.message)
    except (UnreadableImage, OSError) as error:
        return Picture(name, None, [], str(error))
    size = (row["width"], row["height"])
    boxes = [
        (box["category"], to_pixels(to_bbox(box), normal, *size), bool(box["iscrowd"]))
        for box in row["boxes"]
    ]
    return Picture(name, image, boxes)


def _draw_sheet(pictures: Sequence[Picture], class_names: Sequence[str]) -> Image.Image:
    """Arrange pictures on a nearly square sheet."""
    columns = int(np.ceil(np.sqrt(len(pictures))))
    tiles = [_draw_tile(picture, class_names) for picture in pictures]
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


def _draw_tile(picture: Picture, class_names: Sequence[str]) -> Image.Image:
    """Draw one picture with its name below."""
    letters = text_renderer(_LETTER_SIZE)
    shown = Image.new("RGB", (TILE, TILE // 2), _PAPER)  # An unreadable image stays blank.
    if picture.image is not None:
        scale = TILE / max(picture.image.size)
        width, height = (max(1, round(side * scale)) for side in picture.image.size)
        shown = picture.image.resize((width, height), Image.Resampling.LANCZOS)
        boxes = []
        # Large boxes first, so that small ones stay visible.
        for label, bbox, crowd in sorted(picture.boxes, key=lambda box: box[1][2] * box[1][3]):
            if np.isfinite(bbox).all():
                x, y, w, h = (scale * value for value in bbox)
                box_name = class_names[label] if 0 <= label < len(class_names) else "?"
                corners = (x, y, x + max(w, 1), y + max(h, 1))
                boxes.append(LabeledBox(corners, label, box_name + (" (crowd)" if crowd else "")))
        draw_boxes(shown, boxes, line=2, size=_LETTER_SIZE)
    tile = Image.new("RGB", (TILE, shown.height + _CAPTION), _PAPER)
    tile.paste(shown, (0, 0))
    name = letters.shorten(picture.file_name, TILE, end=True)
    letters.write(ImageDraw.Draw(tile), (0, shown.height + 2), name, fill=_INK)
    return tile
