"""Fetches the images of one partition over many connections, and reports the result of each.

The first two hex digits of an image's path decide on its partition, so each partition has its own folders
and learns by listing them which images are stored already. Of what comes from the web only images are kept,
and of a server that the user did not name only those that can be decoded: an address in annotations, or a
redirect, may lead to anything.

A report is a Parquet table with a row for each image: its id in the plan and its bytes with their hash, or 0
bytes and the reason why it was not fetched. The report's own hash is in a file beside it.
"""

import hashlib
import logging
import re
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trainer import storage
from trainer.base import worker_pool
from trainer.base.errors import DamagedError, MissingError, StorageError
from trainer.base.log import progress
from trainer.base.os_errors import refuse_want
from trainer.config.schema import DataConfig
from trainer.data import image_keys, images, raw_folder, sources
from trainer.data import problem_counts as reasons
from trainer.data.problem_counts import TRIED_AGAIN, Problems
from trainer.data.raw_folder import SUM, RawManifest
from trainer.data.shard_folder import digest
from trainer.data.sources.source import Source
from trainer.storage.url_policy import Refused, UrlPolicy

_LOG = logging.getLogger("data")
_SUM = ".sha256"
"""What is appended to a report's name for the file with its hash, as `sha256sum -c` reads it."""

_ROW = pa.schema(
    [("image_id", pa.int64()), ("bytes", pa.int32()), *((name, pa.string()) for name in
     ("split", "file_name", "origin", "reason", "detail")),
     ("place", pa.uint64()), ("sha256", pa.binary(32)), ("requested", pa.bool_())]
)  # fmt: skip

Fault = tuple[str, str, bool]
"""Reason, detail, and whether the source was asked."""


class Failure(NamedTuple):
    """An image that could not be fetched."""

    split: str
    file_name: str
    origin: str
    reason: str
    detail: str
    requested: bool = True
    """Whether the source was asked for it, and may answer otherwise another time; not where it lists none."""

    @property
    def message(self) -> str:
        """Name the image and the reason."""
        return f"{self.split}/{self.file_name}: {self.detail}"


def report_uri(plan: str, partition: int, partitions: int) -> str:
    """Return the URI of a partition's report.

    Args:
        plan: URI of the folder with the plan.
        partition: which, from 0.
        partitions: how many.
    """
    return storage.join(plan, "fetched", f"{partition}-of-{partitions}.parquet")


def write_report(
    uri: str, ids: "array[int]", sizes: "array[int]", failures: Mapping[int, Failure], sums: np.ndarray
) -> None:
    """Write a report.

    Args:
        uri: its place.
        ids: of the images that are there, int64.
        sizes: their bytes, int32.
        failures: by id, the images that could not be fetched.
        sums: rows of `raw_folder.SUM` by id - 1: place and hash of each.
    """
    failed = pa.Table.from_pylist(
        [{"image_id": key, "bytes": 0, **failure._asdict()} for key, failure in failures.items()], _ROW
    )
    columns = [np.array(ids, np.int64), np.array(sizes, np.int32)]
    nothing = pa.nulls(len(ids), pa.string())
    mine = sums[np.array(ids, np.int64) - 1]
    added = [
        pa.array(np.ascontiguousarray(mine["place"])),
        pa.array(np.ascontiguousarray(mine["sha256"]).tolist(), pa.binary(32)),
        pa.nulls(len(ids), pa.bool_()),
    ]
    stored = pa.Table.from_arrays([*map(pa.array, columns), *[nothing] * 5, *added], schema=_ROW)
    known: list[str] = []
    with storage.new_file(uri, sha256=lambda: known[0], confirm=True) as path:
        # In order, so that it does not depend on who was first, or how often it was begun.
        pq.write_table(pa.concat_tables([stored, failed]).sort_by("image_id"), path)
        with path.open("rb") as file:
            known.append(hashlib.file_digest(file, "sha256").hexdigest())
        # First: a report that is there is not written again, and would have none for good.
        storage.write_bytes(uri + _SUM, f"{known[0]}  {uri.rpartition('/')[2]}\n".encode())


def _table(uri: str) -> pa.Table:
    """Read a report.

    Raises:
        DamagedError: it is not what was written, or no report.
        StorageError: it is missing or cannot be read.
    """
    digest = storage.read_bytes(uri + _SUM).decode("ascii", "replace") if storage.exists(uri + _SUM) else ""
    path = storage.local_copy(uri, sha256=digest.partition(" ")[0])
    try:
        return pq.read_table(path).select(_ROW.names).cast(_ROW)
    except (pa.ArrowException, OSError, KeyError) as error:
        refuse_want(error, uri)
        raise DamagedError(
            f"{uri} is damaged: {str(error).splitlines()[0]}", fix="run the download again: it writes it anew"
        ) from None


class Report(NamedTuple):
    """What one partition of a download brought."""

    ids: np.ndarray
    """int64 [images]."""
    sums: np.ndarray
    """Rows of `raw_folder.SUM` of these images; 0 bytes where one was not fetched."""
    failures: list[Failure]


def read_report(uri: str) -> Report:
    """Read a partition's report.

    Raises:
        DamagedError: it is not what was written.
        StorageError: it is missing: that partition has not been fetched.
    """
    table = _table(uri)
    failed = table.filter(pc.equal(table["bytes"], 0)).select(list(Failure._fields)).to_pylist()
    failures = [Failure(**row) for row in failed]
    sums = np.zeros(len(table), SUM)
    sums["bytes"] = table["bytes"].to_numpy()
    sums["place"] = pc.fill_null(table["place"], 0).to_numpy()
    hashes = pc.fill_null(table["sha256"], bytes(32)).to_pylist()
    sums["sha256"] = np.frombuffer(b"".join(hashes), "V32") if hashes else sums["sha256"]
    return Report(table["image_id"].to_numpy(), sums, failures)


def known_sums(plan: str, total: int) -> np.ndarray:
    """Return rows of `raw_folder.SUM` by id - 1, as all readable reports of a plan tell them."""
    known = np.zeros(total, SUM)
    folder = storage.parent(report_uri(plan, 0, 1))
    for name in storage.list_files(folder):
        if name.endswith(".parquet"):
            with suppress(DamagedError):
                report = read_report(storage.join(folder, name))
                present = (report.sums["bytes"] > 0) & (report.ids <= total)
                known[report.ids[present] - 1] = report.sums[present]
    return known


def known_failures(plan: str, partition: int, partitions: int, *, again: bool) -> dict[int, Fault]:
    """Return the failures of earlier downloads of a plan, by image id.

    Earlier downloads may have had another number of partitions: all reports count. Those of the other
    partitions of this number do not: they are about other images, and may be being written.

    Args:
        plan: see `report_uri`.
        partition: see `report_uri`.
        partitions: see `report_uri`.
        again: whether to leave out failures that are worth another try: those that the source was asked for.
    """
    own_uri = report_uri(plan, partition, partitions)
    uris = [storage.join(plan, "fetched", name) for name in storage.list_files(storage.parent(own_uri))]
    condition = pc.field("bytes") == 0
    if again:
        condition &= pc.field("requested") == False  # noqa: E712 (of a column)
    rows = []
    for uri in uris:
        if uri.endswith(_SUM) or (uri != own_uri and uri.endswith(f"-of-{partitions}.parquet")):
            continue
        try:
            rows += _table(uri).filter(condition).to_pylist()
        except DamagedError as error:
            _LOG.warning("%s; mending it", error.message)
    # What one did not fetch, another may have found missing.
    rows.sort(key=lambda row: row["reason"] not in TRIED_AGAIN)
    return {row["image_id"]: (row["reason"], row["detail"], row["requested"]) for row in rows}


def worth_another_try(uri: str) -> bool:
    """Tell whether a partition's report names images that the source may have by now, or cannot be read."""
    try:
        return any(failure.requested for failure in read_report(uri).failures)
    except DamagedError as error:
        _LOG.warning("%s; mending it", error.message)
        return True


_BUDGET = 256 * 1024 * 1024
"""Bytes of images in flight, estimated by their mean size: large images are fewer at a time."""


@dataclass(frozen=True)
class Task:
    """One image of the partition."""

    source: Source
    image_id: int
    split: str
    file_name: str
    origin: str
    target: str
    fault: Fault | None
    size: int
    """Bytes that are stored already; 0 where it has to be fetched."""


Digest = bytes  # `bytes` is a field of Result.


class Result(NamedTuple):
    """The outcome of a task."""

    image_id: int
    bytes: int
    fetched: bool = False
    """Whether the bytes came now."""
    failure: Failure | None = None
    task: Task | None = None
    """The task where another try may help."""
    sha256: Digest = b""
    """Digest of the bytes; empty if it is not known."""


def copy_images(source: Source, tasks: Iterable[Task], workers: int, policy: UrlPolicy) -> Iterator[Result]:
    """Yield the outcome of each task, as it is done.

    Args:
        source: which the tasks are of.
        tasks: taken as workers become free.
        workers: images at the same time; processes where the source computes them.
        policy: where the origins of the tasks may lead, and redirects from there.
    """
    mean_size = 1.0

    def most_in_flight() -> float:
        return _BUDGET / mean_size

    copy = partial(_copy, policy)
    results = worker_pool.run(copy, tasks, workers, processes=source.cpu_bound, most=most_in_flight)
    for number, result in enumerate(results, 1):
        if result.fetched:
            mean_size += (result.bytes - mean_size) / min(number, 64)
        yield result


def read_again(source_text: str, origin: str, hosts: tuple[str, ...]) -> bytes:
    """Return an image that was brought before and is lost or damaged now, from where it came.

    Args:
        source_text: the source.
        origin: of the image.
        hosts: that addresses in annotations may lead to, see `trainer.config.schema.DataConfig`.

    Raises:
        StorageError: it cannot be had, or is no image.
    """
    policy = UrlPolicy(tuple(sources.places(source_text)), hosts)
    if policy.is_named(origin):
        return sources.parse(source_text).read(origin)
    data = storage.read_within(origin, policy)
    try:
        images.check(data)
    except images.UnreadableImage as error:
        raise StorageError(f"{origin} gave {len(data)} bytes: {error}", fix="look at what is there") from None
    return data


def _copy(policy: UrlPolicy, task: Task) -> Result:
    """Copy one image, unless its fault is known."""
    if task.fault:
        return _failed(task, *task.fault)
    known = policy.is_named(task.origin)
    is_from_data = storage.scheme(task.origin) in storage.WEB and not task.source.composes_addresses
    try:
        if not known or (task.source.origins_are_uris and is_from_data):
            data: bytes | memoryview = storage.read_within(task.origin, policy)
        elif task.source.origins_are_uris:
            data = storage.read_buffer(task.origin)
        else:
            data = task.source.read(task.origin)
    except StorageError as error:
        return _unread(task, error)
    return _write(task, data) if known else _write_image(task, data)


def _write_image(task: Task, data: bytes | memoryview) -> Result:
    """Write what came from a server that the user did not name, if it is an image."""
    try:
        images.check(bytes(data))
    except images.UnreadableImage as error:
        return _failed(task, reasons.IMAGE_UNREADABLE, f"{task.origin} gave {len(data)} bytes: {error}")
    return _write(task, data)


def _write(task: Task, data: bytes | memoryview) -> Result:
    """Write the bytes of an image, if there are any."""
    if not data:
        return _failed(task, reasons.IMAGE_UNREADABLE, "the file is empty")
    if storage.scheme(task.origin) in storage.WEB and not images.begins_as_image(bytes(data[:16])):
        return _failed(
            task, reasons.IMAGE_UNREADABLE, f"{task.origin} gave what does not begin as an image does"
        )
    # Flushing each image to the disk would take longer than fetching it.
    storage.write_bytes(task.target, data, sync=False)
    return Result(task.image_id, len(data), fetched=True, sha256=hashlib.sha256(data).digest())


def hash_stored(task: Task) -> Result:
    """Return the outcome of an image that is stored, and whose hash nobody has noted: of a killed download.

    It is read for that. The shard step mends one that turns out to be damaged.
    """
    try:
        return Result(task.image_id, task.size, sha256=bytes.fromhex(digest(task.target)))
    except (DamagedError, MissingError):
        return Result(task.image_id, task.size)


def _unread(task: Task, error: StorageError) -> Result:
    """Return the outcome of an image that could not be read; unless it is missing, it may be tried again."""
    if isinstance(error, MissingError):
        return _failed(task, reasons.IMAGE_MISSING, error.message)
    if isinstance(error, Refused):
        return _failed(task, reasons.IMAGE_REFUSED, error.message)
    return _failed(task, reasons.IMAGE_NOT_FETCHED, error.message)._replace(task=task)


def _failed(task: Task, reason: str, detail: str, requested: bool = True) -> Result:
    failure = Failure(task.split, task.file_name, task.origin, reason, detail, requested)
    return Result(task.image_id, 0, failure=failure)


_FOLDERS = [f"{number:02x}" for number in range(256)]
_LISTERS = 16
_FEW = 10_000
"""Images that are listed at once: a request for each folder would take longer."""

_DIGEST = re.compile(r"[0-9a-f]{16}")
_UNKNOWN = bytes(32)
logger = logging.getLogger(__name__)

_PATIENCE = 50
"""Images in a row (and twice the connections) that may fail before the source counts as down."""

_COLUMNS = ["image_id", "key", "file_name", "origin", "version", "fault_reason", "fault_detail"]


class SourceDown(StorageError):
    """The source does not answer any more."""


def run(
    planned: RawManifest,
    config: DataConfig,
    partition: int,
    partitions: int,
    *,
    again: bool = True,
) -> None:
    """Fetch a partition's images and write its report. What failed is tried once more at the end.

    An image that is stored is fetched again where it has other bytes than an earlier report says.

    Args:
        planned: what `download.plan` returned.
        config: connections, and how much may be bad.
        partition: which, from 0.
        partitions: how many.
        again: whether to ask again for what an earlier download did not get.

    Raises:
        DataError: far more images fail than the configuration allows.
        SourceDown: the source answers no more.
        StorageError: the data root cannot be written.
    """
    missing = known_failures(planned.uri, partition, partitions, again=again)
    source = sources.parse(planned.source)
    policy = UrlPolicy(tuple(sources.places(planned.source)), tuple(config.allow_hosts))
    mine = _FOLDERS[partition::partitions]
    total = planned.listed_images
    stored = _StoredImages(planned.images, mine, at_once=partitions == 1 and total <= _FEW)
    expected = round(total * len(mine) / len(_FOLDERS))
    workers = (config.processes or worker_pool.available_cores()) if source.cpu_bound else config.threads
    known = known_sums(planned.uri, total)
    tally = _Tally(planned, config.max_bad_fraction, workers)
    unhashed = _Unhashed(tally)
    with progress("download", expected, "images") as bar:
        tasks = _tasks(planned, source, set(mine), stored, missing)
        to_fetch = _to_fetch(tasks, known, tally, unhashed, bar.skip)
        for result in copy_images(source, to_fetch, min(workers, total), policy):
            tally.add(result)
            bar.update(note=tally.note())
        for result in copy_images(source, tally.again(), workers, policy):
            tally.add(result)
            bar.update(0, note=tally.note())
        unhashed.count()
        bar.total = bar.done  # A partition's share was an estimate.
    if tally.lost:
        logger.warning(
            "mending %s: %d stored images were missing or cut off, and were fetched again",
            planned.images, tally.lost,
        )  # fmt: skip
    tally.write(report_uri(planned.uri, partition, partitions))


class _Unhashed:
    """Stored images whose hash nobody knows: they are read for it, many at a time."""

    def __init__(self, tally: "_Tally") -> None:
        self._tally = tally
        self._tasks: list[Task] = []

    def add(self, task: Task) -> None:
        """Read it with the next ones."""
        self._tasks.append(task)
        if len(self._tasks) >= _FEW:
            self.count()

    def count(self) -> None:
        """Read those that wait, and count them in."""
        for result in worker_pool.run(hash_stored, self._tasks, _LISTERS, processes=False):
            self._tally.add(result)
        self._tasks.clear()


def _to_fetch(
    tasks: Iterator[Task], known: np.ndarray, tally: "_Tally", unhashed: _Unhashed, skip: Callable[[], Any]
) -> Iterator[Task]:
    """Yield the images that have to be fetched; count those that are stored as an earlier report says."""
    for task in tasks:
        tally.note_place(task)
        before = known[task.image_id - 1]
        if task.fault or not task.size or before["bytes"] not in (0, task.size):
            tally.lost += bool(before["bytes"])
            yield task
            continue
        skip()
        if before["bytes"] and before["sha256"].tobytes() != _UNKNOWN:
            tally.add(Result(task.image_id, task.size, sha256=before["sha256"].tobytes()))
        else:
            unhashed.add(task)


class _Tally:
    """Counts fetched and failed images, in 56 bytes an image: there may be millions."""

    def __init__(self, planned: RawManifest, max_bad_fraction: float, workers: int) -> None:
        self._source, self._max_bad_fraction = planned.source, max_bad_fraction
        self._total = planned.listed_images
        self._allowed = max(reasons.EXAMPLES, max_bad_fraction * self._total)
        self._problems = Problems.of(planned.problems)
        self._patience = _PATIENCE + 2 * workers
        self._in_a_row = 0
        self._ids, self._sizes = array("q"), array("i")
        self._sums = np.zeros(self._total, SUM)
        self.lost = 0
        """Images that an earlier download brought, and that are not there as it did."""
        self._failures: dict[int, Failure] = {}
        self._again: list[Task] = []
        self._brought, self._began = 0, time.monotonic()

    def add(self, result: Result) -> None:
        """Count one result.

        Raises:
            DataError: more cannot be had than may be bad.
            StorageError: so many failed in a row that the source must be down.
        """
        self._brought += result.bytes if result.fetched else 0
        if result.task:
            self._in_a_row += 1
        elif result.fetched:
            self._in_a_row = 0
        failure = result.failure
        if failure is None:
            self._ids.append(result.image_id)
            self._sizes.append(result.bytes)
            if result.sha256:
                self._sums["sha256"][result.image_id - 1] = np.void(result.sha256)
            return
        self._failures[result.image_id] = failure
        if result.task:
            self._again.append(result.task)
            if self._in_a_row >= self._patience:
                raise SourceDown(
                    f"{self._in_a_row} images in a row could not be fetched; the last: {failure.detail}",
                    fix="check the source and the network, and run again: what came is kept",
                )
        else:
            self._problems.add(failure.reason, failure.message)
        if len(self._again) + self._problems.total(reasons.BAD_IMAGES) > self._allowed:
            for task in self._again:
                failed = self._failures[task.image_id]
                self._problems.add(failed.reason, failed.message)
            self._problems.check(
                self._source, images=self._total, boxes=0, max_bad_fraction=self._max_bad_fraction
            )

    def note_place(self, task: Task) -> None:
        """Note where an image lies, or would."""
        self._sums["place"][task.image_id - 1] = _place_digest(task.target)

    def again(self) -> list[Task]:
        """Return the tasks that failed, and forget that they did; now they may fail in a row."""
        tasks, self._again, self._patience = self._again, [], len(self._again) + self._in_a_row + 1
        for task in tasks:
            del self._failures[task.image_id]
        return tasks

    def note(self) -> str:
        """Say how it goes: `12.3 MB/s, 4 missing, 1 failed`."""
        parts = [f"{self._brought / 1e6 / max(time.monotonic() - self._began, 0.1):.1f} MB/s"]
        failed = len(self._again)
        if len(self._failures) > failed:
            parts.append(f"{len(self._failures) - failed} missing")
        if failed:
            parts.append(f"{failed} failed")
        return ", ".join(parts)

    def write(self, uri: str) -> None:
        """Write the report."""
        write_report(uri, self._ids, self._sizes, self._failures, self._sums)


def _tasks(
    planned: RawManifest,
    source: Source,
    folders: set[str],
    stored: "_StoredImages",
    missing: dict[int, Fault],
) -> Iterator[Task]:
    """Yield the images of some folders, block by block, with the failures that earlier reports tell.

    An image that could not be fetched may be stored by now.
    """
    for split in planned.splits:
        table = planned.table(split)
        for block in range(table.blocks):
            columns = table.columns(block, _COLUMNS)
            for image_id, key, name, origin, version, reason, detail in zip(*columns.values(), strict=True):
                place = image_keys.place(key, name, origin, version)
                if place[:2] not in folders:
                    continue
                size = stored.size(place)
                fault = (reason, detail, False) if reason else missing.get(image_id)
                if size and fault and fault[2]:
                    fault = None
                target = storage.join(planned.images, place)
                yield Task(source, image_id, split, name, origin, target, fault, size)


class _StoredImages:
    """The images that are stored already, in 12 bytes each: there may be millions."""

    def __init__(self, images: str, folders: list[str], *, at_once: bool) -> None:
        uris = [images] if at_once else [storage.join(images, folder) for folder in folders]
        listings = list(worker_pool.run(_list, uris, _LISTERS, processes=False))
        digests = np.concatenate([digest for digest, _ in listings])
        order = np.argsort(digests, kind="stable")
        self._digests, self._sizes = digests[order], np.concatenate([size for _, size in listings])[order]
        self.count = len(order)

    def differing(self, expected: np.ndarray) -> int:
        """Count the rows of SUM whose image is not there with as many bytes."""
        if not self.count:
            return len(expected)
        at = np.minimum(np.searchsorted(self._digests, expected["place"]), self.count - 1)
        same = (self._digests[at] == expected["place"]) & (self._sizes[at] == expected["bytes"])
        return int((~same).sum())

    def size(self, place: str) -> int:
        """Return the bytes of the image at a path; 0 where there is none, or a power cut left it empty."""
        if not self.count:
            return 0
        digest = _place_digest(place)
        at = np.searchsorted(self._digests, digest)
        return int(self._sizes[at]) if at < self.count and self._digests[at] == digest else 0


def absent(manifest: RawManifest, partition: int, partitions: int) -> int:
    """Count the images of a partition that a manifest tells of and a listing shows as missing or cut off.

    Args:
        manifest: what `download.join` returned; one from before places were noted tells nothing.
        partition: which, from 0.
        partitions: how many.

    Raises:
        DamagedError: the manifest's arrays are damaged.
        StorageError: the folder cannot be listed.
    """
    sums = raw_folder.read_sums(manifest)
    if sums is None:
        return 0
    mine = _FOLDERS[partition::partitions]
    stored = _StoredImages(manifest.images, mine, at_once=partitions == 1 and len(sums) <= _FEW)
    expected = sums[sums["bytes"] > 0]
    if partitions > 1:  # the first two of the digest's sixteen hexadecimal digits are the folder
        expected = expected[(expected["place"] >> np.uint64(56)) % np.uint64(partitions) == partition]
    return stored.differing(expected)


def _place_digest(place: str) -> np.uint64:
    return np.uint64(int(image_keys.place_digest(place.rpartition("/")[2]), 16))


def _list(uri: str) -> tuple[np.ndarray, np.ndarray]:
    storage.remove_stale(uri)  # of downloads that were killed
    states = storage.list_states(uri, recursive=True)
    named = [(image_keys.place_digest(name), state.size) for name, state in states.items()]
    ours = [(int(digest, 16), size) for digest, size in named if _DIGEST.fullmatch(digest)]
    digests, sizes = [digest for digest, _ in ours], [size for _, size in ours]
    return np.array(digests, np.uint64), np.array(sizes, np.int32)
