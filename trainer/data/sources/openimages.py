"""Open Images (https://storage.googleapis.com/openimages/web): the boxes of V7.

`trainer.data.source_names.OpenImages` describes the parameters. A lone split is train whatever its name.

The CSV files are read a block at a time. Boxes need the columns ImageID, LabelName (a MID such as /m/01g317),
XMin, XMax, YMin, YMax (fractions of the stored image's sides) and IsGroupOf (1: one box around many objects).
The rows of an image must follow each other, as in the published files; smaller files are sorted first.
"""

import csv
import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
from pydantic import BaseModel, Field

from trainer import storage
from trainer.base.errors import DataError
from trainer.data.images import STORED_SHARES
from trainer.data.problem_counts import Problems
from trainer.data.source_names import OPENIMAGES_SPLITS, OpenImages
from trainer.data.sources.source import BOX, SOURCE_ROW, UNKNOWN, Category, Listing, Rows, Source

# MLPerf's single-stage detector: the leaf classes with 1000 samples or more, by display name, in the order of
# the benchmark (scripts/download_openimages_mlperf.sh, section "The MLPerf Subset" of its README):
# https://github.com/mlcommons/training/tree/master/single_stage_detector
_CLASSES = """
Airplane, Antelope, Apple, Backpack, Balloon, Banana, Barrel, Baseball bat, Baseball glove, Bee, Beer, Bench,
Bicycle, Bicycle helmet, Bicycle wheel, Billboard, Book, Bookcase, Boot, Bottle, Bowl, Bowling equipment, Box,
Boy, Brassiere, Bread, Broccoli, Bronze sculpture, Bull, Bus, Bust, Butterfly, Cabinetry, Cake, Camel, Camera,
Candle, Candy, Cannon, Canoe, Carrot, Cart, Castle, Cat, Cattle, Cello, Chair, Cheese, Chest of drawers,
Chicken, Christmas tree, Coat, Cocktail, Coffee, Coffee cup, Coffee table, Coin, Common sunflower, Computer
keyboard, Computer monitor, Convenience store, Cookie, Countertop, Cowboy hat, Crab, Crocodile, Cucumber,
Cupboard, Curtain, Deer, Desk, Dinosaur, Dog, Doll, Dolphin, Door, Dragonfly, Drawer, Dress, Drum, Duck,
Eagle, Earrings, Egg (Food), Elephant, Falcon, Fedora, Flag, Flowerpot, Football, Football helmet, Fork,
Fountain, French fries, French horn, Frog, Giraffe, Girl, Glasses, Goat, Goggles, Goldfish, Gondola, Goose,
Grape, Grapefruit, Guitar, Hamburger, Handbag, Harbor seal, Headphones, Helicopter, High heels, Hiking
equipment, Horse, House, Houseplant, Human arm, Human beard, Human body, Human ear, Human eye, Human face,
Human foot, Human hair, Human hand, Human head, Human leg, Human mouth, Human nose, Ice cream, Jacket, Jeans,
Jellyfish, Juice, Kitchen & dining room table, Kite, Lamp, Lantern, Laptop, Lavender (Plant), Lemon, Light
bulb, Lighthouse, Lily, Lion, Lipstick, Lizard, Man, Maple, Microphone, Mirror, Mixing bowl, Mobile phone,
Monkey, Motorcycle, Muffin, Mug, Mule, Mushroom, Musical keyboard, Necklace, Nightstand, Office building,
Orange, Owl, Oyster, Paddle, Palm tree, Parachute, Parrot, Pen, Penguin, Personal flotation device, Piano,
Picture frame, Pig, Pillow, Pizza, Plate, Platter, Porch, Poster, Pumpkin, Rabbit, Rifle, Roller skates, Rose,
Salad, Sandal, Saucer, Saxophone, Scarf, Sea lion, Sea turtle, Sheep, Shelf, Shirt, Shorts, Shrimp, Sink,
Skateboard, Ski, Skull, Skyscraper, Snake, Sock, Sofa bed, Sparrow, Spider, Spoon, Sports uniform, Squirrel,
Stairs, Stool, Strawberry, Street light, Studio couch, Suit, Sun hat, Sunglasses, Surfboard, Sushi, Swan,
Swimming pool, Swimwear, Tank, Tap, Taxi, Tea, Teddy bear, Television, Tent, Tie, Tiger, Tin can, Tire,
Toilet, Tomato, Tortoise, Tower, Traffic light, Train, Tripod, Truck, Trumpet, Umbrella, Van, Vase, Vehicle
registration plate, Violin, Wall clock, Waste container, Watch, Whale, Wheel, Wheelchair, Whiteboard, Window,
Wine, Wine glass, Woman, Zebra, Zucchini
"""
CLASSES = tuple(" ".join(_CLASSES.split()).split(", "))

DESCRIPTIONS = "v7/oidv7-class-descriptions-boxable.csv"
HIERARCHY = "2018_04/bbox_labels_600_hierarchy.json"
BOXES = {
    "train": "v6/oidv6-train-annotations-bbox.csv",
    "validation": "v5/validation-annotations-bbox.csv",
    "test": "v5/test-annotations-bbox.csv",
}
LABELS = {
    "train": "v5/train-annotations-human-imagelabels-boxable.csv",
    "validation": "v7/oidv7-val-annotations-human-imagelabels.csv",
    "test": "v7/oidv7-test-annotations-human-imagelabels.csv",
}
"""Verified classes of images."""


@dataclass(frozen=True)
class OpenImagesSource(OpenImages, Source):
    """Open Images, or a part of it."""

    @property
    def images_uri(self) -> str:
        return f"openimages:pixels={self.pixels}"

    def listing(self) -> Listing:
        """Read classes and lists; the boxes are read when the rows are iterated."""
        states: list[tuple[str, int, str]] = []

        def record_state(uri: str) -> str:
            """Record values that change when a file does; return its URI."""
            state = storage.state(uri)
            if state is None:
                fix = "check base; add labels=none or hierarchy=none if it lacks these files"
                raise DataError(f"source {self.uri}: no file {uri}", fix=fix)
            states.append((uri, state.size, state.version))
            return uri

        listed = read_image_list(record_state(self.images)) if self.images else None
        descriptions_uri = record_state(storage.join(self.base, DESCRIPTIONS))
        described = kept = read_descriptions(descriptions_uri)
        if self.subset == "mlperf":
            by_name = {category.name: category for category in described}
            if lacking := ", ".join([name for name in CLASSES if name not in by_name][:10]):
                raise DataError(f"{descriptions_uri} describes no class {lacking}", fix="use the file of V7")
            kept = [by_name[name] for name in CLASSES]
        ancestors: dict[str, set[str]] = {}
        if self.hierarchy != "none":
            ancestors = read_hierarchy(record_state(storage.join(self.base, HIERARCHY)))
        lookup = CategoryLookup(described, kept)
        names = [split for split in OPENIMAGES_SPLITS if split in (listed or self.splits.split("+"))]
        splits = {}
        for split in names:
            takes_labels = self.labels == "keep" and split != "train"
            read = partial(
                read_boxes,
                record_state(storage.join(self.base, BOXES[split])),
                storage.join(self.pixels, split),
                kept,
                lookup,
                listed[split] if listed else None,
                record_state(storage.join(self.base, LABELS[split])) if takes_labels else "",
            )
            splits["train" if len(names) == 1 else OPENIMAGES_SPLITS[split]] = Rows(read)
        state = hashlib.sha256(json.dumps(states).encode()).hexdigest()
        return Listing(kept, splits, state, exhaustive=False, hierarchy=ancestors)


def read_image_list(uri: str) -> dict[str, frozenset[str]]:
    """Read lines `split/image_id`; return the ids of each split."""
    fix = "write lines such as train/000002b66c9c498e"
    ids_by_split: dict[str, set[str]] = {}
    for number, line in enumerate(storage.read_bytes(uri).decode("utf-8-sig", "replace").splitlines(), 1):
        split, _, image_id = line.strip().partition("/")
        if split and (split not in OPENIMAGES_SPLITS or not image_id.isalnum()):
            raise DataError(f"{uri}, line {number}: {line.strip()[:60]!r} is not split/image_id", fix=fix)
        if split:
            ids_by_split.setdefault(split, set()).add(image_id)
    if not ids_by_split:
        raise DataError(f"{uri} lists no images", fix=fix)
    return {split: frozenset(ids) for split, ids in ids_by_split.items()}


def read_descriptions(uri: str) -> list[Category]:
    """Read all classes from a CSV of MIDs (`original_id`) and display names, with or without a header."""
    try:
        rows = [row for row in csv.reader(io.StringIO(storage.read_bytes(uri).decode("utf-8-sig"))) if row]
    except (UnicodeDecodeError, csv.Error):
        rows = []
    if rows and not rows[0][0].startswith("/"):
        del rows[0]
    if not rows or any(len(row) != 2 or not row[0].startswith("/") or not row[1] for row in rows):
        raise DataError(
            f"{uri} is not a CSV of MIDs and display names", fix="use the file of boxable classes"
        )
    return [Category(name, mid) for mid, name in rows]


class _HierarchyNode(BaseModel):
    """The MID of a class, and the classes below it."""

    label: str = Field(alias="LabelName")
    children: list["_HierarchyNode"] = Field(default=[], alias="Subcategory")


def read_hierarchy(uri: str) -> dict[str, set[str]]:
    """Return the MIDs of the ancestors of each class, from the JSON of nested Subcategory lists."""
    ancestors: dict[str, set[str]] = {}

    def visit(node: _HierarchyNode, path: tuple[str, ...]) -> None:
        ancestors.setdefault(node.label, set()).update(path)
        for child in node.children:
            visit(child, (*path, node.label))

    visit(storage.read_model(uri, _HierarchyNode, "use Open Images' bbox_labels_600_hierarchy.json"), ())
    return ancestors


_OTHER = -2  # Category of a class that is described but not kept.


class CategoryLookup:
    """Finds the category of each MID."""

    def __init__(self, described: list[Category], categories: list[Category]) -> None:
        """Take all classes, and the kept ones."""
        position = {category.original_id: index for index, category in enumerate(categories)}
        mids = [str(category.original_id) for category in described]
        self._mids = pa.array(mids, pa.string())
        self._labels = np.array([*(position.get(mid, _OTHER) for mid in mids), UNKNOWN], np.int64)

    def find(self, mids: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows whose class is kept or not described, and their categories."""
        indices = pc.index_in(mids, self._mids).fill_null(len(self._mids)).to_numpy(zero_copy_only=False)
        labels = self._labels[indices]
        rows = np.flatnonzero(labels != _OTHER)
        return rows, labels[rows]


_BLOCK = 4 * 1024 * 1024


def read_columns(uri: str, types: dict[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
    """Read the columns in `types` from a CSV file with a header; yield them in blocks as they arrive."""
    read = pa_csv.ReadOptions(block_size=_BLOCK)
    convert = pa_csv.ConvertOptions(column_types=types, include_columns=list(types))
    try:
        with storage.open_reader(uri) as file, pa_csv.open_csv(file, read, convert_options=convert) as reader:
            yield from (batch for batch in reader if len(batch))
    except (pa.ArrowException, KeyError) as error:
        fix = f"use a CSV file with the columns {', '.join(types)}"
        raise DataError(f"{uri} cannot be read: {error}", fix=fix) from None


class VerifiedLabels:
    """The classes that annotators verified in an image, as present or absent; all others are unknown."""

    def __init__(self, uri: str, lookup: CategoryLookup, categories: list[Category]) -> None:
        """Read a CSV with ImageID, LabelName and Confidence (1: in the image, 0: not)."""
        self._names = [category.name for category in categories]
        types = {"ImageID": pa.string(), "LabelName": pa.string(), "Confidence": pa.float64()}
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = [
            (np.zeros(0, "S32"), np.zeros(0, np.int16), np.zeros(0, bool))
        ]
        for batch in read_columns(uri, types):
            rows, labels = lookup.find(batch["LabelName"])
            rows, labels = rows[labels >= 0], labels[labels >= 0]
            sure = pc.greater_equal(batch["Confidence"], 0.5).fill_null(False).to_numpy(zero_copy_only=False)
            parts.append((_to_bytes(batch["ImageID"].to_pylist())[rows], labels.astype(np.int16), sure[rows]))
        ids, labels, sure = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(ids, kind="stable")
        self._ids, self._labels, self._sure = ids[order], labels[order], sure[order]

    def image_ids(self) -> set[str]:
        """Return the ids of images with verified classes."""
        return {image_id.decode(errors="replace") for image_id in np.unique(self._ids).tolist()}

    def to_json(self, image_ids: list[str]) -> list[str]:
        """Return, for each image, JSON such as {"verified": {"Cat": 1, "Dog": 0}}, or ""."""
        ids = _to_bytes(image_ids)
        begins = np.searchsorted(self._ids, ids, "left").tolist()
        ends = np.searchsorted(self._ids, ids, "right").tolist()
        texts = []
        for begin, end in zip(begins, ends, strict=True):
            answers: dict[str, int] = {}
            for row in range(begin, end):
                # If annotators disagree, the positive answer counts.
                name = self._names[self._labels[row]]
                answers[name] = max(int(self._sure[row]), answers.get(name, 0))
            texts.append(json.dumps({"verified": answers}) if answers else "")
        return texts


def _to_bytes(image_ids: list[str]) -> np.ndarray:
    """Return ids as bytes, which are compared fast."""
    return np.array([image_id.encode() for image_id in image_ids], "S32")


_CORNERS = ("XMin", "XMax", "YMin", "YMax")
_COLUMNS = {
    **dict.fromkeys(("ImageID", "LabelName"), pa.string()),
    **dict.fromkeys(_CORNERS, pa.float64()),
    "IsGroupOf": pa.int8(),
}
_ROWS = 10_000
_SORT_BYTES = 128 * 1024 * 1024  # Bytes of a CSV that is sorted in memory.


def read_boxes(
    uri: str,
    pixels: str,
    categories: list[Category],
    lookup: CategoryLookup,
    listed: frozenset[str] | None,
    labels: str,
    _: Problems,
) -> Iterator[pa.RecordBatch]:
    """Yield rows of SOURCE_ROW of a split: images with boxes in the file's order, then those without.

    Args:
        uri: CSV of the boxes.
        pixels: URI of the folder with the images.
        categories: the kept classes.
        lookup: finds the category of a class.
        listed: ids of the images; None: all that have a box or a verified class.
        labels: CSV with the verified classes of images, or "".
    """
    verified = VerifiedLabels(labels, lookup, categories) if labels else None

    def make_rows(ids: pa.Array, boxes: pa.ListArray) -> pa.RecordBatch:
        nothing = pa.repeat("", len(ids))
        share_width, share_height = (
            pa.repeat(pa.scalar(side, pa.int32()), len(ids)) for side in STORED_SHARES
        )
        names = pc.binary_join_element_wise(ids, ".jpg", "")
        columns = {
            "file_name": names,
            "origin": pc.binary_join_element_wise(f"{pixels}/", names, ""),
            "version": nothing,
            "width": share_width,
            "height": share_height,
            "original_id": pc.binary_join_element_wise('"', ids, '"', ""),
            "fault_reason": nothing,
            "fault_detail": nothing,
            "extra": pa.array(verified.to_json(ids.to_pylist()), pa.string()) if verified else nothing,
            "boxes": boxes,
        }
        return pa.RecordBatch.from_pydict(columns, schema=SOURCE_ROW)

    rest = set(listed) if listed is not None else verified.image_ids() if verified else set()
    seen = [np.zeros(0, np.int64)]
    read = read_columns(uri, _COLUMNS)
    if storage.size(uri) <= _SORT_BYTES:
        read = _sort_by_image(read)
    for rows in _group_by_image(read):
        starts = _run_starts(rows["ImageID"])
        ids = rows["ImageID"].take(pa.array(starts))
        seen.append(np.fromiter(map(hash, ids.to_pylist()), np.int64, len(ids)))
        row_index, label = lookup.find(rows["LabelName"])
        left, right, top, bottom = (rows[name].to_numpy(zero_copy_only=False)[row_index] for name in _CORNERS)
        crowd = pc.equal(rows["IsGroupOf"], 1).fill_null(False).to_numpy(zero_copy_only=False)[row_index]
        fields = [
            label.astype(np.int32),
            left,
            top,
            right - left,
            bottom - top,
            np.zeros(len(label)),
            crowd.astype(np.int8),
        ]
        boxes = pa.StructArray.from_arrays([*map(pa.array, fields)], fields=list(BOX))
        offsets = np.searchsorted(row_index, np.append(starts, len(rows))).astype(np.int32)
        batch = make_rows(ids, pa.ListArray.from_arrays(pa.array(offsets), boxes))
        if listed is not None:
            batch = batch.filter(pa.array([image_id in listed for image_id in ids.to_pylist()]))
        rest.difference_update(ids.to_pylist())
        yield batch
    hashes = np.concatenate(seen)
    if len(np.unique(hashes)) < len(hashes):
        raise DataError(f"{uri}: the rows of an image are not consecutive", fix="sort the file by ImageID")
    without = sorted(rest)
    for first in range(0, len(without), _ROWS):
        ids = pa.array(without[first : first + _ROWS])
        yield make_rows(ids, pa.array([[]] * len(ids), pa.list_(BOX)))


def _sort_by_image(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield all rows sorted by ImageID; those of an image keep their order."""
    collected = list(batches)
    if collected:
        rows = pa.concat_batches(collected)
        collected.clear()
        order = pc.sort_indices(rows["ImageID"])
        for first in range(0, len(order), _ROWS):
            yield rows.take(order.slice(first, _ROWS))


def _group_by_image(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield batches that contain all rows of their images; the rows of an image must be consecutive."""
    rest: pa.RecordBatch | None = None
    for batch in batches:
        rows = batch if rest is None else pa.concat_batches([rest, batch])
        last = int(_run_starts(rows["ImageID"])[-1])
        if last:
            yield rows.slice(0, last)
        # Copied: a slice would keep the whole block alive.
        rest = pa.concat_batches([rows.slice(last)])
    if rest is not None:
        yield rest


def _run_starts(ids: pa.Array) -> np.ndarray:
    """Return where each run of equal ids begins; there is at least one id."""
    differs = pc.not_equal(ids.slice(1), ids.slice(0, len(ids) - 1)).fill_null(True)
    return np.concatenate([[0], np.flatnonzero(differs.to_numpy(zero_copy_only=False)) + 1])
