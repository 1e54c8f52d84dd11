"""Fetches the images of one partition over many connections, and reports the result of each.

The first two hex digits of an image's path decide on its partition, so that a partition has folders
of its own and learns by listing them which images are stored already.
"""

import logging
import re
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from trainer import storage
from trainer.base import worker_pool
from trainer.base.errors import StorageError
from trainer.base.log import progress
from trainer.config.schema import DataConfig
from trainer.data import fetch_reports, image_copying, image_keys, raw_folder, sources
from trainer.data import problem_counts as reasons
from trainer.data.fetch_reports import Failure
from trainer.data.image_copying import Result, Task
from trainer.data.problem_counts import Problems
from trainer.data.raw_folder import SUM
from trainer.data.raw_table import Table
from trainer.data.sources.source import Source
from trainer.storage.reach import Reach

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
    planned: dict[str, Any],
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
    missing = fetch_reports.known_failures(planned["uri"], partition, partitions, again=again)
    source = sources.parse(planned["source"])
    reach = Reach(tuple(sources.places(planned["source"])), tuple(config.allow_hosts))
    mine = _FOLDERS[partition::partitions]
    total = sum(split["images"] for split in planned["splits"].values())
    stored = _StoredImages(planned["images"], mine, at_once=partitions == 1 and total <= _FEW)
    expected = round(total * len(mine) / len(_FOLDERS))
    workers = (config.processes or worker_pool.available_cores()) if source.cpu_bound else config.threads
    known = fetch_reports.known_sums(planned["uri"], total)
    tally = _Tally(planned, config.max_bad_fraction, workers)
    unhashed = _Unhashed(tally)
    with progress("download", expected, "images") as bar:
        tasks = _tasks(planned, source, set(mine), stored, missing)
        to_fetch = _to_fetch(tasks, known, tally, unhashed, bar.skip)
        for result in image_copying.run(source, to_fetch, min(workers, total), reach):
            tally.add(result)
            bar.update(note=tally.note())
        for result in image_copying.run(source, tally.again(), workers, reach):
            tally.add(result)
            bar.update(0, note=tally.note())
        unhashed.count()
        bar.total = bar.done  # A partition's share was an estimate.
    if tally.lost:
        logger.warning(
            "mending %s: %d stored images were missing or cut off, and were fetched again",
            planned["images"], tally.lost,
        )  # fmt: skip
    tally.write(fetch_reports.place(planned["uri"], partition, partitions))


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
        for result in worker_pool.run(image_copying.hashed, self._tasks, _LISTERS, processes=False):
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

    def __init__(self, planned: dict[str, Any], max_bad_fraction: float, workers: int) -> None:
        self._source, self._max_bad_fraction = planned["source"], max_bad_fraction
        self._total = sum(split["images"] for split in planned["splits"].values())
        self._allowed = max(reasons.EXAMPLES, max_bad_fraction * self._total)
        self._problems = Problems()
        self._problems.merge(planned["problems"])
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
        fetch_reports.write(uri, self._ids, self._sizes, self._failures, self._sums)


def _tasks(
    planned: dict[str, Any],
    source: Source,
    folders: set[str],
    stored: "_StoredImages",
    missing: dict[int, fetch_reports.Fault],
) -> Iterator[Task]:
    """Yield the images of some folders, block by block, with the failures that earlier reports tell.

    An image that could not be fetched may be stored by now.
    """
    for split in planned["splits"]:
        table = Table(
            storage.join(planned["uri"], f"{split}.parquet"), planned.get("tables", {}).get(split, "")
        )
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
                target = storage.join(planned["images"], place)
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


def absent(manifest: dict[str, Any], partition: int, partitions: int) -> int:
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
    stored = _StoredImages(manifest["images"], mine, at_once=partitions == 1 and len(sums) <= _FEW)
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
