"""Reads the annotation files of single images, many side by side where they are on a server."""

from collections.abc import Iterable, Iterator
from itertools import islice
from operator import itemgetter

from trainer import storage
from trainer.base import worker_pool
from trainer.base.errors import MissingError

_READERS = 16
_BATCH = 1000
"""Files that are in memory at once."""


def read_all(uris: Iterable[str]) -> Iterator[bytes | MissingError]:
    """Yield the content of files in their order; the error for one that is missing.

    Raises:
        StorageError: one cannot be reached.
    """
    rest = iter(enumerate(uris))
    while batch := list(islice(rest, _BATCH)):
        workers = 1 if storage.is_local(batch[0][1]) else _READERS
        texts = sorted(worker_pool.run(_read, batch, workers, processes=False), key=itemgetter(0))
        yield from (text for _, text in texts)


def _read(task: tuple[int, str]) -> tuple[int, bytes | MissingError]:
    try:
        return task[0], storage.read_bytes(task[1])
    except MissingError as error:
        return task[0], error
