"""Describes data: images, boxes and classes of each split, sizes and shapes, and problems."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trainer import storage
from trainer.base import log, worker_pool
from trainer.base.errors import DataError, MissingError, StorageError
from trainer.config.schema import DataConfig
from trainer.data import plausibility, statistics
from trainer.data import problem_counts as reasons
from trainer.data.data_views import RawImages, Shards, SourceRows, as_picture, open_view
from trainer.data.images import (
    SHARES,
    SHARES_UPRIGHT,
    NormalImage,
    UnreadableImage,
    normalize,
    place_box,
)
from trainer.data.plausibility import AnnotationCheck, Findings, check_samples, note_image
from trainer.data.preview import sheet
from trainer.data.problem_counts import Cases, Problems
from trainer.data.samples import AnnotatedImage, Annotation, RawRow, bbox_of
from trainer.data.shard_folder import DuplicatePair
from trainer.data.shard_writer import clean
from trainer.data.statistics import SplitStatistics

_OF_PIXELS = ("box_side", "box_share", "box_aspect", "image_side", "image_aspect")
_STAND_IN = 1000
_LARGEST, _QUALITY = 1600, 90
_READERS = 8


@dataclass(frozen=True)
class SplitReport:
    """Counts of a split, of boxes that cleaning keeps."""

    images: int
    boxes: int
    shards: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class LookedAt:
    """Images that were read, and their problems."""

    images: int = 0
    problems: dict[str, Cases] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What `inspect` found."""

    kind: str
    uri: str
    classes: list[str]
    """By label."""
    splits: dict[str, SplitReport]
    statistics: dict[str, SplitStatistics]
    problems: dict[str, int]
    """Counts by reason."""
    examples: dict[str, list[str]]
    """By reason."""
    warnings: list[str]
    read_as: str = ""
    """How a source was interpreted."""
    fingerprint: str = ""
    """Empty for a source."""
    errors: list[tuple[str, str]] = field(default_factory=list)
    """Problems and remedies."""
    near_duplicates: list[DuplicatePair] = field(default_factory=list)
    looked_at: LookedAt = LookedAt()


def inspect(
    text: str, config: DataConfig | None = None, images: int | None = None, pairs: str = ""
) -> Report:
    """Describe shards, raw images or a source, and check them (see `trainer.data.plausibility`).

    Args:
        text: see `open_view`.
        config: how a source is read.
        images: images of each split to read; None decides by where they are stored.
        pairs: PNG that receives the near duplicates across splits.

    Raises:
        DataError: it is missing, empty or not of its format.
        StorageError: it cannot be reached.
    """
    view = open_view(text, config)
    if isinstance(view, Shards):
        return _describe_shards(view)
    names = isinstance(view, SourceRows) and not (config and config.classes)
    meaning = AnnotationCheck(view.names, view.box_format, names=names)
    sampled = _Sample(view, view.sample_size if images is None else images)
    in_rows = Problems()
    described = {split: _describe(view, split, meaning, sampled, in_rows) for split in view.splits}
    problems = view.problems()
    problems.merge(in_rows.cases())
    in_images, hashes = sampled.look()
    counts = problems.counts | in_images.counts
    problems.merge(in_images.cases())
    found = meaning.findings()
    if not found.errors:  # Their consequences would be reported as well.
        of_images = check_samples(counts, described, sampled.count)
        found.errors += of_images.errors
        found.warnings += of_images.warnings
    named, warnings = plausibility.near_duplicates(hashes, sampled.name)
    found.warnings += warnings
    if pairs and named:
        sampled.draw(named, pairs)
    return Report(
        kind=view.kind,
        uri=view.uri,
        read_as=view.read_as if isinstance(view, SourceRows) else "",
        fingerprint=view.manifest.fingerprint if isinstance(view, RawImages) else "",
        classes=view.names,
        splits={split: SplitReport(counts.images, counts.boxes) for split, counts in described.items()},
        statistics=described,
        problems=dict(sorted(problems.counts.items())),
        examples=problems.examples,
        warnings=found.warnings,
        errors=found.errors,
        near_duplicates=named,
        looked_at=LookedAt(sampled.count, in_images.cases()),
    )


def check(report: Report, config: DataConfig) -> None:
    """Refuse a source that could not be downloaded and sharded, without fetching its images.

    Raises:
        DataError: too many images or boxes are bad, there are none to train on, or annotations are wrong.
    """
    Findings(report.errors).check(report.uri)
    if report.kind != SourceRows.kind:
        return
    problems = Problems(report.problems, report.examples)
    images = sum(split.images for split in report.splits.values())
    boxes = sum(split.boxes for split in report.splits.values())
    problems.check(
        report.uri,
        images=images + problems.total(reasons.BAD_IMAGES),
        boxes=boxes + problems.total(reasons.BAD_BOXES),
        max_bad_fraction=config.max_bad_fraction,
    )
    Problems.of(report.looked_at.problems).check(
        f"{report.uri}, of which some images were read",
        images=report.looked_at.images, boxes=0, max_bad_fraction=config.max_bad_fraction,
    )  # fmt: skip
    train = report.splits.get("train", SplitReport(0, 0))
    for noun, count in (("images", train.images), ("boxes", train.boxes)):
        if not count:
            raise DataError(f"{report.uri}: no {noun} to train on", fix="check its annotations")


def _describe_shards(view: Shards) -> Report:
    index = view.index
    left_out = [f"{item.file_name}: {item.reason}" for item in index.quarantined]
    absent = view.absent()
    examples = {reasons.IMAGE_UNREADABLE: left_out[: reasons.EXAMPLES]} if left_out else {}
    return Report(
        kind=view.kind,
        uri=view.uri,
        fingerprint=index.fingerprint,
        classes=view.names,
        splits={
            name: SplitReport(
                split.samples, split.boxes, len(split.shards), sum(s.bytes for s in split.shards)
            )
            for name, split in index.splits.items()
        },
        statistics=index.statistics,
        problems=index.problems | dict(sorted(absent.counts.items())),
        examples=examples | absent.examples,
        warnings=index.warnings,
        near_duplicates=index.near_duplicates,
    )


class _Sample:
    """Images of each split that are read, chosen by a hash of their sizes in bytes, if these are known.

    So a file that is in two splits is chosen in both.
    """

    def __init__(self, view: RawImages | SourceRows, limit: int) -> None:
        self._view, self._limit = view, limit
        self._rows: dict[str, list[RawRow]] = {}
        self.count = 0
        """Images that were read."""

    def add(self, split: str, rows: list[RawRow]) -> None:
        """Take the rows of a split that belong to the sample."""
        drawn = self._rows.setdefault(split, [])
        drawn += [
            row
            for row in rows
            if not row["fault_reason"] and storage.scheme(row["origin"]) not in storage.WEB
        ]
        drawn.sort(key=_order)
        del drawn[self._limit :]

    def look(self) -> tuple[Problems, dict[str, np.ndarray]]:
        """Read the images; return their problems, and the hashes of each split."""
        problems = Problems()
        tasks = [(split, number) for split, drawn in self._rows.items() for number in range(len(drawn))]
        hashes = {split: [plausibility.NO_HASH] * len(drawn) for split, drawn in self._rows.items()}
        with log.progress("inspect images", len(tasks), "images") as bar:
            for split, number, outcome in worker_pool.run(
                self._look_at, tasks, max(_READERS, worker_pool.available_cores()), processes=False
            ):
                row = self._rows[split][number]
                bar.update(1)
                if isinstance(outcome, tuple):
                    problems.add(outcome[0], f"{row['file_name']}: {outcome[1]}")
                    continue
                hashes[split][number] = plausibility.picture_hash(outcome.jpeg)
                size = (row["width"], row["height"])
                boxes = [place_box(bbox_of(box), outcome, *size) for box in row["boxes"]]
                note_image(row["file_name"], outcome, size, boxes, problems)
        self.count = len(tasks)
        return problems, {split: plausibility.hashes_of(b"".join(one)) for split, one in hashes.items()}

    def _look_at(self, task: tuple[str, int]) -> tuple[str, int, NormalImage | tuple[str, str]]:
        row = self._rows[task[0]][task[1]]
        try:
            data = self._view.read(row)
            return *task, normalize(data, _LARGEST, _QUALITY, row["orientation"])
        except MissingError as error:
            return *task, (reasons.IMAGE_MISSING, error.message)
        except StorageError as error:
            return *task, (reasons.IMAGE_NOT_FETCHED, error.message)
        except (UnreadableImage, DataError) as error:
            return *task, (reasons.IMAGE_UNREADABLE, str(error))

    def name(self, split: str, row: int) -> str:
        """Return the file name of an image of the sample."""
        return self._rows[split][row]["file_name"]

    def draw(self, pairs: Sequence[DuplicatePair], path: str) -> None:
        """Draw near duplicates, two in a row."""
        pictures = []
        for pair in pairs:
            for split, row in zip(pair.splits, pair.rows, strict=True):
                picture = as_picture(self._rows[split][row], self._view.read)
                pictures.append(picture._replace(file_name=f"{split}: {picture.file_name}"))
        with storage.new_file(path, sync=False) as file:
            sheet(pictures, self._view.names, columns=2).save(file, "PNG")


def _order(row: RawRow) -> tuple[int, str]:
    size = row["version"].partition(" ")[0] or row["file_name"]
    return zlib.crc32(size.encode()), row["file_name"]


def _describe(
    view: RawImages | SourceRows, split: str, meaning: AnnotationCheck, sampled: _Sample, problems: Problems
) -> SplitStatistics:
    """Count and check the rows of a split, a block at a time."""
    labels = len(view.names)
    total = statistics.describe([], labels)
    count = view.manifest.splits[split].images if isinstance(view, RawImages) else None
    with log.progress(f"inspect {split}", count, "images") as bar:
        for batch in view.batches(split):
            meaning.add(split, batch)
            rows: list[RawRow] = batch.to_pylist()
            sampled.add(split, rows)
            sized: list[RawRow] = []
            unsized: list[RawRow] = []
            for row in rows:
                if row["fault_reason"]:
                    problems.add(row["fault_reason"], f"{row['file_name']}: {row['fault_detail']}")
                else:
                    (sized if is_sized(row) else unsized).append(row)
            total += statistics.describe(cleaned_samples(sized, labels, problems), labels)
            part = statistics.describe(cleaned_samples(unsized, labels, problems), labels)
            empty: dict[str, Any] = {name: [0] * len(part.histogram(name)) for name in _OF_PIXELS}
            total += replace(part, **empty)
            bar.update(len(rows))
    return total


def is_sized(row: RawRow) -> bool:
    """Return whether a row has the size of its image in pixels."""
    size = (row["width"], row["height"])
    return 0 not in size and size not in (SHARES, SHARES_UPRIGHT)


def cleaned_samples(rows: list[RawRow], labels: int, problems: Problems) -> Iterator[AnnotatedImage]:
    """Yield rows with the boxes that cleaning keeps; unknown sizes are replaced by a large one."""
    for row in rows:
        width, height, unit = row["width"], row["height"], 1
        if (width, height) in (SHARES, SHARES_UPRIGHT):
            width, height, unit = _STAND_IN, _STAND_IN, _STAND_IN
        elif 0 in (width, height):
            width = height = 2**31
        boxes: list[Annotation] = [
            {
                "category_id": box["category"],
                "bbox": [unit * value for value in bbox_of(box)],
                "area": 0.0,
                "iscrowd": box["iscrowd"],
            }
            for box in row["boxes"]
        ]
        kept = clean(boxes, width, height, labels, problems, row["file_name"])
        yield {"width": width, "height": height, "annotations": kept}
