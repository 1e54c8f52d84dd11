"""COCO JSON (https://cocodataset.org/#format-data): one file, or a folder with one a split.

Images lie beside the annotations in one of the usual layouts, or are fetched by their `coco_url`.
Boxes are taken as they are: x, y from the image's top left corner, width and height, in pixels.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from trainer import storage
from trainer.data import problems as reasons
from trainer.data.problems import Problems
from trainer.data.sources.base import UNKNOWN, Box, Category, Entry, Listing, split_of
from trainer.data.sources.beside import locate
from trainer.data.sources.rows import Entries
from trainer.errors import DataError


@dataclass(frozen=True)
class CocoSource:
    """A COCO JSON or a folder with such files."""

    location: str
    cpu_bound = False

    @property
    def uri(self) -> str:
        """Name the file or folder."""
        return f"coco:{self.location}"

    def listing(self) -> Listing:
        """Read all annotation files.

        Raises:
            DataError: there is none, one is not COCO JSON, or two disagree about the categories.
        """
        digest = hashlib.sha256()
        forms = {}
        categories: list[Category] = []
        for split, uri in self._files().items():
            data = storage.read_bytes(uri)
            digest.update(f"{split} {len(data)}\n".encode() + data)
            forms[split] = (_load(data, uri), uri)
            _merge_categories(categories, forms[split][0], uri)
        splits: dict[str, Entries] = {}
        problems = Problems()
        for split, (form, uri) in forms.items():
            splits[split] = _entries(form, uri, categories, problems)
            digest.update(locate(splits[split], uri, split).encode("utf-8", "surrogatepass"))
        _note_overlaps(splits, problems)
        return Listing(categories, splits, digest.hexdigest(), problems)

    def read(self, origin: str) -> bytes:
        """Return an image's bytes."""
        return storage.read_bytes(origin)

    def _files(self) -> dict[str, str]:
        """Return the annotation file of each split; a lone file is train whatever its name."""
        if self.location.lower().endswith(".json"):
            return {"train": self.location}
        found = annotation_files(self.location)
        if not found:
            raise DataError(
                f"{self.uri}: no COCO JSON in it",
                fix="name a JSON file, or a folder that holds annotations/instances_train.json and the like",
            )
        splits: dict[str, str] = {}
        for uri in found:
            split = split_of(PurePosixPath(uri).name) or split_of(storage.parent(uri).rpartition("/")[2])
            if len(found) == 1:
                split = "train"
            if split is None:
                continue
            if split in splits:
                raise DataError(
                    f"{self.uri}: both {splits[split]} and {uri} are split {split!r}",
                    fix="name one JSON file, or leave one file a split in the folder",
                )
            splits[split] = uri
        if "train" not in splits:
            raise DataError(
                f"{self.uri}: no training split among {', '.join(found)}",
                fix="give the file's name the word train, or name that file as the source",
            )
        return {split: splits[split] for split in ("train", "val", "test") if split in splits}


def annotation_files(folder: str) -> list[str]:
    """Return the URIs of the COCO JSON files in a folder; those of box annotations if there are any.

    They are looked for in annotations/, the folder itself, coco/, and in the folders of splits
    (train, valid, val, test), in this order; the first place that has any is taken.
    """
    places: tuple[tuple[str, ...], ...] = (
        ("annotations",), ("Annotations",), (), ("coco",), ("train", "valid", "val", "test"),
    )  # fmt: skip
    for place in places:
        folders = [storage.join(folder, name) for name in place] if place else [folder]
        found = [
            storage.join(holder, name)
            for holder in folders
            for name in sorted(storage.list_states(holder))
            if name.lower().endswith(".json")
        ]
        boxes = [
            uri for uri in found
            if PurePosixPath(uri).name.startswith("instances_") or uri.endswith("_annotations.coco.json")
        ]  # fmt: skip
        if boxes or any(split_of(PurePosixPath(uri).name) for uri in found) or len(found) == 1:
            return boxes or found
    return []


def _load(data: bytes, uri: str) -> dict[str, Any]:
    """Parse a COCO JSON without its segmentations, which can be ten times the rest."""

    def without_masks(item: dict[str, Any]) -> dict[str, Any]:
        item.pop("segmentation", None)
        return item

    fix = "name a file with the lists images, annotations and categories"
    try:
        form = json.loads(data, object_hook=without_masks)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{uri} is not JSON: {error}", fix=fix) from error
    for key in ("images", "annotations", "categories"):
        if not isinstance(form, dict) or not isinstance(form.get(key), list):
            raise DataError(f"{uri} is not COCO JSON: it has no list {key!r}", fix=fix)
        if not all(isinstance(item, dict) for item in form[key]):
            raise DataError(f"{uri} is not COCO JSON: {key} holds what is no object", fix=fix)
    if not form["images"]:
        raise DataError(f"{uri} lists no images", fix=fix)
    return form


def _merge_categories(known: list[Category], form: dict[str, Any], uri: str) -> None:
    """Add a file's categories to those of the files before it."""
    by_id = {category.original_id: category.name for category in known}
    by_name = {category.name: category.original_id for category in known}
    for item in form["categories"]:
        original_id, name = item.get("id"), item.get("name")
        if not isinstance(original_id, int) or not isinstance(name, str) or not name.strip():
            raise DataError(
                f"{uri}: category {json.dumps(item)[:80]} lacks an integer id or a name",
                fix="give each category both",
            )
        if by_id.get(original_id, name) != name or by_name.get(name, original_id) != original_id:
            raise DataError(
                f"{uri}: category {original_id} {name!r} is {by_name.get(name, original_id)} "
                f"{by_id.get(original_id, name)!r} elsewhere",
                fix="give the categories the same ids and names in all files, each once",
            )
        if original_id not in by_id:
            known.append(Category(name, original_id))
            by_id[original_id], by_name[name] = name, original_id
    known.sort(key=lambda category: category.original_id)


def _entries(form: dict[str, Any], uri: str, categories: list[Category], problems: Problems) -> Entries:
    """Return a file's images with their boxes; an image that is listed twice is taken once."""
    by_id = _images(form, uri, problems)
    position = {category.original_id: index for index, category in enumerate(categories)}
    for item in form["annotations"]:
        image_id, category_id = item.get("image_id"), item.get("category_id")
        owner = by_id.get(image_id) if isinstance(image_id, int | str) else None
        if owner is None:
            problems.add(reasons.BOX_UNKNOWN_IMAGE, f"image_id {image_id} in {uri}")
            continue
        category = position.get(category_id, UNKNOWN) if isinstance(category_id, int) else UNKNOWN
        crowd = int(item.get("iscrowd") in (1, True))
        owner.boxes.append(Box(category, _bbox(item.get("bbox")), _positive(item.get("area")), crowd))
    return Entries({id(entry): entry for entry in by_id.values()}.values())


def _images(form: dict[str, Any], uri: str, problems: Problems) -> dict[int | str, Entry]:
    """Return a file's images by id."""
    by_id: dict[int | str, Entry] = {}
    by_name: dict[str, Entry] = {}
    for image in form["images"]:
        original_id, url = image.get("id"), str(image.get("coco_url") or "")
        name = image.get("file_name") or PurePosixPath(urlsplit(url).path).name
        if not isinstance(original_id, int | str) or not isinstance(name, str) or not name:
            raise DataError(
                f"{uri}: image {json.dumps(image)[:80]} lacks an id or a file_name", fix="give it both"
            )
        name = _relative(name, uri)
        if name in by_name:
            problems.add(reasons.IMAGE_LISTED_TWICE, name)
        width, height = int(_positive(image.get("width"))), int(_positive(image.get("height")))
        entry = by_name.setdefault(name, Entry(name, url, width, height, [], original_id))
        if by_id.setdefault(original_id, entry) is not entry:
            # Nobody knows which of the two the boxes belong to.
            for clash in (by_id[original_id], entry):
                clash.fault = (reasons.IMAGE_ID_TWICE, f"id {original_id}")
            by_id[f"{original_id} {name}"] = entry
    return by_id


def _relative(name: str, uri: str) -> str:
    """Return a file_name with forward slashes; refuse one that leads out of the folder."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or not path.name or "\0" in name or ":" in path.parts[0]:
        raise DataError(
            f"{uri}: refused file_name {name!r}, which leads out of the images' folder",
            fix="make file_name relative to the folder of the images",
        )
    return str(path)


def _positive(value: Any) -> float:
    """Return a positive finite number as it is, and 0 for anything else."""
    usable = isinstance(value, int | float) and math.isfinite(value) and 0 < value < 1e12
    return float(value) if usable else 0.0


def _bbox(value: Any) -> tuple[float, ...]:
    """Return a box as four finite numbers, or () if it is something else."""
    if not isinstance(value, list) or len(value) != 4:
        return ()
    if not all(isinstance(part, int | float) and math.isfinite(part) and abs(part) < 1e9 for part in value):
        return ()
    return tuple(float(part) for part in value)


def _note_overlaps(splits: dict[str, Entries], problems: Problems) -> None:
    """Note images that are in more than one split: scores on them would flatter."""
    seen: dict[str, str] = {}
    for split, entries in splits.items():
        for entry in entries:
            if seen.setdefault(entry.origin, split) != split and entry.origin:
                problem = f"{entry.file_name} in {seen[entry.origin]} and {split}"
                problems.add(reasons.IMAGE_IN_TWO_SPLITS, problem)
