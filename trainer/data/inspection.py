"""Describes data: images, boxes and classes of each split, sizes and shapes, and problems."""

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from trainer import storage
from trainer.base import log, worker_pool
from trainer.base.errors import DataError, MissingError, StorageError
from trainer.config.schema import DataConfig
from trainer.data import plausibility, statistics
from trainer.data import problem_counts as reasons
from trainer.data.data_views import RawImages, Shards, SourceRows, as_picture, open_view
from trainer.data.images import SHARES, SHARES_UPRIGHT, UnreadableImage, normalize, place_box
from trainer.data.plausibility import AnnotationChecker, Findings, check_samples, note_image
from trainer.data.preview import sheet
from trainer.data.problem_counts import Cases, Problems
from trainer.data.samples import AnnotatedImage, Annotation, RawRow, to_bbox
from trainer.data.shard_folder import DuplicatePair, listing_faults
from trainer.data.shards import clean
from trainer.data.statistics import SplitStatistics
from trainer.storage import outputs

_PIXEL_HISTOGRAMS = ("box_side", "box_share", "box_aspect", "image_side", "image_aspect")
_ASSUMED_SIDE = 1000
_MAX_SIDE, _JPEG_QUALITY = 1600, 90
_READERS = 8


@dataclass(frozen=True)
class SplitReport:
    """Counts of a split, of boxes that cleaning keeps."""

    images: int
    boxes: int
    shards: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class SampledImages:
    """Images that were read, and their problems."""

    images: int = 0
    problems: dict[str, Cases] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What `inspect` found."""

    kind: str
    uri: str
    classes: list[str]  # By label.
    splits: dict[str, SplitReport]
    statistics: dict[str, SplitStatistics]
    problems: dict[str, int]  # Counts by reason.
    examples: dict[str, list[str]]  # By reason.
    warnings: list[str]
    read_as: str = ""  # How a source was interpreted.
    fingerprint: str = ""  # Empty for a source.
    errors: list[tuple[str, str]] = field(default_factory=list)  # Problems and remedies.
    near_duplicates: list[DuplicatePair] = field(default_factory=list)
    looked_at: SampledImages = SampledImages()
    max_bad_fraction: float = 0.0  # Of images and boxes; with more the download fails.


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
    meaning = AnnotationChecker(view.names, view.box_format, names=names)
    in_rows = Problems()
    sample: dict[str, list[RawRow]] = {}
    described = {}
    for split in view.splits:
        limit = view.sample_size if images is None else images
        described[split], sample[split] = _read_rows(view, split, meaning, limit, in_rows)
    problems = view.problems()
    problems.merge(in_rows.cases())
    in_images, hashes, copies = _read_images(view, sample)
    problems.merge(in_images.cases())
    for copy in copies if isinstance(view, SourceRows) else ():  # The download step compares all.
        problems.add(reasons.IMAGE_COPY_WITHOUT_BOXES, copy)
    found = meaning.findings()
    looked_at = SampledImages(sum(map(len, sample.values())), in_images.cases())
    if not found.errors:  # Their consequences would be reported as well.
        of_images = check_samples(problems, described, looked_at.images)
        found.errors += of_images.errors
        found.warnings += of_images.warnings
    named, warnings = plausibility.near_duplicates(hashes, lambda split, row: sample[split][row]["file_name"])
    found.warnings += warnings
    if pairs and named:
        pictures = []
        for pair in named:
            for split, row in zip(pair.splits, pair.rows, strict=True):
                picture = as_picture(sample[split][row], view.read)
                pictures.append(picture._replace(file_name=f"{split}: {picture.file_name}"))
        outputs.claim_file(pairs)
        with storage.new_file(pairs, sync=False) as file:
            sheet(pictures, view.names, columns=2).save(file, "PNG")
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
        looked_at=looked_at,
        max_bad_fraction=(config or DataConfig()).max_bad_fraction,
    )


def check(report: Report) -> None:
    """Refuse a source that could not be downloaded and sharded, without fetching its images.

    The error has no examples: the report has them.
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
        max_bad_fraction=report.max_bad_fraction,
        examples=False,
    )
    Problems.of(report.looked_at.problems).check(
        f"{report.uri}, of which some images were read",
        images=report.looked_at.images,
        boxes=0,
        max_bad_fraction=report.max_bad_fraction,
        examples=False,
    )
    train = report.splits.get("train", SplitReport(0, 0))
    for noun, count in (("images", train.images), ("boxes", train.boxes)):
        if not count:
            raise DataError(f"{report.uri}: no {noun} to train on", fix="check its annotations")


def _describe_shards(view: Shards) -> Report:
    index = view.index
    absent = Problems()
    states = storage.list_states(view.uri, recursive=True)
    for reason, example in listing_faults(index, states).values():
        absent.add(reason, example)
    left_out = [f"{item.file_name}: {item.reason}" for item in index.quarantined]
    examples = {reasons.IMAGE_UNREADABLE: left_out[: reasons.EXAMPLES]} if left_out else {}
    splits = {}
    for name, split in index.splits.items():
        size = sum(shard.bytes for shard in split.shards)
        splits[name] = SplitReport(split.samples, split.boxes, len(split.shards), size)
    return Report(
        kind=view.kind,
        uri=view.uri,
        fingerprint=index.fingerprint,
        classes=view.names,
        splits=splits,
        statistics=index.statistics,
        problems=index.problems | dict(sorted(absent.counts.items())),
        examples=examples | absent.examples,
        warnings=index.warnings,
        near_duplicates=index.near_duplicates,
    )


def _read_rows(
    view: RawImages | SourceRows, split: str, meaning: AnnotationChecker, limit: int, problems: Problems
) -> tuple[SplitStatistics, list[RawRow]]:
    """Count and check the rows of a split, a block at a time, and choose those whose images are read.

    They are chosen by a hash of their sizes in bytes, if these are known, so that a file that is in two
    splits is chosen in both.
    """
    labels = len(view.names)
    total = statistics.describe([], labels)
    sample: list[RawRow] = []
    count = view.manifest.splits[split].images if isinstance(view, RawImages) else None
    with log.progress(f"inspect {split}", count, "images") as bar:
        for batch in view.batches(split):
            meaning.add(split, batch)
            rows: list[RawRow] = batch.to_pylist()
            sound = [row for row in rows if not row["fault_reason"]]
            sample += [row for row in sound if storage.scheme(row["origin"]) not in storage.WEB]
            sample.sort(key=_order)
            del sample[limit:]
            for row in rows:
                if row["fault_reason"]:
                    problems.add(row["fault_reason"], f"{row['file_name']}: {row['fault_detail']}")
            for in_pixels in (True, False):
                chosen = [row for row in sound if is_sized(row) is in_pixels]
                part = statistics.describe(cleaned_samples(chosen, labels, problems), labels)
                if not in_pixels:
                    for name in _PIXEL_HISTOGRAMS:
                        part.histogram(name)[:] = [0] * len(part.histogram(name))
                total += part
            bar.update(len(rows))
    return total, sample


def _order(row: RawRow) -> tuple[int, str]:
    size = row["version"].partition(" ")[0] or row["file_name"]
    return zlib.crc32(size.encode()), row["file_name"]


def _read_images(
    view: RawImages | SourceRows, sample: dict[str, list[RawRow]]
) -> tuple[Problems, dict[str, np.ndarray], Iterator[str]]:
    """Read the images of some rows of each split.

    Returns their problems, the hashes of the pictures of each split, and the `unlabeled_copies`.
    """
    problems = Problems()
    tasks = [(split, number) for split, rows in sample.items() for number in range(len(rows))]
    hashes = {split: [plausibility.NO_HASH] * len(rows) for split, rows in sample.items()}

    files: list[tuple[bytes, str, bool]] = []

    def read(task: tuple[str, int]) -> Problems:
        split, number = task
        row, found = sample[split][number], Problems()
        name, size = row["file_name"], (row["width"], row["height"])
        try:
            data = view.read(row)
            files.append((hashlib.sha256(data).digest(), f"{split}/{name}", bool(row["boxes"])))
            image = normalize(data, _MAX_SIDE, _JPEG_QUALITY)
            hashes[split][number] = plausibility.picture_hash(image.jpeg)
            boxes = [place_box(to_bbox(box), image, *size) for box in row["boxes"]]
            note_image(name, image, size, boxes, found)
        except MissingError as error:
            found.add(reasons.IMAGE_MISSING, f"{name}: {error.message}")
        except StorageError as error:
            found.add(reasons.IMAGE_NOT_FETCHED, f"{name}: {error.message}")
        except (UnreadableImage, DataError) as error:
            found.add(reasons.IMAGE_UNREADABLE, f"{name}: {error}")
        return found

    workers = max(_READERS, worker_pool.available_cores())
    with log.progress("inspect images", len(tasks), "images") as bar:
        for found in worker_pool.run(read, tasks, workers, processes=False):
            problems.merge(found.cases())
            bar.update(1)
    pictures = {split: plausibility.decode_hashes(b"".join(one)) for split, one in hashes.items()}
    return problems, pictures, plausibility.unlabeled_copies(sorted(files))


def is_sized(row: RawRow) -> bool:
    """Return whether a row has the size of its image in pixels."""
    size = (row["width"], row["height"])
    return min(size) > 1  # Of 1 x 1 the image is believed, see `place_box`.


def cleaned_samples(rows: list[RawRow], labels: int, problems: Problems) -> Iterator[AnnotatedImage]:
    """Yield rows with the boxes that cleaning keeps; unknown sizes are replaced by a large one."""
    for row in rows:
        width, height, unit = row["width"], row["height"], 1
        if (width, height) in (SHARES, SHARES_UPRIGHT):
            width, height, unit = _ASSUMED_SIDE, _ASSUMED_SIDE, _ASSUMED_SIDE
        elif not is_sized(row):
            width = height = 2**31
        boxes: list[Annotation] = []
        for box in row["boxes"]:
            sides = [unit * value for value in to_bbox(box)]
            boxes.append(
                {"category_id": box["category"], "bbox": sides, "area": 0.0, "iscrowd": box["iscrowd"]}
            )
        kept = clean(boxes, width, height, labels, problems, row["file_name"])
        yield {"width": width, "height": height, "annotations": kept}
