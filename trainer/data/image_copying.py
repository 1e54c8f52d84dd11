"""Copies images from their source to the data root, many at the same time, in any order.

Of what comes from the web only images are kept, and of a server that the user did not name only those that
can be decoded: an address in annotations, or a redirect, may lead to anything.
"""

import hashlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from trainer import storage
from trainer.base import worker_pool
from trainer.base.errors import DamagedError, MissingError, StorageError
from trainer.data import images, sources
from trainer.data import problem_counts as reasons
from trainer.data.fetch_reports import Failure, Fault
from trainer.data.shard_folder import digest
from trainer.data.sources.source import Source
from trainer.storage.reach import Reach, Refused

_QUICK = 0.0004
"""Seconds. Files whose writing takes longer, on disks and networks, are written by other threads."""

_BUDGET = 256 * 1024 * 1024
"""Bytes of images in flight, estimated by their mean size: large images are fewer at a time."""

_PROBE = 16
"""One of so many files is written here all the same, to measure whether writing has become faster."""


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


Digest = bytes
"""32 of them."""


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
    """Of the bytes; empty where it is not known."""


def run(source: Source, tasks: Iterable[Task], workers: int, reach: Reach) -> Iterator[Result]:
    """Yield the outcome of each task, as it is done.

    Args:
        source: which the tasks are of.
        tasks: taken as workers become free.
        workers: images at the same time; processes where the source computes them.
        reach: where the origins of the tasks may lead, and redirects from there.
    """
    if source.origins_are_uris:
        return _read_in_one_thread(tasks, workers, reach)
    return worker_pool.run(partial(_copy, reach), tasks, workers, processes=source.cpu_bound)


def _read_in_one_thread(tasks: Iterable[Task], connections: int, reach: Reach) -> Iterator[Result]:
    """Read in one thread: switching between dozens of threads would cost more than the reading."""
    writer = _Writer()
    with storage.many(connections, reach) as many:

        def outcomes_until(most: float) -> Iterator[Result]:
            """Yield outcomes until fewer than `most` tasks are in flight."""
            while many.busy and many.busy >= min(most, _BUDGET / max(1.0, writer.mean_size)):
                for task, outcome in many.wait():
                    failed = isinstance(outcome, StorageError)
                    if failed and task is None:  # what cannot be written concerns all
                        raise outcome
                    if failed:
                        yield _unread(task, outcome)
                    elif task is None:
                        yield outcome
                    elif not reach.is_named(task.origin):
                        many.call(None, _write_image, task, outcome)
                    elif writer.is_quick(task, outcome):
                        yield writer.write(task, outcome)
                    else:
                        many.call(None, _write, task, outcome)

        for task in tasks:
            if task.fault:
                yield _failed(task, *task.fault)
            else:
                many.read(task, task.origin)
                yield from outcomes_until(connections)
        yield from outcomes_until(0)


class _Writer:
    """Writes images to a local folder in this thread, as long as that is quick."""

    def __init__(self) -> None:
        self.mean_size = 1.0
        """Bytes of an image."""
        self._mean = 0.0
        self._seen = 0

    def is_quick(self, task: Task, data: bytes) -> bool:
        """Tell whether writing an image here costs less than handing it to another thread."""
        self._seen += 1
        self.mean_size += (len(data) - self.mean_size) / min(self._seen, 64)
        return storage.is_local(task.target) and (self._mean < _QUICK or self._seen % _PROBE == 0)

    def write(self, task: Task, data: bytes) -> Result:
        """Write an image."""
        began = time.monotonic()
        result = _write(task, data)
        self._mean += (time.monotonic() - began - self._mean) / 8
        return result


def read_again(source_text: str, origin: str, hosts: tuple[str, ...]) -> bytes:
    """Return an image that was brought before and is lost or damaged now, from where it came.

    Args:
        source_text: the source.
        origin: of the image.
        hosts: that addresses in annotations may lead to, see `trainer.config.schema.DataConfig`.

    Raises:
        StorageError: it cannot be had, or is no image.
    """
    reach = Reach(tuple(sources.places(source_text)), hosts)
    if reach.is_named(origin):
        return sources.parse(source_text).read(origin)
    data = storage.read_within(origin, reach)
    try:
        images.check(data)
    except images.UnreadableImage as error:
        raise StorageError(f"{origin} gave {len(data)} bytes: {error}", fix="look at what is there") from None
    return data


def _copy(reach: Reach, task: Task) -> Result:
    """Copy one image, unless its fault is known."""
    if task.fault:
        return _failed(task, *task.fault)
    known = reach.is_named(task.origin)
    try:
        data = task.source.read(task.origin) if known else storage.read_within(task.origin, reach)
    except StorageError as error:
        return _unread(task, error)
    return _write(task, data) if known else _write_image(task, data)


def _write_image(task: Task, data: bytes) -> Result:
    """Write what came from a server that the user did not name, if it is an image."""
    try:
        images.check(data)
    except images.UnreadableImage as error:
        return _failed(task, reasons.IMAGE_UNREADABLE, f"{task.origin} gave {len(data)} bytes: {error}")
    return _write(task, data)


def _write(task: Task, data: bytes) -> Result:
    """Write the bytes of an image, if there are any."""
    if not data:
        return _failed(task, reasons.IMAGE_UNREADABLE, "the file is empty")
    if storage.scheme(task.origin) in storage.WEB and not images.begins_as_image(data):
        return _failed(
            task, reasons.IMAGE_UNREADABLE, f"{task.origin} gave what does not begin as an image does"
        )
    # Flushing each image to the disk would take longer than fetching it.
    storage.write_bytes(task.target, data, sync=False)
    return Result(task.image_id, len(data), fetched=True, sha256=hashlib.sha256(data).digest())


def hashed(task: Task) -> Result:
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
