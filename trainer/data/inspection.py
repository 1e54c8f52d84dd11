"""Describes sources and shards: images, boxes, classes and problems of each split."""

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from trainer import storage
from trainer.base import log, worker_pool
from trainer.base.errors import DataError, MissingError, StorageError
from trainer.config.schema import DataConfig
from trainer.data import plausibility, raw_manifest, source_names, sources, statistics
from trainer.data import problem_counts as reasons
from trainer.data.images import DISPLAYED_SHARES, STORED_SHARES, UnreadableImage, normalize, to_pixels
from trainer.data.plausibility import AnnotationChecker, Findings, check_statistics, count_size_problem
from trainer.data.problem_counts import Cases, Problems
from trainer.data.samples import AnnotatedImage, Annotation, RawRow, to_bbox
from trainer.data.shard_folder import INDEX, ShardIndex, find_listing_faults, read_index
from trainer.data.shards import clean_boxes
from trainer.data.statistics import SplitStatistics

_PIXEL_HISTOGRAMS = ("box_side", "box_share", "box_aspect", "image_side", "image_aspect")
_ASSUMED_SIDE = 1000
_MAX_SIDE, _JPEG_QUALITY = 1600, 90
_READERS = 8
_LOCAL_SAMPLE, _REMOTE_SAMPLE = 2000, 100
"""Number of images of a split that are read from this machine, and from an object store."""


@dataclass(frozen=True)
class SplitReport:
    """Counts of a split; boxes are those that cleaning keeps."""

    images: int
    boxes: int
    shards: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class SampledImages:
    """Number of images that were read, and their problems."""

    images: int = 0
    problems: dict[str, Cases] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The result of `inspect`."""

    kind: str
    uri: str
    classes: list[str]  # By label.
    splits: dict[str, SplitReport]
    statistics: dict[str, SplitStatistics]
    problems: dict[str, int]  # Counts by reason.
    examples: dict[str, list[str]]  # By reason.
    warnings: list[str]
    read_as: str = ""  # How a source was interpreted.
    fingerprint: str = ""  # "" for a source.
    errors: list[tuple[str, str]] = field(default_factory=list)  # Problems and remedies.
    sampled: SampledImages = SampledImages()
    max_bad_fraction: float = 0.0  # Of images and boxes; the download fails if more are bad.


class SourceView:
    """A source and its listing."""

    def __init__(self, text: str, config: DataConfig) -> None:
        """List the source; raise DataError if it is missing, empty or not of its format."""
        self._source = sources.parse(text, config)
        self.listing = self._source.listing()
        self.uri = self._source.uri
        self.class_names = [category.name for category in self.listing.categories]
        schemes = {storage.scheme(uri) for uri in source_names.source_uris(self.uri)}
        self.sample_size = _REMOTE_SAMPLE if schemes & set(storage.OBJECT_STORES) else _LOCAL_SAMPLE
        if self._source.cpu_bound or schemes & set(storage.WEB):
            self.sample_size = 0

    @property
    def splits(self) -> list[str]:
        return list(self.listing.splits)

    def read(self, row: RawRow) -> bytes:
        """Return the image of a row; raise StorageError if it cannot be read."""
        return self._source.read(row["origin"])


def open_view(text: str, config: DataConfig | None = None) -> ShardIndex | SourceView:
    """Open a folder of shards by its URI, or a source by its text; see `trainer.data.sources`.

    Raises:
        DataError: it is unknown or incomplete, or another version of kubedet wrote it.
        StorageError: it cannot be reached.
    """
    remote = storage.scheme(text) in storage.OBJECT_STORES
    if remote or storage.is_local(text):
        folder = storage.absolute(text)
        if storage.exists(storage.join(folder, INDEX)):
            return read_index(folder)
        names = storage.list_states(folder)
        if any(name.endswith(".tar") and f"{name.removesuffix('.tar')}.json" in names for name in names):
            fix = "run the shard step again to continue"
            raise DataError(f"{folder} is incomplete: the shard step has not finished", fix=fix)
        if raw_manifest.PLAN in names:
            fix = "use the source or the shards; `kubedet data verify` reads raw images"
            raise DataError(f"{folder} contains raw images", fix=fix)
        if remote and not storage.exists(folder) and next(iter(storage.scan(folder)), None) is None:
            raise DataError(f"{text} does not exist", fix="check the URI and the endpoint")
    return SourceView(text, config or DataConfig())


def inspect(text: str, config: DataConfig | None = None, images: int | None = None) -> Report:
    """Describe shards or a source, and check them (see `trainer.data.plausibility`).

    Args:
        text: see `open_view`.
        config: how a source is read.
        images: number of images to read of each split; None: a number that suits their storage.

    Raises:
        DataError: it is missing, empty or not of its format.
        StorageError: it cannot be reached.
    """
    view = open_view(text, config)
    if isinstance(view, ShardIndex):
        return _describe_shards(view)
    config = config or DataConfig()
    checker = AnnotationChecker(view.class_names, view.listing.box_format, check_names=not config.classes)
    in_rows = Problems()
    sample: dict[str, list[RawRow]] = {}
    described = {}
    for split in view.splits:
        limit = view.sample_size if images is None else images
        described[split], sample[split] = _read_rows(view, split, checker, limit, in_rows)
    problems = Problems.from_cases(view.listing.problems.cases())
    problems.merge(in_rows.cases())
    in_images, hashes, copies = _read_images(view, sample)
    problems.merge(in_images.cases())
    for copy in copies:
        problems.add(reasons.IMAGE_COPY_WITHOUT_BOXES, copy)
    sampled = SampledImages(sum(map(len, sample.values())), in_images.cases())
    found = checker.findings()
    if not found.errors:  # Otherwise their consequences would be reported as well.
        in_samples = check_statistics(problems, described, sampled.images)
        found.errors += in_samples.errors
        found.warnings += in_samples.warnings
    found.warnings += plausibility.duplicate_warnings(hashes, lambda split, n: sample[split][n]["file_name"])
    return Report(
        kind="source",
        uri=view.uri,
        read_as=view.listing.read_as,
        classes=view.class_names,
        splits={split: SplitReport(counts.images, counts.boxes) for split, counts in described.items()},
        statistics=described,
        problems=dict(sorted(problems.counts.items())),
        examples=problems.examples,
        warnings=found.warnings,
        errors=found.errors,
        sampled=sampled,
        max_bad_fraction=config.max_bad_fraction,
    )


def check(report: Report) -> None:
    """Raise DataError if the download or the conversion of a source would fail.

    The error contains no examples, because the report shows them.
    """
    Findings(report.errors).raise_errors(report.uri)
    if report.kind != "source":
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
    Problems.from_cases(report.sampled.problems).check(
        f"{report.uri}, of which some images were read",
        images=report.sampled.images,
        boxes=0,
        max_bad_fraction=report.max_bad_fraction,
        examples=False,
    )
    train = report.splits.get("train", SplitReport(0, 0))
    for noun, count in (("images", train.images), ("boxes", train.boxes)):
        if not count:
            raise DataError(f"{report.uri}: no {noun} to train on", fix="check its annotations")


def _describe_shards(index: ShardIndex) -> Report:
    absent = Problems()
    states = storage.list_states(index.uri, recursive=True)
    for reason, example in find_listing_faults(index, states).values():
        absent.add(reason, example)
    left_out = [f"{item.file_name}: {item.reason}" for item in index.quarantined]
    examples = {reasons.IMAGE_UNREADABLE: left_out[: reasons.EXAMPLES]} if left_out else {}
    splits = {}
    for name, split in index.splits.items():
        size = sum(shard.bytes for shard in split.shards)
        splits[name] = SplitReport(split.samples, split.boxes, len(split.shards), size)
    return Report(
        kind=index.kind,
        uri=index.uri,
        fingerprint=index.fingerprint,
        classes=index.class_names,
        splits=splits,
        statistics=index.statistics,
        problems=index.problems | dict(sorted(absent.counts.items())),
        examples=examples | absent.examples,
        warnings=index.warnings,
    )


def _read_rows(
    view: SourceView, split: str, checker: AnnotationChecker, limit: int, problems: Problems
) -> tuple[SplitStatistics, list[RawRow]]:
    """Count and check the rows of a split, and select those whose images are read.

    Rows are selected by a hash of the file's size, if it is known, so that a file in two splits is selected
    in both.
    """
    labels = len(view.class_names)
    total = statistics.compute_statistics([], labels)
    sample: list[RawRow] = []
    with log.progress(f"inspect {split}", None, "images") as bar:
        for batch in view.listing.splits[split].batches():
            checker.add(split, batch)
            rows: list[RawRow] = batch.to_pylist()
            sound = [row for row in rows if not row["fault_reason"]]
            sample += [row for row in sound if storage.scheme(row["origin"]) not in storage.WEB]
            sample.sort(key=_sample_order)
            del sample[limit:]
            for row in rows:
                if row["fault_reason"]:
                    problems.add(row["fault_reason"], f"{row['file_name']}: {row['fault_detail']}")
            for in_pixels in (True, False):
                chosen = [row for row in sound if has_size(row) is in_pixels]
                part = statistics.compute_statistics(clean_samples(chosen, labels, problems), labels)
                if not in_pixels:
                    for name in _PIXEL_HISTOGRAMS:
                        part.histogram(name)[:] = [0] * len(part.histogram(name))
                total += part
            bar.update(len(rows))
    return total, sample


def _sample_order(row: RawRow) -> tuple[int, str]:
    size = row["version"].partition(" ")[0] or row["file_name"]
    return zlib.crc32(size.encode()), row["file_name"]


def _read_images(
    view: SourceView, sample: dict[str, list[RawRow]]
) -> tuple[Problems, dict[str, np.ndarray], Iterator[str]]:
    """Read the images of the selected rows of each split.

    Returns their problems, the hashes of each split's images, and `plausibility.unlabeled_copies`.
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
            boxes = [to_pixels(to_bbox(box), image, *size) for box in row["boxes"]]
            count_size_problem(name, image, size, boxes, found)
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


def has_size(row: RawRow) -> bool:
    """Return whether a row gives the size of its image in pixels."""
    size = (row["width"], row["height"])
    return min(size) > 1  # 1 x 1 counts as unknown; see `to_pixels`.


def clean_samples(rows: list[RawRow], labels: int, problems: Problems) -> Iterator[AnnotatedImage]:
    """Yield rows with cleaned boxes; an unknown size of an image is replaced by a large one."""
    for row in rows:
        width, height, unit = row["width"], row["height"], 1
        if (width, height) in (STORED_SHARES, DISPLAYED_SHARES):
            width, height, unit = _ASSUMED_SIDE, _ASSUMED_SIDE, _ASSUMED_SIDE
        elif not has_size(row):
            width = height = 2**31
        boxes: list[Annotation] = []
        for box in row["boxes"]:
            sides = [unit * value for value in to_bbox(box)]
            boxes.append(
                {"category_id": box["category"], "bbox": sides, "area": 0.0, "iscrowd": box["iscrowd"]}
            )
        kept = clean_boxes(boxes, width, height, labels, problems, row["file_name"])
        yield {"width": width, "height": height, "annotations": kept}
