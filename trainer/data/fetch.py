"""Fetches the images of a plan, or of one of several partitions, over many connections.

The first two hex digits of an image's path determine its partition, so each partition lists only its own
folders. From the web only images are stored, and from a server that the user did not name only those that
can be decoded.
"""

import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from trainer import storage
from trainer.base import worker_pool
from trainer.base.errors import DamagedError, MissingError, StorageError
from trainer.base.log import progress
from trainer.config.schema import DataConfig
from trainer.data import image_keys, images, raw_folder, sources
from trainer.data import problem_counts as reasons
from trainer.data.problem_counts import Problems
from trainer.data.raw_folder import SUM, UNKNOWN_HASH, Failure, Fetched, RawManifest
from trainer.data.shard_folder import digest
from trainer.data.sources.source import Source
from trainer.storage.url_policy import Refused, UrlPolicy

logger = logging.getLogger(__name__)

_BUDGET = 256 * 1024 * 1024
"""Bytes of images in flight, estimated by their mean size."""
_FOLDERS = [f"{number:02x}" for number in range(256)]
_LISTERS = 16
_FEW = 10_000
"""Images up to which one listing is faster than one for each folder."""
_DIGEST = re.compile(r"[0-9a-f]{16}")
_PATIENCE = 50
"""Images in a row (plus twice the connections) that fail before the source counts as down."""
_COLUMNS = ["image_id", "key", "file_name", "origin", "version", "fault_reason", "fault_detail"]


class SourceDown(StorageError):
    """The source no longer answers."""


@dataclass(frozen=True)
class Task:
    """One image to fetch, or to hash if it is stored."""

    source: Source
    image_id: int
    split: str
    file_name: str
    origin: str
    target: str
    place: int
    """Digest of the target, see `image_keys.place_digest`."""
    fault: Failure | None
    """A known reason why it cannot be fetched."""
    stored: int
    """Stored bytes, whose hash is unknown; 0 if it has to be fetched."""

    def failed(self, reason: str, detail: str) -> "Result":
        """Return the result for an image that cannot be fetched."""
        failure = Failure(self.split, self.file_name, self.origin, reason, detail)
        return Result(self.image_id, self.place, failure=failure)


class Result(NamedTuple):
    """The outcome of a task."""

    image_id: int
    place: int
    size: int = 0
    """In bytes."""
    sha256: bytes = UNKNOWN_HASH
    fetched: bool = False
    """Whether the bytes were fetched now."""
    failure: Failure | None = None
    task: Task | None = None
    """The task, if a retry may help."""


def run(planned: RawManifest, config: DataConfig, partition: int, partitions: int, known: Fetched) -> Fetched:
    """Fetch a partition's images; those that fail are retried once at the end.

    A stored image is fetched again if its size differs from the one in `known`, the result of earlier
    downloads. Images that failed there are not requested again.

    Raises:
        DataError: far more images fail than the configuration allows.
        SourceDown: the source no longer answers.
        StorageError: the data root cannot be written.
    """
    source = sources.parse(planned.source)
    policy = UrlPolicy(tuple(sources.places(planned.source)), tuple(config.allow_hosts))
    folders = _FOLDERS[partition::partitions]
    total = planned.listed_images
    stored = _StoredImages(planned.images, folders, at_once=partitions == 1 and total <= _FEW)
    workers = (config.processes or worker_pool.available_cores()) if source.cpu_bound else config.threads
    tally = _Tally(planned, config.max_bad_fraction, workers)
    with progress("download", round(total * len(folders) / len(_FOLDERS)), "images") as bar:
        tasks = _tasks(planned, source, set(folders), stored, known, tally, bar.skip)
        for result in copy_images(source, tasks, min(workers, total), policy):
            tally.add(result)
            if result.fetched or result.failure:
                bar.update(note=tally.note())
            else:
                bar.skip()
        for result in copy_images(source, tally.take_failed(), workers, policy):
            tally.add(result)
            bar.update(0, note=tally.note())
        bar.total = bar.done  # A partition's share was an estimate.
    if tally.lost:
        logger.warning(
            "repaired %s: %d stored images were missing or cut off, and were fetched again",
            planned.images, tally.lost,
        )  # fmt: skip
    return Fetched(tally.sums, tally.failures)


def _tasks(
    planned: RawManifest, source: Source, folders: set[str], stored: "_StoredImages", known: Fetched,
    tally: "_Tally", skip: Callable[[], Any],
) -> Iterator[Task]:  # fmt: skip
    """Yield the images of some folders that need work; count the stored ones."""
    for split in planned.splits:
        table = planned.table(split)
        for block in range(table.blocks):
            columns = table.columns(block, _COLUMNS)
            for image_id, key, name, origin, version, reason, detail in zip(*columns.values(), strict=True):
                place = image_keys.place(key, name, origin, version)
                if place[:2] not in folders:
                    continue
                number = int(image_keys.place_digest(place), 16)
                size, before = stored.size(number), known.sums[image_id - 1]
                fault = known.failures.get(image_id)
                if reason:
                    fault = Failure(split, name, origin, reason, detail, requested=False)
                elif size:  # It failed in an earlier download, and was fetched by a later one.
                    fault = None
                sha256 = before["sha256"].tobytes()
                if size == before["bytes"] > 0 and sha256 != UNKNOWN_HASH and not fault:
                    tally.add(Result(image_id, number, size, sha256))
                    skip()
                    continue
                is_other = before["bytes"] not in (0, size)
                tally.lost += is_other
                target = storage.join(planned.images, place)
                yield Task(
                    source, image_id, split, name, origin, target, number, fault, 0 if is_other else size
                )


def copy_images(source: Source, tasks: Iterable[Task], workers: int, policy: UrlPolicy) -> Iterator[Result]:
    """Yield the result of each task as it is done, by threads, or by processes if the source is CPU-bound."""
    mean_size = 1.0
    results = worker_pool.run(
        partial(_copy, policy), tasks, workers, processes=source.cpu_bound, most=lambda: _BUDGET / mean_size
    )
    for number, result in enumerate(results, 1):
        if result.fetched:
            mean_size += (result.size - mean_size) / min(number, 64)
        yield result


def _copy(policy: UrlPolicy, task: Task) -> Result:
    """Fetch one image, unless it is stored or its fault is known."""
    if task.fault:
        return Result(task.image_id, task.place, failure=task.fault)
    if task.stored:
        return _hash_stored(task)
    is_named = policy.is_named(task.origin)
    try:
        data = _read(policy, task, is_named)
    except (MissingError, Refused) as error:
        is_missing = isinstance(error, MissingError)
        return task.failed(reasons.IMAGE_MISSING if is_missing else reasons.IMAGE_REFUSED, error.message)
    except StorageError as error:
        return task.failed(reasons.IMAGE_NOT_FETCHED, error.message)._replace(task=task)
    fault = _fault(task.origin, data, is_named)
    if fault:
        return task.failed(reasons.IMAGE_UNREADABLE, fault)
    # Flushing each image to the disk would take longer than fetching it.
    storage.write_bytes(task.target, data, sync=False)
    return Result(task.image_id, task.place, len(data), hashlib.sha256(data).digest(), fetched=True)


def _read(policy: UrlPolicy, task: Task, is_named: bool) -> bytes | memoryview:
    is_from_data = storage.scheme(task.origin) in storage.WEB and not task.source.composes_addresses
    if not is_named or (task.source.origins_are_uris and is_from_data):
        return storage.read_within(task.origin, policy)
    return storage.read_buffer(task.origin) if task.source.origins_are_uris else task.source.read(task.origin)


def _hash_stored(task: Task) -> Result:
    """Hash a stored image of a killed download; the shard step replaces it if it is damaged."""
    try:
        return Result(task.image_id, task.place, task.stored, bytes.fromhex(digest(task.target)))
    except (DamagedError, MissingError):
        return Result(task.image_id, task.place, task.stored)


def _fault(origin: str, data: bytes | memoryview, is_named: bool) -> str:
    """Return why bytes are not stored as an image; "" if they are."""
    try:
        if not is_named:
            images.check(bytes(data))
        elif storage.scheme(origin) in storage.WEB:
            images.measure(bytes(data))
    except images.UnreadableImage as error:
        return f"{origin} gave {len(data)} bytes: {error}"
    return "" if data else "the file is empty"


def read_again(source_text: str, origin: str, hosts: tuple[str, ...]) -> bytes:
    """Return an image of a source that is lost or damaged now; `hosts` are those of data.allow_hosts.

    Raises:
        StorageError: it cannot be read, or is no image.
    """
    policy = UrlPolicy(tuple(sources.places(source_text)), hosts)
    if policy.is_named(origin):
        return sources.parse(source_text).read(origin)
    data = storage.read_within(origin, policy)
    fault = _fault(origin, data, is_named=False)
    if fault:
        raise StorageError(fault, fix="check what this address serves")
    return data


class _Tally:
    """Collects the results in 44 bytes per image: there may be millions."""

    def __init__(self, planned: RawManifest, max_bad_fraction: float, workers: int) -> None:
        self._planned, self._max_bad_fraction = planned, max_bad_fraction
        self._listed_bad = Problems.of(planned.problems).total(reasons.BAD_IMAGES)
        self._allowed = max(reasons.EXAMPLES, max_bad_fraction * planned.listed_images)
        self._patience = _PATIENCE + 2 * workers
        self._in_a_row = 0
        self.sums = np.zeros(planned.listed_images, SUM)
        self.failures: dict[int, Failure] = {}
        self.lost = 0
        """Images that an earlier download fetched, and that are missing or of another size now."""
        self._failed: list[Task] = []
        self._fetched_bytes, self._began = 0, time.monotonic()

    def add(self, result: Result) -> None:
        """Count one result.

        Raises:
            DataError: more images are bad than may be.
            SourceDown: too many failed in a row.
        """
        failure = result.failure
        if failure is None:
            if result.fetched:
                self._in_a_row = 0
                self._fetched_bytes += result.size
            self.sums[result.image_id - 1] = (result.place, result.size, np.void(result.sha256))
            return
        self.failures[result.image_id] = failure
        if result.task:
            self._failed.append(result.task)
            self._in_a_row += 1
            if self._in_a_row >= self._patience:
                raise SourceDown(
                    f"{self._in_a_row} images in a row could not be fetched; the last: {failure.detail}",
                    fix="check the source and the network, and run again: fetched images are kept",
                )
        if len(self.failures) + self._listed_bad > self._allowed:
            problems = Problems.of(self._planned.problems)
            for failed in self.failures.values():
                problems.add(failed.reason, failed.message)
            problems.check(
                self._planned.source, images=self._planned.listed_images, boxes=0,
                max_bad_fraction=self._max_bad_fraction,
            )  # fmt: skip

    def take_failed(self) -> list[Task]:
        """Remove and return the tasks to retry; from now on all may fail in a row."""
        tasks, self._failed = self._failed, []
        self._patience = len(tasks) + self._in_a_row + 1
        for task in tasks:
            del self.failures[task.image_id]
        return tasks

    def note(self) -> str:
        """Return the progress: `12.3 MB/s, 4 missing, 1 failed`."""
        parts = [f"{self._fetched_bytes / 1e6 / max(time.monotonic() - self._began, 0.1):.1f} MB/s"]
        failed = len(self._failed)
        missing = len(self.failures) - failed
        parts += [f"{count} {name}" for count, name in ((missing, "missing"), (failed, "failed")) if count]
        return ", ".join(parts)


class _StoredImages:
    """The stored images, in 12 bytes each: there may be millions."""

    def __init__(self, images_uri: str, folders: list[str], *, at_once: bool) -> None:
        uris = [images_uri] if at_once else [storage.join(images_uri, folder) for folder in folders]
        listings = list(worker_pool.run(_list, uris, _LISTERS, processes=False))
        digests = np.concatenate([digest for digest, _ in listings])
        order = np.argsort(digests, kind="stable")
        self._digests, self._sizes = digests[order], np.concatenate([size for _, size in listings])[order]

    def size(self, place: int) -> int:
        """Return the bytes of the image at a place; 0 if there is none, or a power cut left it empty."""
        at = np.searchsorted(self._digests, np.uint64(place))
        return int(self._sizes[at]) if at < len(self._digests) and self._digests[at] == place else 0

    def count_differing(self, expected: np.ndarray) -> int:
        """Count the rows of SUM whose image is not stored with as many bytes."""
        if not len(self._digests):
            return len(expected)
        at = np.minimum(np.searchsorted(self._digests, expected["place"]), len(self._digests) - 1)
        same = (self._digests[at] == expected["place"]) & (self._sizes[at] == expected["bytes"])
        return int((~same).sum())


def _list(uri: str) -> tuple[np.ndarray, np.ndarray]:
    storage.remove_stale(uri)  # of downloads that were killed
    states = storage.list_states(uri, recursive=True)
    named = [(image_keys.place_digest(name), state.size) for name, state in states.items()]
    ours = [(int(digest, 16), size) for digest, size in named if _DIGEST.fullmatch(digest)]
    return np.array([digest for digest, _ in ours], np.uint64), np.array([size for _, size in ours], np.int32)


def count_absent(manifest: RawManifest) -> int:
    """Count the missing images of a manifest, and those of another size; 0 if it is from before 0.2.

    Raises:
        DamagedError: the manifest's arrays are damaged.
        StorageError: the folder cannot be listed.
    """
    sums = raw_folder.read_sums(manifest)
    if sums is None:
        return 0
    stored = _StoredImages(manifest.images, _FOLDERS, at_once=len(sums) <= _FEW)
    return stored.count_differing(sums[sums["bytes"] > 0])
