"""Merges a data set with corrections into a new COCO set.

Images are identified by the hash of their bytes. An image that is in both sets keeps its split and gets the
boxes of the correction. Other images of the corrections are added to train.
"""

import hashlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from trainer import storage
from trainer.base.errors import DataError, KubedetError, ResourceError
from trainer.base.os_errors import translate_oserror
from trainer.config.schema import DataConfig
from trainer.data import sources
from trainer.data.images import UnreadableImage, read_header, to_pixels
from trainer.data.plausibility import fold_name
from trainer.data.problem_counts import max_bad
from trainer.data.samples import RawRow, to_bbox
from trainer.data.sources.source import Category, Source
from trainer.storage import outputs

_READ_AHEAD = 32  # Images that are read concurrently.
_MAX_BAD_FRACTION = DataConfig().max_bad_fraction  # Share of the set's images that may be unreadable.


class OutputBox(NamedTuple):
    """A box of the new set."""

    name: str  # Of the class.
    bbox: tuple[float, ...]  # [x, y, width, height] in pixels of the displayed image.
    area: float  # Square pixels; 0 if unknown.
    iscrowd: int


class _Image(NamedTuple):
    """An image in memory, with its boxes."""

    name: str
    data: bytes
    digest: str
    size: tuple[int, int]
    boxes: list[OutputBox]
    bad_boxes: int


class CocoWriter:
    """Writes a COCO set; ids of images and annotations are unique across splits."""

    def __init__(self, folder: Path, categories: Sequence[Category], info: Mapping[str, object]) -> None:
        self._folder = folder
        listed = [{"id": item.original_id, "name": item.name} for item in categories]
        self._head = {"info": info, "categories": listed}
        self._ids = {item.name: item.original_id for item in categories}
        self._names: set[tuple[str, str]] = set()
        self._splits: dict[str, dict[str, list[Mapping[str, object]]]] = {}
        """Images and annotations of each split, in COCO's format."""
        self.images, self.boxes = Counter[str](), Counter[str]()  # Counts by split.

    def add(self, split: str, image: _Image, boxes: Sequence[OutputBox]) -> str:
        """Write an image with boxes; return its name, with a part of the digest if the original is taken."""
        name, path = image.name, PurePosixPath(image.name)
        for length in range(8, len(image.digest) + 1):
            # Some file systems ignore case.
            if (split, name.casefold()) not in self._names:
                break
            name = str(path.with_name(f"{path.stem}-{image.digest[:length]}{path.suffix}"))
        self._names.add((split, name.casefold()))
        target = self._folder / "images" / split / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(image.data)
        parts = self._splits.setdefault(split, {"images": [], "annotations": []})
        image_id, (width, height) = self.images.total() + 1, image.size
        parts["images"].append({"id": image_id, "file_name": name, "width": width, "height": height})
        for number, box in enumerate(boxes, self.boxes.total() + 1):
            area = box.area or box.bbox[2] * box.bbox[3]
            parts["annotations"].append(
                {
                    "id": number,
                    "image_id": image_id,
                    "category_id": self._ids[box.name],
                    "bbox": list(box.bbox),
                    "area": area,
                    "iscrowd": box.iscrowd,
                }
            )
        self.images[split] += 1
        self.boxes[split] += len(boxes)
        return name

    def finish(self) -> None:
        """Write the annotations of all splits."""
        (self._folder / "annotations").mkdir()
        for split, parts in self._splits.items():
            path = self._folder / "annotations" / f"instances_{split}.json"
            path.write_text(json.dumps(self._head | parts), encoding="utf-8")


@dataclass
class MergeResult:
    """Counts of the new set, and cases to report."""

    folder: str
    images: dict[str, int] = field(default_factory=dict)  # Of the new set, by split.
    boxes: dict[str, int] = field(default_factory=dict)
    corrected: Counter[str] = field(default_factory=Counter)  # Images with corrected boxes, by split.
    added: int = 0  # Images of the corrections that the set did not have.
    new_classes: list[str] = field(default_factory=list)
    contested: list[str] = field(default_factory=list)
    """Images that have different boxes in several corrections; the last ones are used."""
    renamed: list[str] = field(default_factory=list)  # Added images whose names were taken.
    left_out: list[str] = field(default_factory=list)  # Unreadable images of the set, with the reason.
    boxes_left_out: int = 0  # Boxes of the set that are not four finite numbers, or of an unknown class.
    boxes_kept: int = 0  # Boxes of corrected images whose class the corrections lack, and crowds.


class _SourceSet:
    """A source and its listing."""

    def __init__(self, text: str, source: Source) -> None:
        self.text, self.source = text, source
        self.listing = source.listing()
        self.classes = [category.name for category in self.listing.categories]


class _Correction(NamedTuple):
    """An image of the corrections, without its bytes, which are read again when needed."""

    row: RawRow
    boxes: list[OutputBox]
    origin: _SourceSet


def merge(base: str, corrections: Sequence[str], output: str) -> MergeResult:
    """Write a new COCO set atomically.

    Args:
        base: text that names the set; see `trainer.data.sources`.
        corrections: one or more sets; later ones override earlier ones.
        output: a folder on this machine that does not exist, or is empty.
    """
    if not storage.is_local(output):
        raise DataError(f"the set cannot be written to {output}", fix="write to a local folder, and copy it")
    folder = Path(storage.absolute(os.path.expanduser(output)))
    outputs.require_new(str(folder))
    base_set, *corrected_sets = [_SourceSet(text, sources.parse(text)) for text in (base, *corrections)]
    merged = MergeResult(str(folder))
    categories = _merge_categories(base_set, corrected_sets, merged)
    by_digest: dict[str, _Correction] = {}
    for corrected in corrected_sets:
        for _, row, image in _read_images(corrected):
            if isinstance(image, str) or image.bad_boxes:
                problem = image if isinstance(image, str) else f"{image.bad_boxes} bad boxes of {image.name}"
                raise DataError(f"{corrected.text}: {problem}", fix="repair the image, or remove it")
            before = by_digest.pop(image.digest, None)
            if before and sorted(before.boxes) != sorted(image.boxes):
                merged.contested.append(f"{image.name} of {corrected.text}, {before.origin.text}")
            by_digest[image.digest] = _Correction(row, image.boxes, corrected)
    with _atomic_folder(folder) as unfinished:
        info = {"description": f"{base_set.source.uri} with corrections", "corrections": list(corrections)}
        writer = CocoWriter(unfinished, categories, info)
        _write_base(base_set, by_digest, writer, merged)
        for digest, (row, boxes, origin) in by_digest.items():
            image = _read_image(origin, row)
            if isinstance(image, str) or image.digest != digest:
                raise DataError(
                    f"{origin.text}: {row['file_name']} has changed in the meantime", fix="merge again"
                )
            name = writer.add("train", image, boxes)
            merged.added += 1
            if name != image.name:
                merged.renamed.append(f"{image.name} of {origin.text} is {name}")
        writer.finish()
        merged.images, merged.boxes = dict(writer.images), dict(writer.boxes)
    return merged


def _merge_categories(base: _SourceSet, others: Sequence[_SourceSet], merged: MergeResult) -> list[Category]:
    """Return the classes of all sets, matched by name; raise if names differ only in case or spaces."""
    known = {fold_name(name): (name, base) for name in base.classes}
    clashes = []
    for other in others:
        for name in other.classes:
            same, owner = known.setdefault(fold_name(name), (name, other))
            if same != name:
                clashes.append(f"{name!r} of {other.text} and {same!r} of {owner.text}")
            elif owner is other:
                merged.new_classes.append(name)
    if clashes:
        problem = f"class names differ only by case or spaces: {'; '.join(clashes)}"
        raise DataError(problem, fix="use the same class name in all sets")
    ids = [category.original_id for category in base.listing.categories]
    numbers = [one for one in ids if isinstance(one, int)]
    kept = numbers if len(numbers) == len(ids) else list(range(1, len(ids) + 1))
    first = max(kept, default=0) + 1
    all_ids = [*kept, *range(first, first + len(merged.new_classes))]
    return list(map(Category, [*base.classes, *merged.new_classes], all_ids))


def _write_base(
    base: _SourceSet, by_digest: dict[str, _Correction], writer: CocoWriter, merged: MergeResult
) -> None:
    """Write the images of the base set, and remove those that it contains from `by_digest`."""
    used: set[str] = set()
    for split, _, image in _read_images(base):
        if isinstance(image, str):
            merged.left_out.append(image)
            continue
        boxes = image.boxes
        merged.boxes_left_out += image.bad_boxes
        if correction := by_digest.get(image.digest):
            names = set(correction.origin.classes)
            crowds = any(box.iscrowd for box in correction.boxes)
            kept = [box for box in boxes if box.name not in names or (box.iscrowd and not crowds)]
            boxes = [*correction.boxes, *kept]
            used.add(image.digest)
            merged.corrected[split] += 1
            merged.boxes_kept += len(kept)
        writer.add(split, image, boxes)
    total = writer.images.total() + len(merged.left_out)
    if len(merged.left_out) > max_bad(total, _MAX_BAD_FRACTION):
        problem = f"{len(merged.left_out)} of {total} images of {base.text} cannot be read"
        fix = "repair the set: `kubedet data inspect` names its problems"
        raise DataError(f"{problem}: {'; '.join(merged.left_out[:10])}", fix=fix)
    for digest in used:
        del by_digest[digest]


def _read_images(source_set: _SourceSet) -> Iterator[tuple[str, RawRow, _Image | str]]:
    """Yield split, row and image of all images; an unreadable image is replaced by the reason."""
    with ThreadPoolExecutor(_READ_AHEAD) as threads:
        for split, listed in source_set.listing.splits.items():
            for batch in listed.batches():
                rows = batch.to_pylist()
                for begin in range(0, len(rows), _READ_AHEAD):
                    part = rows[begin : begin + _READ_AHEAD]
                    images = threads.map(partial(_read_image, source_set), part)
                    for row, image in zip(part, images, strict=True):
                        yield split, row, image


def _read_image(source_set: _SourceSet, row: RawRow) -> _Image | str:
    """Read an image, or return the reason why it cannot be read."""
    name = row["file_name"]
    if row["fault_reason"]:
        return f"{name}: {row['fault_detail'] or row['fault_reason']}"
    try:
        data = source_set.source.read(row["origin"])
        digest = hashlib.sha256(data).hexdigest()
        image = read_header(data)
    except UnreadableImage as error:
        return f"{name}: {error}"
    except ResourceError:
        raise
    except KubedetError as error:
        return f"{name}: {error.message}"
    boxes = []
    for box in row["boxes"]:
        sides = to_bbox(box)
        if 0 <= box["category"] < len(source_set.classes) and all(map(math.isfinite, sides)):
            placed = to_pixels(sides, image, row["width"], row["height"])
            area = box["area"] if placed == sides and math.isfinite(box["area"]) else 0.0
            boxes.append(OutputBox(source_set.classes[box["category"]], tuple(placed), area, box["iscrowd"]))
    size = (image.width, image.height)
    return _Image(name, data, digest, size, boxes, len(row["boxes"]) - len(boxes))


@contextmanager
def _atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `folder`, which replaces it when the block ends without an error."""
    unfinished = folder.with_name(f".{folder.name}.tmp")
    with translate_oserror(str(folder), "write"):
        shutil.rmtree(unfinished, ignore_errors=True)  # A killed merge may have left it.
        unfinished.mkdir(parents=True)
        try:
            yield unfinished
            unfinished.replace(folder)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
