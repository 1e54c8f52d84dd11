"""Writes a source's rows as raw tables: assigns labels, keys and ids, and creates missing splits.

Labels are contiguous from 0 and the same in all splits. Boxes are cleaned later, when the true size of the
image is known.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer import storage
from trainer.base.errors import DataError
from trainer.base.temporary_folders import temporary_folder
from trainer.config.schema import DataConfig
from trainer.data import image_keys
from trainer.data import problem_counts as reasons
from trainer.data.image_fetching import SHA256
from trainer.data.plausibility import AnnotationChecker
from trainer.data.problem_counts import Problems
from trainer.data.raw_folder import BLOCK, ROW, write_table
from trainer.data.raw_manifest import Category, SplitCounts
from trainer.data.sources.source import UNKNOWN, Listing, Rows
from trainer.data.sources.source import Category as Listed

SPLITS = ("train", "val", "test")
_DROPPED = -2  # The label of a class that data.classes leaves out.


@dataclass
class AnnotationTables:
    """The result of `write_tables`: fields of `trainer.data.raw_manifest.RawManifest`."""

    categories: list[Category]
    hierarchy: dict[str, list[int]]
    splits: dict[str, SplitCounts]
    tables: dict[str, str]
    warnings: list[str]


def write_tables(
    listing: Listing, config: DataConfig, folder: str, where: str, excluded: frozenset[str]
) -> AnnotationTables:
    """Write `<folder>/<split>.parquet` for each split of a listing; add problems to `listing.problems`.

    Images whose key or file name is in `excluded` are left out; `where` names the source in messages.
    """
    categories, labels = _select_classes(listing, config.classes)
    checker = AnnotationChecker(
        [category.name for category in categories], listing.box_format, check_names=not config.classes
    )
    splits, tables = {}, {}
    boxes_of_train: Counter[int] = Counter()
    found_names: set[str] = set()  # Excluded names that occur.
    with temporary_folder() as temporary:
        drafts = {
            split: _draft_split(rows, labels, temporary / split, excluded, found_names, listing.problems)
            for split, rows in listing.splits.items()
        }
        drop = config.empty_images == "drop" or (config.empty_images == "auto" and not listing.exhaustive)
        for split, draft in drafts.items():
            empty = int((~draft.kept).sum())
            if drop and empty:
                listing.problems.add(reasons.IMAGE_WITHOUT_BOXES, f"{empty} of {split}", empty)
            elif not drop:
                draft.kept[:] = True
        first = 1
        for split, draft, chosen in _assign_splits(drafts, config):
            boxes_of_label: Counter[int] = Counter()
            rows = _number_rows(draft, chosen, first, boxes_of_label, partial(checker.add, split))
            tables[split] = write_table(storage.join(folder, f"{split}.parquet"), rows)
            splits[split] = SplitCounts(int(chosen.sum()), boxes_of_label.total())
            first += splits[split].images
            boxes_of_train = boxes_of_label if split == "train" else boxes_of_train
    if "train" not in splits:
        fix = "use a source with a train split that has boxes of data.classes"
        raise DataError("no training images", fix=fix)
    check_listed_boxes(listing.problems, where, splits, config)
    without_boxes = [category.name for category in categories if not boxes_of_train[category.id]]
    for name in without_boxes:
        listing.problems.add(reasons.CLASS_WITHOUT_BOXES, name)
    if len(without_boxes) == len(categories):
        problem = f"no training image has a box of {', '.join(without_boxes[:20])}"
        fix = "check that the boxes belong to these images and to listed classes, or change data.classes"
        raise DataError(problem, fix=fix)
    found = checker.findings(list(listing.splits))
    found.raise_errors(where)
    unknown = sorted(name for name in excluded - found_names if not SHA256.fullmatch(name))
    if unknown:
        found.warnings.append(
            f"{len(unknown)} names in data.exclude match no image (first: {unknown[0]}): "
            "write them as in the source"
        )
    labels_by_id = {category.original_id: category.id for category in categories}
    hierarchy = {}
    for original_id, label in labels_by_id.items():
        above = [
            labels_by_id[higher]
            for higher in listing.hierarchy.get(original_id, ())
            if higher in labels_by_id
        ]
        if above:
            hierarchy[str(label)] = sorted(above)
    return AnnotationTables(categories, hierarchy, splits, tables, found.warnings)


def check_listed_boxes(
    problems: Problems, where: str, splits: dict[str, SplitCounts], config: DataConfig
) -> None:
    """Raise DataError if the annotations alone show that too many boxes are unusable."""
    cases = problems.cases()
    bad = Problems.from_cases({reason: cases[reason] for reason in cases if reason in reasons.UNLISTED_BOXES})
    boxes = sum(split.boxes for split in splits.values()) + sum(bad.counts.values())
    bad.check(where, images=0, boxes=boxes, max_bad_fraction=config.max_bad_fraction)


@dataclass
class _SplitDraft:
    """A labeled split before ids are assigned; several images may have the same key."""

    path: Path
    keys: np.ndarray  # uint64 [rows]: `image_keys.key_hash` of each key.
    fractions: np.ndarray  # float64 [rows]: hashes that decide which rows become val.
    kept: np.ndarray  # bool [rows]: rows with a labeled box, or all rows if images without boxes are allowed.


def _draft_split(
    rows: Rows,
    labels: np.ndarray,
    path: Path,
    excluded: frozenset[str],
    found_names: set[str],
    problems: Problems,
) -> _SplitDraft:
    """Write a split's rows to a local file, since the source may be slow.

    Names in `excluded` that occur are added to `found_names`.
    """
    numbers, fractions = array("Q"), array("d")
    filled = [np.zeros(0, bool)]
    with pq.ParquetWriter(path, ROW, compression="lz4") as file:
        for listed in rows.batches():
            batch = listed
            if excluded:
                names = listed.column("file_name").to_pylist()
                matches = [excluded.intersection((name, image_keys.make_key(name))) for name in names]
                batch = listed.filter(pa.array([not match for match in matches]))
                for name, match in zip(names, matches, strict=True):
                    if match:
                        problems.add(reasons.IMAGE_EXCLUDED, name)
                        found_names |= match
            boxes = _relabel_boxes(batch.column("boxes"), labels)
            stems = [image_keys.make_key(name) for name in batch.column("file_name").to_pylist()]
            numbers.extend(map(image_keys.key_hash, stems))
            fractions.extend(image_keys.hash_fraction(key, "val") for key in stems)
            labeled_before = np.append(0, np.cumsum(boxes.values.field("category").to_numpy() >= 0))
            filled.append(np.diff(labeled_before[boxes.offsets.to_numpy()]) > 0)
            columns = [batch.column(name) for name in ROW.names[2:-1]]
            ids = pa.nulls(len(stems), pa.int64())
            file.write_batch(pa.RecordBatch.from_arrays([ids, pa.array(stems), *columns, boxes], schema=ROW))
    return _SplitDraft(path, np.array(numbers, np.uint64), np.array(fractions), np.concatenate(filled))


def _assign_splits(
    drafts: dict[str, _SplitDraft], config: DataConfig
) -> list[tuple[str, _SplitDraft, np.ndarray]]:
    """Return the non-empty splits: name, draft, and a mask bool [rows] of the rows of the split.

    If test or val is missing, images of train are held out by a hash of their keys, so that an image stays in
    its split when others are added. At least one image stays in train, and at least one becomes val.
    """
    parts = {split: (draft, draft.kept) for split, draft in drafts.items()}
    if train := drafts.get("train"):
        lacking = {split for split in SPLITS if not (split in drafts and drafts[split].kept.any())}
        tests, held_out = np.zeros_like(train.kept), np.zeros_like(train.kept)
        if "test" in lacking:
            tests = train.kept & (train.keys < int(config.test_fraction * (2**64 - 1)))
            if tests.any() and tests.sum() == train.kept.sum():  # Keep one in train.
                tests[np.argmax(np.where(tests, train.keys, 0))] = False
        available = np.flatnonzero(train.kept & ~tests)
        if "val" in lacking and config.val_fraction > 0 and len(available) > 1:
            fractions = train.fractions[available]
            count = min(max(1, int((fractions < config.val_fraction).sum())), len(available) - 1)
            held_out[available[np.argsort(fractions, kind="stable")[:count]]] = True
        parts["train"] = train, train.kept & ~tests & ~held_out
        for split, chosen in (("val", held_out), ("test", tests)):
            if chosen.any():
                parts[split] = train, chosen
    limited = []
    for split in (split for split in SPLITS if split in parts and parts[split][1].any()):
        draft, rows = parts[split][0], np.flatnonzero(parts[split][1])
        if config.max_images:  # Take the rows with the lowest hashes.
            rows = rows[np.argsort(draft.keys[rows], kind="stable")[: config.max_images]]
        chosen = np.zeros(len(draft.kept), bool)
        chosen[rows] = True
        limited.append((split, draft, chosen))
    return limited


def _number_rows(
    draft: _SplitDraft,
    chosen: np.ndarray,
    image_id: int,
    boxes_of_label: Counter[int],
    check: Callable[[pa.RecordBatch], None],
) -> Iterator[pa.RecordBatch]:
    """Yield the chosen rows with unique keys and ids from `image_id` on; count boxes, and `check` rows."""
    numbers, counts = np.unique(draft.keys, return_counts=True)
    twice = np.isin(draft.keys, numbers[counts > 1])
    at = 0
    with pq.ParquetFile(draft.path) as file:
        for batch in file.iter_batches(BLOCK):
            part = slice(at, at + len(batch))
            at += len(batch)
            rows = batch.filter(pa.array(chosen[part]))
            clashing = twice[part][chosen[part]]
            if clashing.any():
                named = zip(rows["key"].to_pylist(), rows["file_name"].to_pylist(), clashing, strict=True)
                keys = [image_keys.distinct_key(key, name) if clash else key for key, name, clash in named]
                rows = rows.set_column(1, ROW.field(1), pa.array(keys))
            rows = rows.set_column(0, ROW.field(0), pa.array(image_id + np.arange(len(rows))))
            image_id += len(rows)
            check(rows)
            label, count = np.unique(rows["boxes"].flatten().field("category"), return_counts=True)
            boxes_of_label.update(dict(zip(label.tolist(), count.tolist(), strict=True)))
            yield rows


def _select_classes(listing: Listing, chosen_names: list[str]) -> tuple[list[Category], np.ndarray]:
    """Return the selected categories, and the label of each category of the source.

    Labels are an array; the last item, index -1, is for UNKNOWN.
    """
    names = [category.name for category in listing.categories]
    if not names:
        raise DataError("the source lists no classes", fix="add categories to its annotations")
    # Names take priority over ids; only ids that are strings (MIDs) can be selected.
    by_name: dict[int | str, Listed] = {category.original_id: category for category in listing.categories}
    by_name |= {category.name: category for category in listing.categories}
    unknown = [name for name in chosen_names if name not in by_name]
    kept = [by_name[name] for name in chosen_names or names if name in by_name]
    twice = [category.name for category, count in Counter(kept).items() if count > 1]
    if unknown or twice:
        problem = f"unknown classes: {', '.join(unknown)}" if unknown else f"twice: {', '.join(twice)}"
        raise DataError(f"data.classes lists {problem}", fix=f"choose among {', '.join(names[:100])}")
    position = {category: label for label, category in enumerate(kept)}
    categories = [Category(label, *category) for label, category in enumerate(kept)]
    labels = [position.get(category, _DROPPED) for category in listing.categories]
    return categories, np.array([*labels, UNKNOWN])


def _relabel_boxes(boxes: pa.ListArray, labels: np.ndarray) -> pa.ListArray:
    """Replace the categories of boxes by labels (the last one is for UNKNOWN), and remove _DROPPED boxes."""
    values = boxes.flatten()  # Only the boxes of this slice.
    label = labels[values.field("category").to_numpy()]
    kept = label != _DROPPED
    fields = [values.field(index) for index in range(values.type.num_fields)]
    fields[0] = pa.array(label.astype(np.int32))
    changed = pa.StructArray.from_arrays(fields, fields=list(values.type)).filter(pa.array(kept))
    offsets = boxes.offsets.to_numpy()
    after = np.append(0, np.cumsum(kept))[offsets - offsets[0]]
    return pa.ListArray.from_arrays(pa.array(after.astype(np.int32)), changed)
