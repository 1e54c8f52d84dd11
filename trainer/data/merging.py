"""Merges a data set and corrections of it into a new COCO set.

An image is identified by the hash of its bytes: one that is in both has the boxes of the correction, in its
original split. Other images of the corrections are added to train.
"""

import hashlib
import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple

from trainer import storage
from trainer.base.errors import DataError, KubedetError, ResourceError
from trainer.base.os_errors import translate_oserror
from trainer.config.schema import DataConfig
from trainer.data import sources
from trainer.data.images import UnreadableImage, measure, normalize, place_box
from trainer.data.sources.source import Category, Listing, Source


class WrittenBox(NamedTuple):
    """A box of a set that is written."""

    name: str
    """Of the class."""
    bbox: tuple[float, ...]
    """[x, y, width, height] in pixels of the image as it is displayed."""
    area: float
    """Square pixels; 0 where nobody said it."""
    iscrowd: int


class CocoWriter:
    """A set that grows; ids of images and annotations count on through all splits."""

    def __init__(self, folder: Path, categories: Sequence[Category], info: dict[str, Any]) -> None:
        """Begin it.

        Args:
            folder: an empty one.
            categories: with ids that are integers.
            info: what the files say of themselves.
        """
        self._folder, self._info = folder, info
        self._categories = [{"id": item.original_id, "name": item.name} for item in categories]
        self._ids = {item.name: item.original_id for item in categories}
        self._parts: dict[str, tuple[IO[str], IO[str]]] = {}
        self._names: set[tuple[str, str]] = set()
        self.images: dict[str, int] = {}
        """Images of each split."""
        self.boxes: dict[str, int] = {}
        """Boxes of each split."""

    def add(
        self,
        split: str,
        name: str,
        data: bytes,
        size: tuple[int, int],
        boxes: Sequence[WrittenBox],
        digest: str,
    ) -> str:
        """Write an image with its boxes.

        Args:
            split: train, val or test.
            name: relative, with forward slashes; it gets a part of the digest where it is taken.
            data: of the file.
            size: width and height as it is displayed.
            boxes: its boxes.
            digest: of the data, in hexadecimal.

        Returns:
            The name that it has.
        """
        name = self._free(split, name, digest)
        path = self._folder / "images" / split / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        if split not in self._parts:
            self._parts[split] = _temporary(), _temporary()
            self.images[split] = self.boxes[split] = 0
        images, annotations = self._parts[split]
        image_id = sum(self.images.values()) + 1
        entry = {"id": image_id, "file_name": name, "width": size[0], "height": size[1]}
        images.write(f"{_separator(self.images[split])}{json.dumps(entry)}")
        self.images[split] += 1
        for box in boxes:
            annotation = {
                "id": sum(self.boxes.values()) + 1, "image_id": image_id, "category_id": self._ids[box.name],
                "bbox": list(box.bbox), "area": box.area or box.bbox[2] * box.bbox[3], "iscrowd": box.iscrowd,
            }  # fmt: skip
            annotations.write(f"{_separator(self.boxes[split])}{json.dumps(annotation)}")
            self.boxes[split] += 1
        return name

    def finish(self) -> None:
        """Write the annotations of all splits."""
        (self._folder / "annotations").mkdir()
        for split, parts in self._parts.items():
            path = self._folder / "annotations" / f"instances_{split}.json"
            with path.open("w", encoding="utf-8") as file:
                head = json.dumps({"info": self._info, "categories": self._categories})
                file.write(f'{head[:-1]}, "images": [')
                for part, after in zip(parts, ('], "annotations": [', "]}\n"), strict=True):
                    part.seek(0)
                    while block := part.read(1 << 20):
                        file.write(block)
                    part.close()
                    file.write(after)

    def _free(self, split: str, name: str, digest: str) -> str:
        # Some file systems do not tell capitals from small letters.
        key, path = (split, name.casefold()), PurePosixPath(name)
        for length in range(8, len(digest) + 1):
            if key not in self._names:
                break
            name = str(path.with_name(f"{path.stem}-{digest[:length]}{path.suffix}"))
            key = (split, name.casefold())
        self._names.add(key)
        return name


def _temporary() -> IO[str]:
    return TemporaryFile("w+", encoding="utf-8")


def _separator(before: int) -> str:
    return ",\n" if before else "\n"


_AHEAD = 32
"""Images that are read side by side."""

_MOST_BAD = DataConfig().max_bad_fraction
"""Share of the set's images that may be left out."""

SAME_PLACE = 0.9
"""Intersection over union above which two boxes are in the same place; as in page/corrections.js."""

_LARGEST, _QUALITY = 65_535, 95
_STALE_SECONDS = 3600


@dataclass
class Merged:
    """What became of it."""

    folder: str
    images: dict[str, int] = field(default_factory=dict)
    """Of the new set, by split."""
    boxes: dict[str, int] = field(default_factory=dict)
    corrected: Counter[str] = field(default_factory=Counter)
    """Images whose boxes are those of a correction, by split."""
    added: int = 0
    """Images of the corrections that the set did not have."""
    new_classes: list[str] = field(default_factory=list)
    """Classes of the corrections that the set did not have."""
    contested: list[str] = field(default_factory=list)
    """Images with other boxes in more than one of the corrections: the last is taken."""
    renamed: list[str] = field(default_factory=list)
    """Images of the corrections whose name another image of the set has."""
    left_out: list[str] = field(default_factory=list)
    """Images of the set that cannot be had, with the reason."""
    boxes_left_out: int = 0
    """Boxes of the set that are not four finite numbers, or of a class that it does not list."""
    boxes_kept: int = 0
    """Boxes of corrected images that stay: crowds, and of classes that the corrections do not have."""


class _Image(NamedTuple):
    """An image that was read, with its boxes in pixels as it is displayed."""

    name: str
    data: bytes
    digest: str
    size: tuple[int, int]
    boxes: list[WrittenBox]
    bad_boxes: int


@dataclass
class _Set:
    """A source and what it lists."""

    text: str
    source: Source
    listing: Listing

    @property
    def names(self) -> list[str]:
        """Its classes, by their place."""
        return [category.name for category in self.listing.categories]


class _Correction(NamedTuple):
    """An image of the corrections; its bytes are read again when they are needed."""

    row: dict[str, Any]
    boxes: list[WrittenBox]
    origin: _Set


def merge(base: str, corrections: Sequence[str], output: str, *, keep_overlaps: bool = False) -> Merged:
    """Write a new COCO set; it is there whole or not at all.

    Args:
        base: the set, as `trainer.data.sources` takes it.
        corrections: one set or several, the later before the earlier where both have an image.
        output: a folder on this machine that is not there, or is empty.
        keep_overlaps: accept corrected images that have boxes of different classes in the same place.

    Raises:
        DataError: a set cannot be read, classes differ in capitals alone, a corrected image has boxes of
            different classes in the same place, or the folder has something in it.
        StorageError: it cannot be written.
    """
    folder = _checked_output(output)
    base_set, *corrected_sets = [_open(text) for text in (base, *corrections)]
    merged = Merged(str(folder))
    categories = _categories(base_set, corrected_sets, merged)
    by_digest: dict[str, _Correction] = {}
    for corrected_set in corrected_sets:
        _gather(corrected_set, by_digest, merged)
    if not keep_overlaps:
        _refuse_overlaps(by_digest.values())
    with _new_folder(folder) as unfinished:
        info = {"description": f"{base_set.source.uri} with corrections", "corrections": list(corrections)}
        writer = CocoWriter(unfinished, categories, info)
        _write_base(base_set, by_digest, writer, merged)
        _write_rest(by_digest, writer, merged)
        writer.finish()
        merged.images, merged.boxes = writer.images, writer.boxes
    return merged


def _checked_output(output: str) -> Path:
    if not storage.is_local(output):
        raise DataError(
            f"the set cannot be written to {output}",
            fix="name a folder of this machine, and copy it from there",
        )
    folder = Path(storage.absolute(os.path.expanduser(output)))
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise DataError(f"{folder} is there already", fix="name a new folder; nothing is written over")
    return folder


def _open(text: str) -> _Set:
    source = sources.parse(text)
    return _Set(text, source, source.listing())


def _categories(base: _Set, others: Sequence[_Set], merged: Merged) -> list[Category]:
    """Return the classes of all sets, matched by their names.

    Raises:
        DataError: names differ in capitals or blanks alone: nobody knows whether they are one class.
    """
    known = {_plain(name): (name, base) for name in base.names}
    clashes = []
    for other in others:
        for name in other.names:
            same, owner = known.setdefault(_plain(name), (name, other))
            if same != name:
                clashes.append(f"{name!r} of {other.text} and {same!r} of {owner.text}")
            elif owner is other:
                merged.new_classes.append(name)
    if clashes:
        raise DataError(
            "classes differ in capitals or blanks alone: " + "; ".join(clashes),
            fix="give a class the same name in all sets",
        )
    ids = [category.original_id for category in base.listing.categories]
    numbers = [one for one in ids if isinstance(one, int)]
    kept = numbers if len(numbers) == len(ids) else list(range(1, len(ids) + 1))
    first = max(kept, default=0) + 1
    all_ids = [*kept, *range(first, first + len(merged.new_classes))]
    return list(map(Category, [*base.names, *merged.new_classes], all_ids))


def _plain(name: str) -> str:
    return " ".join(name.split()).casefold()


def _gather(corrected: _Set, by_digest: dict[str, _Correction], merged: Merged) -> None:
    """Take up the images of one set of corrections.

    Raises:
        DataError: one of them, or of its boxes, cannot be used.
    """
    for split in corrected.listing.splits:
        for row, image in _images(corrected, split):
            if isinstance(image, str):
                raise DataError(
                    f"{corrected.text}: {image}", fix="mend or remove this image, and merge again"
                )
            if image.bad_boxes:
                raise DataError(
                    f"{corrected.text}: {image.bad_boxes} boxes of {image.name} are not four finite numbers, "
                    "or of a class that is not listed",
                    fix="mend or remove them, and merge again",
                )
            before = by_digest.pop(image.digest, None)
            if before and sorted(before.boxes) != sorted(image.boxes):
                merged.contested.append(f"{image.name} of {corrected.text}, {before.origin.text}")
            by_digest[image.digest] = _Correction(row, image.boxes, corrected)


def _refuse_overlaps(corrections: Iterable[_Correction]) -> None:
    """Refuse corrected images in which boxes of different classes are in the same place.

    Raises:
        DataError: with their count and the first of them.
    """
    found = []
    for row, boxes, origin in corrections:
        single = [box for box in boxes if not box.iscrowd]
        names = {
            box.name
            for box in single
            if any(
                other.name != box.name and _overlap(box.bbox, other.bbox) >= SAME_PLACE for other in single
            )
        }
        if names:
            found.append(f"{row['file_name']} of {origin.text} ({', '.join(sorted(names))})")
    if found:
        raise DataError(
            f"{len(found)} corrected images have boxes of different classes in the same place: "
            + ", ".join(found[:10]),
            fix="keep one box of each place; if the classes do overlap (such as person and woman), "
            "add --keep-overlaps",
        )


def _overlap(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the intersection over union of two boxes [x, y, width, height]."""
    sides = [min(one[axis] + one[axis + 2], other[axis] + other[axis + 2]) - max(one[axis], other[axis])
             for axis in (0, 1)]  # fmt: skip
    both = max(sides[0], 0.0) * max(sides[1], 0.0)
    return both / (one[2] * one[3] + other[2] * other[3] - both)


def _write_base(base: _Set, by_digest: dict[str, _Correction], writer: CocoWriter, merged: Merged) -> None:
    """Write the images of the set; those that are corrected go out of `by_digest` when all are written."""
    used: set[str] = set()
    for split in base.listing.splits:
        for row, image in _images(base, split):
            if isinstance(image, str):
                merged.left_out.append(image)
                continue
            boxes = image.boxes
            merged.boxes_left_out += image.bad_boxes
            correction = by_digest.get(image.digest)
            if correction:
                kept = _uncorrected(boxes, correction)
                boxes = [*correction.boxes, *kept]
                used.add(image.digest)
                merged.corrected[split] += 1
                merged.boxes_kept += len(kept)
            writer.add(split, row["file_name"], image.data, image.size, boxes, image.digest)
    total = sum(writer.images.values()) + len(merged.left_out)
    if len(merged.left_out) > _MOST_BAD * total:
        raise DataError(
            f"{len(merged.left_out)} of {total} images of {base.text} cannot be had: "
            + "; ".join(merged.left_out[:10]),
            fix="mend the set: `kubedet data inspect` says what is wrong with it",
        )
    for digest in used:
        del by_digest[digest]


def _uncorrected(boxes: list[WrittenBox], correction: _Correction) -> list[WrittenBox]:
    """Return the boxes of which a correction says nothing: of classes that it does not have, and crowds."""
    names = set(correction.origin.names)
    crowds = any(box.iscrowd for box in correction.boxes)
    return [box for box in boxes if box.name not in names or (box.iscrowd and not crowds)]


def _write_rest(by_digest: dict[str, _Correction], writer: CocoWriter, merged: Merged) -> None:
    """Add the images of the corrections that the set does not have."""
    for digest, correction in by_digest.items():
        row = correction.row
        image = _read(correction.origin, row)
        if isinstance(image, str) or image.digest != digest:
            raise DataError(
                f"{correction.origin.text}: {row['file_name']} has changed meanwhile", fix="merge again"
            )
        name = writer.add("train", image.name, image.data, image.size, correction.boxes, digest)
        merged.added += 1
        if name != image.name:
            merged.renamed.append(f"{image.name} of {correction.origin.text} is {name}")


def _images(whole: _Set, split: str) -> Iterator[tuple[dict[str, Any], _Image | str]]:
    """Yield the rows of a split with their images, or why there is none."""
    with ThreadPoolExecutor(_AHEAD) as threads:
        for batch in whole.listing.splits[split].batches():
            rows = batch.to_pylist()
            for begin in range(0, len(rows), _AHEAD):
                part = rows[begin : begin + _AHEAD]
                yield from zip(part, threads.map(lambda row: _read(whole, row), part), strict=True)


def _read(whole: _Set, row: dict[str, Any]) -> _Image | str:
    """Read an image, or say why it cannot be had."""
    name = row["file_name"]
    if row["fault_reason"]:
        return f"{name}: {row['fault_detail'] or row['fault_reason']}"
    try:
        data = whole.source.read(row["origin"])
        digest = hashlib.sha256(data).hexdigest()
        image = measure(data, row["orientation"])
        if row["orientation"] not in (0, measure(data).orientation):
            # The file does not say itself how it is turned.
            data = normalize(data, _LARGEST, _QUALITY, row["orientation"]).jpeg
    except UnreadableImage as error:
        return f"{name}: {error}"
    except ResourceError:
        raise
    except KubedetError as error:
        return f"{name}: {error.message}"
    boxes = []
    for box in row["boxes"]:
        sides = [box[axis] for axis in "xywh"]
        if 0 <= box["category"] < len(whole.names) and all(map(math.isfinite, sides)):
            placed = place_box(sides, image, row["width"], row["height"])
            area = box["area"] if placed == sides and math.isfinite(box["area"]) else 0.0
            boxes.append(WrittenBox(whole.names[box["category"]], tuple(placed), area, box["iscrowd"]))
    size = (image.width, image.height)
    return _Image(name, data, digest, size, boxes, len(row["boxes"]) - len(boxes))


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Give a folder beside the final one, which takes its name when the block ends; else it goes."""
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    with translate_oserror(str(folder), "write"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        for stale in folder.parent.glob(f".{folder.name}.*.tmp"):  # Of merges that were killed.
            with suppress(OSError, ValueError):
                if time.time() - stale.stat().st_mtime > _STALE_SECONDS and not _runs(stale):
                    shutil.rmtree(stale)
        unfinished.mkdir()
        try:
            yield unfinished
            unfinished.replace(folder)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise


def _runs(unfinished: Path) -> bool:
    """Tell whether the process that writes a folder is there."""
    try:
        os.kill(int(unfinished.suffixes[-2][1:]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
