"""Fetches the images of a plan in parts, and writes a report for each part.

A part is a range of images that depends only on the listing, so the files do not depend on the number of
processes. `<raw>/fetched/<part>-<sha256>.parquet` has a row of _REPORT for each image of the part.
"""

import hashlib
import io
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trainer import storage
from trainer.base import worker_pool
from trainer.base.errors import DamagedError, MissingError, StorageError
from trainer.base.log import Bar, progress
from trainer.config.schema import DataConfig
from trainer.data import image_keys, images, raw_folder, sources
from trainer.data import problem_counts as reasons
from trainer.data.problem_counts import Problems
from trainer.data.raw_folder import FETCHED
from trainer.data.raw_manifest import RawManifest
from trainer.data.sources.source import Source
from trainer.storage.web import AddressNotAllowed

logger = logging.getLogger(__name__)

SHA256 = re.compile(r"[0-9A-Fa-f]{64}")
_MAX_BYTES_IN_FLIGHT = 256 * 1024 * 1024  # Bytes of images being fetched, estimated from their mean size.
_LISTERS = 16
_PART, _MIN_PARTS, _MAX_PARTS = 200, 4, 256
"""Images per part, and limits of the number of parts; writing a report takes a few milliseconds."""
_READERS = 16
ONE_LISTING_LIMIT = 10_000  # Up to this many images, one listing is faster than one per folder.
_DIGEST = re.compile(r"[0-9a-f]{16}")
_MAX_FAILURES_IN_A_ROW = 50  # After so many failures in a row, plus two per connection, the source is down.
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


class SourceUnreachable(StorageError):
    """The source no longer answers."""


class Failure(NamedTuple):
    """An image that could not be fetched."""

    split: str
    file_name: str
    origin: str
    reason: str
    detail: str
    requested: bool = True  # Whether it was requested from the source; False if the listing shows the fault.


def count_parts(planned: RawManifest) -> int:
    """Return the number of parts into which the images of a plan are divided."""
    images = planned.image_count
    return min(max(images // _PART, min(images, _MIN_PARTS)), _MAX_PARTS)


def _part_range(planned: RawManifest, part: int) -> tuple[int, int]:
    """Return the first image of a part, counted from 0, and the first image after the part."""
    total, parts = planned.image_count, count_parts(planned)
    return part * total // parts, (part + 1) * total // parts


def list_reports(planned: RawManifest) -> dict[int, str]:
    """Return the URIs of the existing reports, by part: `fetched/<part>-<sha256>.parquet`."""
    folder = storage.join(planned.uri, "fetched")
    return {int(name.partition("-")[0]): storage.join(folder, name) for name in storage.list_files(folder)}


def read_reports(planned: RawManifest, *, complete: bool = False) -> tuple[np.ndarray, dict[int, Failure]]:
    """Return rows of FETCHED by image id - 1 (0 bytes: not fetched), and failures by image id.

    Missing or damaged reports are ignored; if `complete` is set, they raise an error.
    """
    fetched = np.zeros(planned.image_count, FETCHED)
    failures: dict[int, Failure] = {}
    reports = list_reports(planned)
    if complete and len(reports) != count_parts(planned):
        raise MissingError(f"{planned.uri} lacks reports of fetched images", fix="run the same command again")
    read = partial(_read_report, complete)
    for report in worker_pool.run(read, reports.values(), _READERS, processes=False):
        stored = report.filter(pc.greater(report["bytes"], 0))
        at = stored["image_id"].to_numpy() - 1
        fetched["bytes"][at], fetched["place"][at] = stored["bytes"].to_numpy(), stored["place"].to_numpy()
        fetched["sha256"][at] = np.frombuffer(b"".join(stored["sha256"].to_pylist()), "V32")
        for row in report.filter(pc.equal(report["bytes"], 0)).to_pylist():
            failures[row["image_id"]] = Failure(*(row[name] for name in Failure._fields))
    return fetched, failures


def _read_report(complete: bool, uri: str) -> pa.Table:
    """Read the report of a part; a missing or damaged one is empty, or an error if `complete` is set."""
    try:
        return read_report(uri)
    except (DamagedError, MissingError) as error:
        if complete:
            raise
        logger.warning("%s; repairing it", error.message)
        return _REPORT.empty_table()


def read_report(uri: str) -> pa.Table:
    """Read a report, rows of _REPORT; raise DamagedError if its hash differs from its name."""
    data = storage.read_bytes(uri)
    if f"-{_short_sha256(data)}.parquet" not in uri:
        fix = "run the download again to replace it"
        raise DamagedError(f"{uri} is damaged: its hash differs from its name", fix=fix)
    return pq.read_table(io.BytesIO(data))


def _short_sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


@dataclass(frozen=True)
class _Image:
    """An image to fetch, or to hash if it is stored already; later the result."""

    part: int
    image_id: int
    split: str
    file_name: str
    origin: str
    target: str
    place: int  # Digest of the target, see `image_keys.path_digest`.
    failure: Failure | None  # Why it was not fetched.
    size: int  # Stored bytes; 0 if it has to be fetched.
    sha256: bytes = b""
    requested: bool = False  # Whether it was requested from the source in this run.


@dataclass
class _PendingPart:
    """A part with unfinished images."""

    first: int  # Its first image, counted from 0.
    fetched: np.ndarray  # Rows of FETCHED of its images.
    failures: dict[int, Failure] = field(default_factory=dict)  # By image id.
    remaining: int = 1  # Unfinished images; plus one until all are counted.
    is_changed: bool = False  # Whether its report has to be rewritten.


class ImageFetcher:
    """Fetches the images of parts, and writes their reports; images that fail are retried once at the end.

    A stored image is fetched again if its size differs from that in `known`, the result of earlier downloads.
    Images in `known_failures` are not requested again. Uses 56 bytes of memory per image of the source.
    """

    def __init__(
        self,
        planned: RawManifest,
        config: DataConfig,
        known: np.ndarray,
        known_failures: dict[int, Failure],
        processes: int,
    ) -> None:
        self._planned, self._config, self._processes = planned, config, processes
        self._known, self._known_failures = known, known_failures
        self._source = sources.parse(planned.source, config)
        self._excluded = frozenset(filter(SHA256.fullmatch, planned.excluded))
        self._tables = {split: raw_folder.open_table(planned, split) for split in planned.splits}
        self._stored = StoredImages(planned.images, one_listing=planned.image_count <= ONE_LISTING_LIMIT)
        cores = config.processes or worker_pool.available_cores()
        self._workers = cores if self._source.cpu_bound else config.threads
        self.open_parts: dict[int, _PendingPart] = {}
        self._failures: dict[int, Failure] = {}
        self._retried: list[_Image] = []
        self._is_retrying = False
        self._in_a_row, self._patience = 0, _MAX_FAILURES_IN_A_ROW + 2 * self._workers
        self._lost = 0
        """Images that an earlier download fetched, and that are now missing or have another size."""

    def run(self, parts: Iterable[int]) -> None:
        """Fetch the images of these parts."""
        total = self._planned.image_count
        with progress("download", total, "images") as bar:
            self._fetch_all(self._pending_images(parts, bar), min(self._workers, total), bar)
            retried, self._retried = self._retried, []
            bar.done -= len(retried)
            self._patience = len(retried) + self._in_a_row + 1  # All of them may fail again.
            for image in retried:
                del self._failures[image.image_id], self.open_parts[image.part].failures[image.image_id]
            self._is_retrying = True
            self._fetch_all(retried, self._workers, bar)
        if self._lost:
            logger.warning(
                "repaired %s: %d stored images were missing or cut off, and were fetched again",
                self._planned.images,
                self._lost,
            )

    def _pending_images(self, parts: Iterable[int], bar: Bar) -> Iterator[_Image]:
        """Yield the images that have to be fetched or hashed, and count the others as done."""
        taken = 0  # Images of the parts so far.
        for number in parts:
            first, end = _part_range(self._planned, number)
            # The other processes fetch an equal share of the rest.
            bar.total = taken + (self._planned.image_count - first) // self._processes
            taken += end - first
            part = self.open_parts[number] = _PendingPart(first, np.zeros(end - first, FETCHED))
            for split, rows in self._rows(first, end):
                places = [image_keys.image_path(*(row[name] for name in _PATH_COLUMNS)) for row in rows]
                digests = [int(image_keys.path_digest(place), 16) for place in places]
                sizes = self._stored.sizes(digests).tolist()
                for row, place, digest, size in zip(rows, places, digests, sizes, strict=True):
                    image_id, before = row["image_id"], self._known[row["image_id"] - 1]
                    # A later download may have fetched an image that failed before.
                    fault = None if size else self._known_failures.get(image_id)
                    if row["fault_reason"]:
                        reason, detail = row["fault_reason"], row["fault_detail"]
                        fault = Failure(split, row["file_name"], row["origin"], reason, detail, False)
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
        """Yield the split and the rows of a range of images, block by block."""
        begin = 0  # Images of earlier splits.
        for split, table in self._tables.items():
            for block in range(max(first - begin, 0) // raw_folder.BLOCK, table.block_count):
                at = begin + block * raw_folder.BLOCK  # First image of the block.
                if at >= end:
                    return
                rows = table.read_block(block, _COLUMNS).slice(max(first - at, 0))
                yield split, rows.slice(0, end - max(first, at)).to_pylist()
            begin += len(table)

    def _fetch_all(self, images_to_copy: Iterable[_Image], workers: int, bar: Bar) -> None:
        """Fetch images in threads, or in processes if the source is CPU-bound, and record the results."""
        mean_size, fetched = 1.0, 0
        copied = worker_pool.run(
            partial(_fetch_image, self._source, self._excluded),
            images_to_copy,
            workers,
            processes=self._source.cpu_bound,
            max_pending=lambda: _MAX_BYTES_IN_FLIGHT / mean_size,
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

    def _add_failure(self, image: _Image, failure: Failure) -> None:
        self._failures[image.image_id] = self.open_parts[image.part].failures[image.image_id] = failure
        is_temporary = image.requested and failure.reason == reasons.IMAGE_NOT_FETCHED
        if is_temporary:
            self._in_a_row += 1
            if self._in_a_row >= self._patience:
                problem = f"{self._in_a_row} images in a row could not be fetched; the last: {failure.detail}"
                fix = "check the source and the network, and run again: fetched images are kept"
                raise SourceUnreachable(problem, fix=fix)
        problems, listed = Problems.from_cases(self._planned.problems), self._planned.image_count
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
        """Count an image of a part as done; after the last one, write the report."""
        part = self.open_parts[number]
        part.remaining -= 1
        if part.remaining:
            return
        if part.is_changed:
            self._write_report(number, part)
        del self.open_parts[number]

    def _write_report(self, number: int, part: _PendingPart) -> None:
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
        # Other jobs may have written reports of this part.
        for other in storage.list_files(storage.parent(uri)):
            if other.startswith(f"{number:03}-") and other != name:
                storage.delete(storage.join(storage.parent(uri), other))
        storage.write_bytes(uri, buffer.getvalue(), sync=False)


def _fetch_image(source: Source, excluded: frozenset[str], image: _Image) -> _Image:
    """Fetch one image, unless it is stored or known to fail; return it with the result.

    `excluded` are hashes of images to leave out.
    """
    if image.failure:
        return image
    if image.size:  # A killed download stored it. The shard step replaces it if it is damaged.
        try:
            actual = hashlib.sha256(storage.read_bytes(image.target))
        except (DamagedError, MissingError):
            return image
        return _exclude(image) if actual.hexdigest() in excluded else replace(image, sha256=actual.digest())
    try:
        data = source.read(image.origin)
        reason, detail = reasons.IMAGE_UNREADABLE, _find_fault(image.origin, data)
    except StorageError as error:
        reason, detail = reasons.IMAGE_NOT_FETCHED, error.message
        if isinstance(error, MissingError):
            reason = reasons.IMAGE_MISSING
        elif isinstance(error, AddressNotAllowed):
            reason = reasons.IMAGE_REFUSED
    if detail:
        failure = Failure(image.split, image.file_name, image.origin, reason, detail)
        return replace(image, failure=failure, requested=True)
    digest = hashlib.sha256(data)
    if digest.hexdigest() in excluded:
        return _exclude(image)
    # Not synced: that would take longer than fetching the image.
    storage.write_bytes(image.target, data, sync=False)
    return replace(image, size=len(data), sha256=digest.digest(), requested=True)


def _exclude(image: _Image) -> _Image:
    """Mark an image whose hash is in data.exclude; this is not a failure of the source."""
    detail = "its sha256 is in data.exclude"
    return replace(
        image,
        failure=Failure(
            image.split, image.file_name, image.origin, reasons.IMAGE_EXCLUDED, detail, requested=False
        ),
    )


def _find_fault(origin: str, data: bytes) -> str:
    """Return why bytes are rejected, e.g. an HTML page instead of an image; "" if they are not."""
    try:
        if storage.scheme(origin) in storage.WEB:
            images.read_header(data)
    except images.UnreadableImage as error:
        return f"{origin} returned {len(data)} bytes: {error}"
    return "" if data else "the file is empty"


def refetch(source_text: str, origin: str, config: DataConfig) -> bytes:
    """Fetch an image again whose stored copy is lost or damaged."""
    data = sources.parse(source_text, config).read(origin)
    if fault := _find_fault(origin, data):
        raise StorageError(fault, fix="check what this address returns")
    return data


class StoredImages:
    """The sizes of all stored images; uses 12 bytes per image, since there may be millions."""

    def __init__(self, images_uri: str, *, one_listing: bool) -> None:
        folders = (storage.join(images_uri, f"{number:02x}") for number in range(256))
        uris = [images_uri] if one_listing else folders
        listings = list(worker_pool.run(_list_stored, uris, _LISTERS, processes=False))
        digests = np.concatenate([digest for digest, _ in listings])
        order = np.argsort(digests, kind="stable")
        self._digests, self._sizes = digests[order], np.concatenate([size for _, size in listings])[order]

    def sizes(self, places: np.ndarray | list[int]) -> np.ndarray:
        """Return the sizes in bytes of images, given digests of their paths (see FETCHED); 0 if missing."""
        places = np.asarray(places, np.uint64)
        if not len(self._digests):
            return np.zeros(places.shape, np.int32)
        at = np.minimum(np.searchsorted(self._digests, places), len(self._digests) - 1)
        return np.where(self._digests[at] == places, self._sizes[at], 0)


def _list_stored(uri: str) -> tuple[np.ndarray, np.ndarray]:
    storage.remove_stale(uri)  # from killed downloads
    states = storage.list_states(uri, recursive=True)
    named = [(image_keys.path_digest(name), state.size) for name, state in states.items()]
    ours = [(int(digest, 16), size) for digest, size in named if _DIGEST.fullmatch(digest)]
    return np.array([digest for digest, _ in ours], np.uint64), np.array([size for _, size in ours], np.int32)
