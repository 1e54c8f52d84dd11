"""One partition's images: fetched over many connections, or found; and a report of both.

An image belongs to the partition of its place's first two hex digits, so that a partition has
folders of its own and knows by listing them what is there.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trainer import storage
from trainer.config import DataConfig
from trainer.data import keys, pool, sources
from trainer.data import problems as reasons
from trainer.data.problems import Problems
from trainer.data.sources.base import Source
from trainer.data.table import Table
from trainer.errors import StorageError
from trainer.log import progress

_FOLDERS = [f"{number:02x}" for number in range(256)]
_LISTERS = 16
_COLUMNS = ["image_id", "key", "file_name", "origin", "version", "fault_reason", "fault_detail"]
_REPORT = pa.schema(
    [("image_id", pa.int64()), ("bytes", pa.int32()), *((name, pa.string()) for name in
     ("split", "file_name", "origin", "reason", "detail"))]
)  # fmt: skip


class Failure(NamedTuple):
    """An image that cannot be had."""

    split: str
    file_name: str
    origin: str
    reason: str
    detail: str


@dataclass(frozen=True)
class _Task:
    """One image of the partition."""

    source: Source
    image_id: int
    split: str
    file_name: str
    origin: str
    target: str
    fault: tuple[str, str] | None
    size: int
    """Bytes that are there already; 0 where it has to be fetched."""


class _Result(NamedTuple):
    image_id: int
    bytes: int
    failure: Failure | None
    fetched: bool


def run(planned: dict[str, Any], config: DataConfig, partition: int, partitions: int, report: str) -> None:
    """Fetch a partition's images and write its report.

    Raises:
        DataError: far more cannot be had than the configuration lets pass.
        StorageError: the data root cannot be written.
    """
    source = sources.parse(planned["source"])
    mine = _FOLDERS[partition::partitions]
    there = _There(planned["images"], mine)
    total = sum(split["images"] for split in planned["splits"].values())
    allowed = max(reasons.EXAMPLES, config.max_bad_fraction * total)
    problems = Problems()
    problems.merge(planned["problems"])
    workers = (config.processes or pool.available_cores()) if source.cpu_bound else config.threads
    workers = min(workers, max(1, total - there.count))
    ids: list[int] = []
    sizes: list[int] = []
    failures: dict[int, Failure] = {}
    brought, began = 0, time.monotonic()
    with progress("download", round(total * len(mine) / len(_FOLDERS)), "images") as bar:
        for result in pool.run(
            _fetch, _tasks(planned, source, set(mine), there), workers, processes=source.cpu_bound
        ):
            ids.append(result.image_id)
            sizes.append(result.bytes)
            brought += result.bytes if result.fetched else 0
            failure = result.failure
            if failure:
                failures[result.image_id] = failure
                problems.add(failure.reason, f"{failure.split}/{failure.file_name}: {failure.detail}")
                if problems.total(reasons.BAD_IMAGES) > allowed:
                    problems.check(
                        planned["source"], images=total, boxes=0, max_bad_fraction=config.max_bad_fraction
                    )
            speed = f"{brought / 1e6 / max(time.monotonic() - began, 0.1):.1f} MB/s"
            bar.update(note=f"{speed}, {len(failures)} missing" if failures else speed)
    _write_report(report, ids, sizes, failures)


def _tasks(planned: dict[str, Any], source: Source, folders: set[str], there: "_There") -> Iterator[_Task]:
    """Yield the images of some folders, block by block."""
    for split in planned["splits"]:
        table = Table(storage.join(planned["uri"], f"{split}.parquet"))
        for block in range(table.blocks):
            columns = table.columns(block, _COLUMNS)
            for image_id, key, name, origin, version, reason, detail in zip(*columns.values(), strict=True):
                place = keys.place(key, name, origin, version)
                if place[:2] in folders:
                    yield _Task(
                        source, image_id, split, name, origin, storage.join(planned["images"], place),
                        (reason, detail) if reason else None, there.size(place),
                    )  # fmt: skip


def _fetch(task: _Task) -> _Result:
    """Fetch one image, unless it is there or known to be of no use."""
    if task.size and not task.fault:
        return _Result(task.image_id, task.size, None, fetched=False)
    fault = task.fault
    if not fault:
        try:
            data = task.source.read(task.origin)
        except StorageError as error:
            fault = (reasons.IMAGE_MISSING, error.message)
        else:
            if not data:
                fault = (reasons.IMAGE_UNREADABLE, "the file is empty")
    if fault:
        failure = Failure(task.split, task.file_name, task.origin, *fault)
        return _Result(task.image_id, 0, failure, fetched=False)
    # Flushing each image to the disk would take longer than fetching it.
    storage.write_bytes(task.target, data, sync=False)
    return _Result(task.image_id, len(data), None, fetched=True)


class _There:
    """The images that are there: 12 bytes each, for there may be millions."""

    def __init__(self, images: str, folders: list[str]) -> None:
        uris = [storage.join(images, folder) for folder in folders]
        found = list(pool.run(_list, uris, _LISTERS, processes=False))
        digests = np.concatenate([digest for digest, _ in found])
        order = np.argsort(digests, kind="stable")
        self._digests, self._sizes = digests[order], np.concatenate([size for _, size in found])[order]
        self.count = len(order)

    def size(self, place: str) -> int:
        """Return the bytes of the image at a place; 0 where there is none, or one a power cut emptied."""
        digest = np.uint64(int(keys.place_digest(place), 16))
        at = np.searchsorted(self._digests, digest)
        return int(self._sizes[at]) if at < self.count and self._digests[at] == digest else 0


def _list(uri: str) -> tuple[np.ndarray, np.ndarray]:
    states = storage.list_states(uri)
    digests = [int(keys.place_digest(name), 16) for name in states]
    sizes = [state.size for state in states.values()]
    return np.array(digests, np.uint64), np.array(sizes, np.int32)


def _write_report(uri: str, ids: list[int], sizes: list[int], failures: dict[int, Failure]) -> None:
    nothing = Failure("", "", "", "", "")
    found = [failures.get(image_id, nothing) for image_id in ids]
    columns: list[Any] = [ids, sizes, *([item[index] for item in found] for index in range(5))]
    with storage.new_file(uri) as path:
        pq.write_table(pa.Table.from_arrays([*map(pa.array, columns)], schema=_REPORT), path)


def read_report(uri: str) -> tuple[np.ndarray, np.ndarray, list[Failure]]:
    """Read what a partition brought.

    Returns:
        Ids of its images, their bytes (0 where it cannot be had), and its failures.

    Raises:
        StorageError: it is missing: that partition has not been fetched.
    """
    table = pq.read_table(storage.local_copy(uri))
    failed = table.filter(pc.equal(table["bytes"], 0)).select(list(Failure._fields))
    failures = [Failure(**row) for row in failed.to_pylist()]
    return table["image_id"].to_numpy(), table["bytes"].to_numpy(), failures
