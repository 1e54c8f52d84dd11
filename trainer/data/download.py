"""Downloads a source's images and annotations to the data root.

<data_root>/images/<source>/<2 hex>/<key>-<digest>.<ext>   bytes as the source has them
<data_root>/raw/<fingerprint>/                             see `trainer.data.raw_folder`

The processes that torchrun started share the work: rank 0 lists the source, each process fetches the images
of the next part that is free, and rank 0 writes the manifest. A part is a range of images that depends only
on the listing, so any number of processes writes the same files. From the web only images are stored.
"""

import csv
import hashlib
import io
import json
import logging
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trainer import storage
from trainer.base import events, worker_pool
from trainer.base.errors import DamagedError, DataError, FormError, MissingError, StorageError
from trainer.base.log import Bar, activity, progress
from trainer.config.schema import DataConfig
from trainer.data import (
    annotations,
    image_keys,
    images,
    plausibility,
    raw_folder,
    raw_manifest,
    sources,
)
from trainer.data import problem_counts as reasons
from trainer.data.problem_counts import Problems
from trainer.data.raw_folder import FETCHED, VERSION
from trainer.data.raw_manifest import RawManifest, SplitCounts
from trainer.data.sources.files import read_list
from trainer.data.sources.source import Source
from trainer.launching.shared_work import SharedWork, shared_work
from trainer.storage.web import Refused

logger = logging.getLogger(__name__)

SETTINGS = (
    "val_fraction", "test_fraction", "classes", "max_images", "empty_images", "boxes_from", "box_format",
    "merge_classes", "exclude", "allow_hosts",
)  # fmt: skip
"""Keys of the section `data` that determine raw tables."""

_MAX_BYTES_IN_FLIGHT = 256 * 1024 * 1024  # Bytes of images in flight, estimated by their mean size.
_BLOCK_BYTES = 4 * 1024 * 1024
_LISTERS = 16
_MAX_PARTS = 256  # Each has a report of what was fetched.
_READERS = 16
_LIST_AT_ONCE_BELOW = 10_000  # Images up to which one listing is faster than one for each folder.
_DIGEST = re.compile(r"[0-9a-f]{16}")
_SHA256 = re.compile(r"[0-9A-Fa-f]{64}")
_MAX_FAILURES_IN_A_ROW = 50  # Failures in a row, plus two a connection, by which the source counts as down.
_PATH_COLUMNS = ("key", "file_name", "origin", "version")
_COLUMNS = ["image_id", *_PATH_COLUMNS, "fault_reason", "fault_detail"]
_REPORT = pa.schema(
    [
        ("image_id", pa.int64()),
        ("bytes", pa.int32()),
        *((name, pa.string()) for name in ("split", "file_name", "origin", "reason", "detail")),
        ("place", pa.uint64()),
        ("sha256", pa.binary(32)),
        ("requested", pa.bool_()),
    ]
)


class _SourceUnreachable(StorageError):
    """The source no longer answers."""


class _Failure(NamedTuple):
    """An image that could not be fetched."""

    split: str
    file_name: str
    origin: str
    reason: str
    detail: str
    requested: bool = True  # Whether the source was asked for it; False if its listing shows the fault.


def fingerprint(*parts: Any) -> str:
    """Return 16 hex digits that name the result of these parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def choices(config: DataConfig) -> list[Any]:
    """Return the parts of a configuration that determine the images and boxes of raw tables."""
    return [getattr(config, key) for key in SETTINGS if key not in ("exclude", "allow_hosts")]


def read_excluded(uri: str) -> list[str]:
    """Return the lines of data.exclude, sorted: names and hashes of images; [] without a file."""
    if not uri:
        return []
    try:
        return sorted({line.lower() if _SHA256.fullmatch(line) else line for line in read_list(uri)})
    except MissingError as error:
        fix = "correct the path of the file, one that the step can read, or leave it unset"
        raise DataError(f"data.exclude: {error.message}", fix=fix) from None


def download(source: str, data_root: str, config: DataConfig) -> RawManifest:
    """Download a source (see `sources.parse`) to a data root, or find it there; return its manifest.

    A killed call is continued: stored images are not fetched again.

    Raises:
        DataError: the source is missing, empty, not of its format, or too much of it is bad.
        StorageError: the data root cannot be written.
    """
    with shared_work() as work:
        planned = work.on_first(lambda: plan(source, data_root, config))
        return fetch(planned, config, work)


def plan(source: str, data_root: str, config: DataConfig) -> RawManifest:
    """List a source and write its annotations as tables, or find them there; return the plan.

    Raises:
        DataError: the source is missing, empty or not of its format, too many of its boxes cannot be used, or
            they are almost certainly wrong (see `trainer.data.plausibility`).
        StorageError: the data root cannot be written.
    """
    origin = sources.parse(source, config)
    with activity(logger, f"listing {origin.uri}"):
        listing = origin.listing()
    root = storage.absolute(data_root)
    excluded = read_excluded(config.exclude)
    name = fingerprint("raw", VERSION, origin.uri, listing.state, choices(config), excluded)
    uri = storage.join(root, "raw", name)
    if storage.exists(storage.join(uri, raw_manifest.PLAN)):
        try:
            found = raw_folder.read_manifest(uri, raw_manifest.PLAN)
            for split in found.splits:
                storage.local_copy(storage.join(uri, f"{split}.parquet"), sha256=found.tables.get(split, ""))
            annotations.check_listed(Problems.of(found.problems), origin.uri, found.splits, config)
            return found
        except (DamagedError, FormError, MissingError) as error:
            logger.warning("%s; repairing it from the source", error.message)
    storage.remove_stale(uri)
    with activity(logger, f"reading the annotations of {origin.uri}"):
        built = annotations.build(listing, config, uri, origin.uri, frozenset(excluded))
    planned = RawManifest(
        "plan",
        VERSION,
        name,
        origin.uri,
        images=storage.join(root, "images", fingerprint(origin.images_uri)),
        problems=listing.problems.cases(),
        settings={key: getattr(config, key) for key in SETTINGS},
        excluded=excluded,
        uri=uri,
        **vars(built),
    )
    planned.write()
    for warning in built.warnings:
        logger.warning("%s", warning)
    logger.info("listed %s: %s images in %s", planned.source, _image_counts(planned), uri)
    return planned


def find_finished(planned: RawManifest, config: DataConfig) -> RawManifest | None:
    """Return the manifest if all images of the source are stored, else None."""
    manifest = _find_manifest(planned)
    if manifest is None or manifest.unfetched:
        return None
    storage.touch(storage.join(manifest.uri, raw_manifest.MANIFEST))
    fetched = raw_folder.read_images(manifest)
    fetched = fetched[fetched["bytes"] > 0]
    stored = _StoredImages(manifest.images, at_once=len(fetched) <= _LIST_AT_ONCE_BELOW)
    if (stored.sizes(fetched["place"]) != fetched["bytes"]).any():
        return None
    check(manifest, config)
    logger.info("raw images of %s are there already: %s", manifest.source, manifest.uri)
    events.emit(events.Reused(uri=manifest.uri))
    return manifest


def _find_manifest(planned: RawManifest) -> RawManifest | None:
    """Return the manifest of a finished download of a plan if it is complete, else None."""
    if not storage.exists(storage.join(planned.uri, raw_manifest.MANIFEST)):
        return None
    try:
        manifest = raw_folder.read_manifest(planned.uri)
        raw_folder.read_images(manifest)
    except (DamagedError, FormError, MissingError) as error:
        logger.warning("%s; repairing it", error.message)
        return None
    return manifest if manifest.tables == planned.tables else None


def fetch(planned: RawManifest, config: DataConfig, work: SharedWork) -> RawManifest:
    """Fetch the images of a plan that are not stored, and return the manifest.

    Images that failed in an earlier call are requested again. If the source is down, and an earlier download
    was good enough without them, they are left out again.
    """
    if manifest := work.on_first(lambda: find_finished(planned, config)):
        return manifest
    known, known_failures = _read_reports(planned)
    parts = work.parts("images", _part_count(planned))
    fetching = _Fetch(planned, config, known, {}, work.size)
    try:
        fetching.run(parts)
    except _SourceUnreachable as error:
        if _find_manifest(planned) is None:
            raise
        logger.warning("%s; continuing without the images that an earlier download lacked", error.message)
        remaining = chain(fetching.open_parts, parts)
        _Fetch(planned, config, known, known_failures, work.size).run(remaining)
    return work.on_first(lambda: write_manifest(planned, config))


def _part_count(planned: RawManifest) -> int:
    """Return the number of parts: neither are they large, nor are there many of them."""
    return min(math.isqrt(planned.listed_images), _MAX_PARTS)


def _part_range(planned: RawManifest, part: int) -> tuple[int, int]:
    """Return the first image of a part, counted from 0, and the first after it."""
    total, parts = planned.listed_images, _part_count(planned)
    return part * total // parts, (part + 1) * total // parts


def _list_reports(planned: RawManifest) -> dict[int, str]:
    """Return the URIs of the reports of parts by the part: `fetched/<part>-<sha256>.parquet`."""
    folder = storage.join(planned.uri, "fetched")
    return {int(name.partition("-")[0]): storage.join(folder, name) for name in storage.list_files(folder)}


def write_manifest(planned: RawManifest, config: DataConfig) -> RawManifest:
    """Write and return the manifest of the images that were fetched."""
    fetched, failed = _read_reports(planned, complete=True)
    failures = sorted(failed.values())
    problems = Problems.of(planned.problems)
    for failure in failures:
        problems.add(failure.reason, f"{failure.split}/{failure.file_name}: {failure.detail}")
    for copy in _unlabeled_copies(planned, fetched):
        problems.add(reasons.IMAGE_COPY_WITHOUT_BOXES, copy)
    splits, first = {}, 0
    for split, listed in planned.splits.items():
        is_stored = fetched["bytes"][first : first + listed.images] > 0
        first += listed.images
        boxes = listed.boxes
        if not is_stored.all():
            table = planned.table(split)
            lists = [table.batch(block, ["boxes"])["boxes"] for block in range(table.blocks)]
            counts = np.concatenate([pc.list_value_length(of_block).to_numpy() for of_block in lists])
            boxes = int(counts[is_stored].sum())
        splits[split] = SplitCounts(int(is_stored.sum()), boxes)
    content = raw_folder.write_images(planned.uri, fetched)
    text = io.StringIO()
    columns = _Failure._fields[:-1]
    csv.writer(text, lineterminator="\n").writerows(
        [columns, *(failure[: len(columns)] for failure in failures)]
    )
    storage.write_bytes(storage.join(planned.uri, "failed.csv"), text.getvalue().encode())
    manifest = replace(
        planned,
        kind="raw",
        content=content,
        splits=splits,
        problems=problems.cases(),
        unfetched=sum(failure.requested for failure in failures),
    )
    check(manifest, config)
    if manifest == _find_manifest(planned):
        storage.touch(storage.join(manifest.uri, raw_folder.MANIFEST))
        logger.info("raw images of %s are there already: %s", manifest.source, manifest.uri)
        return manifest
    manifest.write()
    summary = f" ({problems.summary()})" if problems.counts else ""
    logger.info(
        "raw images of %s: %s in %s%s", manifest.source, _image_counts(manifest), manifest.uri, summary
    )
    return manifest


def _unlabeled_copies(planned: RawManifest, fetched: np.ndarray) -> Iterator[str]:
    """Yield the copies, see `plausibility.unlabeled_copies`, in the order of the splits."""
    starts = np.ascontiguousarray(fetched["sha256"]).view(np.uint64)[::4]
    values, counts = np.unique(starts, return_counts=True)
    repeated = np.isin(starts, values[(counts > 1) & (values != 0)])
    if not repeated.any():
        return
    images, first = [], 0
    for split, listed in planned.splits.items():
        table, of_split = planned.table(split), repeated[first : first + listed.images]
        for block in range(table.blocks):
            part = np.flatnonzero(of_split[block * raw_folder.BLOCK :][: raw_folder.BLOCK])
            if len(part):
                columns = table.batch(block, ["image_id", "file_name", "boxes"]).take(part).to_pydict()
                for image_id, name, boxes in zip(*columns.values(), strict=True):
                    images.append((fetched["sha256"][image_id - 1].tobytes(), f"{split}/{name}", bool(boxes)))
        first += listed.images
    yield from plausibility.unlabeled_copies(images)


def _image_counts(raw: RawManifest) -> str:
    return ", ".join(f"{split.images} {name}" for name, split in raw.splits.items())


def check(manifest: RawManifest, config: DataConfig) -> None:
    """Check raw images against the current configuration, and warn about classes without boxes."""
    problems = Problems.of(manifest.problems)
    manifest.check(manifest.source, problems, config.max_bad_fraction)
    if "train" not in manifest.splits or not manifest.splits["train"].images:
        raise DataError(f"{manifest.source}: no training image could be read", fix="check the source")
    if count := problems.counts.get(reasons.CLASS_WITHOUT_BOXES, 0):
        shown = problems.examples[reasons.CLASS_WITHOUT_BOXES]
        logger.warning(
            "%d classes have no box in train and cannot be learned: %s%s; add images of them, or leave "
            "them out with data.classes",
            count,
            ", ".join(shown),
            ", ..." if len(shown) < count else "",
        )


def _read_reports(planned: RawManifest, *, complete: bool = False) -> tuple[np.ndarray, dict[int, _Failure]]:
    """Return rows of FETCHED by image id - 1 (0 bytes if an image was not fetched), and failures by image id.

    Reports that are missing or damaged are left out, unless the result has to be `complete`.
    """
    fetched = np.zeros(planned.listed_images, FETCHED)
    failures: dict[int, _Failure] = {}
    reports = _list_reports(planned)
    if complete and len(reports) != _part_count(planned):
        raise MissingError(f"{planned.uri} lacks reports of fetched images", fix="run the same command again")
    read = partial(_read_report, complete)
    for report in worker_pool.run(read, reports.values(), _READERS, processes=False):
        stored = report.filter(pc.greater(report["bytes"], 0))
        at = stored["image_id"].to_numpy() - 1
        fetched["bytes"][at], fetched["place"][at] = stored["bytes"].to_numpy(), stored["place"].to_numpy()
        fetched["sha256"][at] = np.frombuffer(b"".join(stored["sha256"].to_pylist()), "V32")
        for row in report.filter(pc.equal(report["bytes"], 0)).to_pylist():
            failures[row["image_id"]] = _Failure(*(row[name] for name in _Failure._fields))
    return fetched, failures


def _read_report(complete: bool, uri: str) -> pa.Table:
    """Return the report of a part; an empty one if it is damaged, unless it has to be `complete`."""
    try:
        return read_report(uri)
    except DamagedError as error:
        if complete:
            raise
        logger.warning("%s; repairing it", error.message)
        return _REPORT.empty_table()


def read_report(uri: str) -> pa.Table:
    """Return the rows of _REPORT of a part; raise DamagedError if its hash differs from its name."""
    data = storage.read_bytes(uri)
    if f"-{_short_sha256(data)}.parquet" not in uri:
        fix = "run the download again to replace it"
        raise DamagedError(f"{uri} is damaged: its hash differs from its name", fix=fix)
    return pq.read_table(io.BytesIO(data))


def _short_sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


@dataclass(frozen=True)
class _Image:
    """One image to fetch, or to hash if it is stored; afterwards the outcome."""

    part: int
    image_id: int
    split: str
    file_name: str
    origin: str
    target: str
    place: int  # Digest of the target, see `image_keys.path_digest`.
    failure: _Failure | None  # Why it cannot be fetched.
    size: int  # Stored bytes; 0 if it has to be fetched.
    sha256: bytes = b""
    requested: bool = False  # Whether the source was asked for it now.


@dataclass
class _OpenPart:
    """A part of which not all images are done."""

    first: int  # Its first image, counted from 0.
    fetched: np.ndarray  # Rows of FETCHED of its images.
    failures: dict[int, _Failure] = field(default_factory=dict)  # By image id.
    remaining: int = 1  # Images to be done, and one until all are counted.
    is_changed: bool = False  # Whether its report has to be written.


class _Fetch:
    """Fetches the images of parts, and writes a report of each; images that fail are retried once at the end.

    A stored image is fetched again if its size differs from the one in `known`, the result of earlier
    downloads. Images in `known_failures` are not requested again. Memory is 56 bytes per image of the source.
    """

    def __init__(
        self,
        planned: RawManifest,
        config: DataConfig,
        known: np.ndarray,
        known_failures: dict[int, _Failure],
        processes: int,
    ) -> None:
        self._planned, self._config, self._processes = planned, config, processes
        self._known, self._known_failures = known, known_failures
        self._source = sources.parse(planned.source, config)
        self._excluded = frozenset(filter(_SHA256.fullmatch, planned.excluded))
        self._tables = {split: planned.table(split) for split in planned.splits}
        self._stored = _StoredImages(planned.images, at_once=planned.listed_images <= _LIST_AT_ONCE_BELOW)
        cores = config.processes or worker_pool.available_cores()
        self._workers = cores if self._source.cpu_bound else config.threads
        self._reports = _list_reports(planned)
        self.open_parts: dict[int, _OpenPart] = {}
        self._failures: dict[int, _Failure] = {}
        self._retried: list[_Image] = []
        self._is_retrying = False
        self._in_a_row, self._patience = 0, _MAX_FAILURES_IN_A_ROW + 2 * self._workers
        self._lost = 0
        """Images that an earlier download fetched, and that are missing or of another size now."""

    def run(self, parts: Iterable[int]) -> None:
        """Fetch the images of some parts."""
        total = self._planned.listed_images
        with progress("download", total, "images") as bar:
            self._copy_all(self._to_copy(parts, bar), min(self._workers, total), bar)
            retried, self._retried = self._retried, []
            bar.done -= len(retried)
            self._patience = len(retried) + self._in_a_row + 1  # All may fail again.
            for image in retried:
                del self._failures[image.image_id], self.open_parts[image.part].failures[image.image_id]
            self._is_retrying = True
            self._copy_all(retried, self._workers, bar)
        if self._lost:
            logger.warning(
                "repaired %s: %d stored images were missing or cut off, and were fetched again",
                self._planned.images,
                self._lost,
            )

    def _to_copy(self, parts: Iterable[int], bar: Bar) -> Iterator[_Image]:
        """Yield the images that need work; count the stored ones."""
        taken = 0  # Images of the parts so far.
        for number in parts:
            first, end = _part_range(self._planned, number)
            # The other processes take as many of what is left.
            bar.total = taken + (self._planned.listed_images - first) // self._processes
            taken += end - first
            part = self.open_parts[number] = _OpenPart(first, np.zeros(end - first, FETCHED))
            for split, rows in self._rows(first, end):
                places = [image_keys.image_path(*(row[name] for name in _PATH_COLUMNS)) for row in rows]
                digests = [int(image_keys.path_digest(place), 16) for place in places]
                sizes = self._stored.sizes(digests).tolist()
                for row, place, digest, size in zip(rows, places, digests, sizes, strict=True):
                    image_id, before = row["image_id"], self._known[row["image_id"] - 1]
                    # One that failed in an earlier download may have been fetched by a later one.
                    fault = None if size else self._known_failures.get(image_id)
                    if row["fault_reason"]:
                        reason, detail = row["fault_reason"], row["fault_detail"]
                        fault = _Failure(split, row["file_name"], row["origin"], reason, detail, False)
                    if size == before["bytes"] > 0 and not fault:
                        part.fetched[image_id - 1 - first] = (digest, size, before["sha256"])
                        bar.skip()
                        continue
                    is_other = before["bytes"] not in (0, size)
                    self._lost += is_other
                    part.remaining += 1
                    part.is_changed = True
                    yield _Image(
                        number,
                        image_id,
                        split,
                        row["file_name"],
                        row["origin"],
                        storage.join(self._planned.images, place),
                        digest,
                        fault,
                        0 if is_other else size,
                    )
            self._count_done(number)
        bar.total = taken

    def _rows(self, first: int, end: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """Yield the rows of a range of images, and their split; all rows of one list are in one block."""
        begin = 0  # Images of earlier splits.
        for split, table in self._tables.items():
            for block in range(max(first - begin, 0) // raw_folder.BLOCK, table.blocks):
                at = begin + block * raw_folder.BLOCK  # First image of the block.
                if at >= end:
                    return
                rows = table.batch(block, _COLUMNS).slice(max(first - at, 0))
                yield split, rows.slice(0, end - max(first, at)).to_pylist()
            begin += len(table)

    def _copy_all(self, images_to_copy: Iterable[_Image], workers: int, bar: Bar) -> None:
        """Copy images, by threads, or by processes if the source is CPU-bound, and count the outcomes."""
        mean_size, fetched = 1.0, 0
        copied = worker_pool.run(
            partial(_copy, self._source, self._excluded),
            images_to_copy,
            workers,
            processes=self._source.cpu_bound,
            most=lambda: _MAX_BYTES_IN_FLIGHT / mean_size,
        )
        for image in copied:
            if image.failure:
                self._add_failure(image, image.failure)
            else:
                part = self.open_parts[image.part]
                part.fetched[image.image_id - 1 - part.first] = (
                    image.place,
                    image.size,
                    np.void(image.sha256),
                )
                self._count_done(image.part)
                if image.requested:
                    self._in_a_row = 0
                    fetched += 1
                    mean_size += (image.size - mean_size) / min(fetched, 64)
            if image.requested or image.failure:
                bar.update(note=f"{len(self._failures)} failed" if self._failures else "")
            else:
                bar.skip()

    def _add_failure(self, image: _Image, failure: _Failure) -> None:
        self._failures[image.image_id] = self.open_parts[image.part].failures[image.image_id] = failure
        is_temporary = image.requested and failure.reason == reasons.IMAGE_NOT_FETCHED
        if is_temporary:
            self._in_a_row += 1
            if self._in_a_row >= self._patience:
                problem = f"{self._in_a_row} images in a row could not be fetched; the last: {failure.detail}"
                fix = "check the source and the network, and run again: fetched images are kept"
                raise _SourceUnreachable(problem, fix=fix)
        problems, listed = Problems.of(self._planned.problems), self._planned.listed_images
        allowed = max(reasons.EXAMPLES, self._config.max_bad_fraction * listed)
        if len(self._failures) + problems.total(reasons.BAD_IMAGES) > allowed:
            for one in self._failures.values():
                problems.add(one.reason, f"{one.split}/{one.file_name}: {one.detail}")
            problems.check(
                self._planned.source, images=listed, boxes=0, max_bad_fraction=self._config.max_bad_fraction
            )
        if is_temporary and not self._is_retrying:
            self._retried.append(replace(image, failure=None))
        else:
            self._count_done(image.part)

    def _count_done(self, number: int) -> None:
        """Count an image of a part as done; write the report of the part after the last one."""
        part = self.open_parts[number]
        part.remaining -= 1
        if part.remaining:
            return
        if part.is_changed:
            self._write_report(number, part)
        del self.open_parts[number]

    def _write_report(self, number: int, part: _OpenPart) -> None:
        rows = np.flatnonzero(part.fetched["bytes"])
        fetched, ids = part.fetched[rows], rows + part.first + 1
        columns = {name: pa.array(np.ascontiguousarray(fetched[name])) for name in ("bytes", "place")}
        columns |= {"image_id": pa.array(ids), "sha256": pa.array(fetched["sha256"].tolist(), pa.binary(32))}
        stored = pa.table([columns.get(one.name, pa.nulls(len(ids), one.type)) for one in _REPORT], _REPORT)
        failed = [{"image_id": key, "bytes": 0, **row._asdict()} for key, row in part.failures.items()]
        report = pa.concat_tables([stored, pa.Table.from_pylist(failed, _REPORT)]).sort_by("image_id")
        buffer = io.BytesIO()
        pq.write_table(report, buffer)
        name = f"{number:03}-{_short_sha256(buffer.getvalue())}.parquet"
        uri = storage.join(self._planned.uri, "fetched", name)
        if self._reports.get(number, uri) != uri:
            storage.delete(self._reports[number])
        storage.write_bytes(uri, buffer.getvalue(), sync=False)


def _copy(source: Source, excluded: frozenset[str], image: _Image) -> _Image:
    """Fetch one image, unless it is stored or known to fail; return it with the outcome.

    `excluded` are the hashes of images that are left out.
    """
    if image.failure:
        return image
    if image.size:  # By a killed download. The shard step replaces it if it is damaged.
        actual = hashlib.sha256()
        try:
            with storage.open_reader(image.target) as file:
                while block := file.read(_BLOCK_BYTES):
                    actual.update(block)
        except (DamagedError, MissingError):
            return image
        return _left_out(image) if actual.hexdigest() in excluded else replace(image, sha256=actual.digest())
    try:
        data = source.read(image.origin)
        reason, detail = reasons.IMAGE_UNREADABLE, _fault(image.origin, data)
    except StorageError as error:
        reason, detail = reasons.IMAGE_NOT_FETCHED, error.message
        if isinstance(error, MissingError):
            reason = reasons.IMAGE_MISSING
        elif isinstance(error, Refused):
            reason = reasons.IMAGE_REFUSED
    if detail:
        failure = _Failure(image.split, image.file_name, image.origin, reason, detail)
        return replace(image, failure=failure, requested=True)
    digest = hashlib.sha256(data)
    if digest.hexdigest() in excluded:
        return _left_out(image)
    # Flushing each image to the disk would take longer than fetching it.
    storage.write_bytes(image.target, data, sync=False)
    return replace(image, size=len(data), sha256=digest.digest(), requested=True)


def _left_out(image: _Image) -> _Image:
    """Return the outcome of an image whose hash is in data.exclude; it counts as no failure of the source."""
    detail = "its sha256 is in data.exclude"
    return replace(
        image,
        failure=_Failure(
            image.split, image.file_name, image.origin, reasons.IMAGE_EXCLUDED, detail, requested=False
        ),
    )


def _fault(origin: str, data: bytes) -> str:
    """Return why bytes are not stored as an image; "" if they are. Servers may send pages instead."""
    try:
        if storage.scheme(origin) in storage.WEB:
            images.measure(data)
    except images.UnreadableImage as error:
        return f"{origin} gave {len(data)} bytes: {error}"
    return "" if data else "the file is empty"


def read_again(source_text: str, origin: str, config: DataConfig) -> bytes:
    """Return an image of a source that is lost or damaged now."""
    data = sources.parse(source_text, config).read(origin)
    if fault := _fault(origin, data):
        raise StorageError(fault, fix="check what this address returns")
    return data


class _StoredImages:
    """The stored images, in 12 bytes each: there may be millions."""

    def __init__(self, images_uri: str, *, at_once: bool) -> None:
        folders = (storage.join(images_uri, f"{number:02x}") for number in range(256))
        uris = [images_uri] if at_once else folders
        listings = list(worker_pool.run(_list, uris, _LISTERS, processes=False))
        digests = np.concatenate([digest for digest, _ in listings])
        order = np.argsort(digests, kind="stable")
        self._digests, self._sizes = digests[order], np.concatenate([size for _, size in listings])[order]

    def sizes(self, places: np.ndarray | list[int]) -> np.ndarray:
        """Return the sizes in bytes of the images at some paths, see FETCHED; 0 if an image is missing or
        empty.
        """
        places = np.asarray(places, np.uint64)
        if not len(self._digests):
            return np.zeros(places.shape, np.int32)
        at = np.minimum(np.searchsorted(self._digests, places), len(self._digests) - 1)
        return np.where(self._digests[at] == places, self._sizes[at], 0)


def _list(uri: str) -> tuple[np.ndarray, np.ndarray]:
    storage.remove_stale(uri)  # of downloads that were killed
    states = storage.list_states(uri, recursive=True)
    named = [(image_keys.path_digest(name), state.size) for name, state in states.items()]
    ours = [(int(digest, 16), size) for digest, size in named if _DIGEST.fullmatch(digest)]
    return np.array([digest for digest, _ in ours], np.uint64), np.array([size for _, size in ours], np.int32)
