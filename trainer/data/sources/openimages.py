"""Open Images (https://storage.googleapis.com/openimages/web): the boxes of V7.

    openimages:                                   all images with boxes
    openimages:splits=validation                  some of its splits: train, validation, test
    openimages:images=ids.txt                     the images of a list, lines `split/image_id`
    openimages:subset=mlperf                      the 264 classes of MLPerf's detector
    openimages:hierarchy=expand,rotation=apply    see `OpenImagesSource`
    openimages:base=URI,pixels=URI                a mirror of the CSV files, of the images

data.classes (names or MIDs) and data.max_images choose classes and the number of images. A lone split is
train whatever its name.
"""

import hashlib
import json
import os
from collections import defaultdict
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, get_args

from trainer import storage
from trainer.base.errors import DataError
from trainer.data.sources import openimages_csv
from trainer.data.sources.openimages_csv import Meaning, read_boxes
from trainer.data.sources.source import Listing, Rows, Source

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

BASE = "https://storage.googleapis.com/openimages"
"""Where the CSV files are."""

PIXELS = "https://open-images-dataset.s3.amazonaws.com"
"""The bucket with the images, read anonymously."""

DESCRIPTIONS = "v7/oidv7-class-descriptions-boxable.csv"
HIERARCHY = "2018_04/bbox_labels_600_hierarchy.json"
BOXES = {
    "train": "v6/oidv6-train-annotations-bbox.csv",
    "validation": "v5/validation-annotations-bbox.csv",
    "test": "v5/test-annotations-bbox.csv",
}
ROTATIONS = {
    "train": "2018_04/train/train-images-boxable-with-rotation.csv",
    "validation": "2018_04/validation/validation-images-with-rotation.csv",
    "test": "2018_04/test/test-images-with-rotation.csv",
}
LABELS = {
    "train": "v5/train-annotations-human-imagelabels-boxable.csv",
    "validation": "v7/oidv7-val-annotations-human-imagelabels.csv",
    "test": "v7/oidv7-test-annotations-human-imagelabels.csv",
}
"""Verified classes of images."""

_SPLITS = {"train": "train", "validation": "val", "test": "test"}
_URIS = ("images", "base", "pixels")


@dataclass(frozen=True)
class OpenImagesSource(Source):
    """Open Images, or a part of it."""

    splits: str = "train+validation+test"
    """Joined by +; an image list has its own."""
    images: str = ""
    """URI of a list of images, a line `split/image_id` each, in the format of the official downloader."""
    subset: Literal["all", "mlperf"] = "all"
    """mlperf: the 264 classes of MLPerf's detector."""
    hierarchy: Literal["keep", "expand", "none"] = "keep"
    """keep: for evaluation; expand: each object also has a box of every class above its own."""
    rotation: Literal["none", "apply"] = "none"
    """apply: turn images and boxes upright."""
    labels: Literal["keep", "all", "none"] = "keep"
    """The verified classes of validation and test images (keep), also those of train (all)."""
    base: str = BASE
    """URI of the folder with the CSV files."""
    pixels: str = PIXELS
    """URI of the folder with <split>/<image id>.jpg."""
    composes_addresses = True

    @classmethod
    def parse(cls, text: str) -> "OpenImagesSource":
        """Read "splits=train+validation,subset=mlperf"."""
        values: dict[str, Any] = {}
        choices = {field.name: get_args(field.type) for field in fields(cls)}
        for part in filter(None, map(str.strip, text.split(","))):
            name, _, value = (piece.strip() for piece in part.partition("="))
            wrong = name not in choices or not value or (choices[name] and value not in choices[name])
            if wrong or (name == "splits" and not set(value.split("+")) <= set(_SPLITS)):
                forms = {"splits": "+".join(_SPLITS)} | dict.fromkeys(_URIS, "URI")
                expected = ", ".join(f"{key}={'|'.join(choices[key]) or forms[key]}" for key in choices)
                raise DataError(f"source openimages: cannot use {part!r}", fix=f"parameters: {expected}")
            values[name] = storage.absolute(os.path.expanduser(value)) if name in _URIS else value
        return cls(**values)

    @property
    def uri(self) -> str:
        """The source with all parameters that are not the default."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        changed = [f"{name}={value}" for name, (value, default) in values.items() if value != default]
        return "openimages:" + ",".join(changed)

    @property
    def images_uri(self) -> str:
        return f"openimages:pixels={self.pixels}"

    def listing(self) -> Listing:
        """Read classes and lists; the boxes are read when the rows are gone through."""
        states: list[tuple[str, int, str]] = []

        def noted(uri: str) -> str:
            """Return the URI of a file, and append values that change when the file does."""
            state = storage.state(uri)
            if state is None:
                raise DataError(
                    f"source {self.uri}: no file {uri}",
                    fix="check base; if the mirror lacks verified classes or hierarchy, add labels=none or "
                    "hierarchy=none",
                )
            states.append((uri, state.size, state.version))
            return uri

        listed = read_image_list(noted(self.images)) if self.images else None
        described_in = noted(storage.join(self.base, DESCRIPTIONS))
        described = kept = openimages_csv.read_descriptions(described_in)
        if self.subset == "mlperf":
            by_name = {category.name: category for category in described}
            if lacking := ", ".join([name for name in CLASSES if name not in by_name][:10]):
                raise DataError(
                    f"{described_in} describes no class {lacking}", fix="take V7's boxable classes"
                )
            kept = [by_name[name] for name in CLASSES]
        above: dict[str, set[str]] = {}
        if self.hierarchy != "none":
            above = openimages_csv.read_hierarchy(noted(storage.join(self.base, HIERARCHY)))
        expanded = above if self.hierarchy == "expand" else {}
        below: dict[str, set[str]] = defaultdict(set)
        for mid, higher in expanded.items():
            for one in higher:
                below[one].add(mid)
        present, absent = Meaning(described, kept, expanded), Meaning(described, kept, below)
        names = [split for split in _SPLITS if split in (listed or self.splits.split("+"))]
        splits = {}
        for split in names:
            takes_labels = self.labels == "all" or (self.labels == "keep" and split != "train")
            turns = self.rotation == "apply"
            read = partial(
                read_boxes, noted(storage.join(self.base, BOXES[split])), storage.join(self.pixels, split),
                kept, present, absent, listed[split] if listed else None,
                noted(storage.join(self.base, ROTATIONS[split])) if turns else "",
                noted(storage.join(self.base, LABELS[split])) if takes_labels else "",
            )  # fmt: skip
            splits["train" if len(names) == 1 else _SPLITS[split]] = Rows(read)
        state = hashlib.sha256(json.dumps(states).encode()).hexdigest()
        hierarchy = {} if self.hierarchy == "expand" else above
        return Listing(kept, splits, state, exhaustive=False, hierarchy=hierarchy)


def read_image_list(uri: str) -> dict[str, frozenset[str]]:
    """Read lines `split/image_id`; return the ids of each split."""
    fix = "write lines such as train/000002b66c9c498e"
    ids_by_split: dict[str, set[str]] = {}
    for number, line in enumerate(storage.read_bytes(uri).decode("utf-8-sig", "replace").splitlines(), 1):
        split, _, image_id = line.strip().partition("/")
        if split and (split not in _SPLITS or not image_id.isalnum()):
            raise DataError(f"{uri}, line {number}: {line.strip()[:60]!r} is not split/image_id", fix=fix)
        if split:
            ids_by_split.setdefault(split, set()).add(image_id)
    if not ids_by_split:
        raise DataError(f"{uri} lists no images", fix=fix)
    return {split: frozenset(ids) for split, ids in ids_by_split.items()}
