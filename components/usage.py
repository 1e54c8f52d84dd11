"""What the steps of a run use: metered in each step's process, and stored below the data root.

    <data_root>/usage/<run id>/<step>-<began>-<rank>-<id>.json

Each attempt of a step, and each node of a training, has a record. The clean-up has none: it uses no store.
"""

import logging
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from components import environment
from trainer import storage
from trainer.base.errors import DataError, StorageError
from trainer.launching.usage.meter import Meter, begin
from trainer.launching.usage.record import FORM, Record

logger = logging.getLogger(__name__)

FOLDER = "usage"

_READERS = 16

_meters: list[Meter] = []
"""The meter of the step that this process runs."""


def place(data_root: str, run_id: str) -> str:
    """Return the URI of the folder of a run's records."""
    return storage.join(data_root, FOLDER, run_id)


@contextmanager
def metered(step: str) -> Iterator[None]:
    """Meter a step's work while the block runs, if the step belongs to a run; `keep` says where."""
    meter = begin(step) if environment.run_id() else None
    if meter is None:
        yield
        return
    _meters.append(meter)
    try:
        yield
    finally:
        _meters.remove(meter)
        meter.end()


def keep(data_root: str, *, processes: int = 0, nodes: int = 1) -> None:
    """Store what this step uses below a data root from now on; nothing if it is not metered.

    Args:
        data_root: its URI.
        processes: that compute on a GPU each, if there are GPUs.
        nodes: 0 if the step only waits for others, which have records of their own; else 1.
    """
    run_id = environment.run_id()
    for meter in _meters:
        meter.keep(place(data_root, run_id), run_id, processes=processes, nodes=nodes)


def of_run(data_root: str, *run_ids_: str) -> list[Record]:
    """Return the records of a run, known by one or more ids; of this process's step what it has used so far.

    Raises:
        StorageError: the data root cannot be read.
    """
    folders = dict.fromkeys(place(data_root, each) for each in run_ids_ if each)
    uris = [storage.join(folder, name) for folder in folders for name in _names(folder)]
    # Its thread may not have written yet.
    own = [meter.uri for meter in _meters if storage.parent(meter.uri) in folders]
    return _read(list(dict.fromkeys([*uris, *own])))


def of_runs(data_root: str, run_ids_: Collection[str]) -> dict[str, list[Record]]:
    """Return the records of several runs, by the run's id.

    Raises:
        StorageError: the data root cannot be read.
    """
    root = storage.join(data_root, FOLDER)
    results: dict[str, list[Record]] = {each: [] for each in run_ids_}
    names = [name for name in _names(root) if name.partition("/")[0] in results]
    for record in _read([storage.join(root, name) for name in names]):
        results.setdefault(record.run, []).append(record)
    return results


def _names(folder: str) -> list[str]:
    return [name for name in storage.list_files(folder) if name.endswith(".json")]


def _read(uris: list[str]) -> list[Record]:
    own = {meter.uri: meter.record() for meter in _meters}

    def read(uri: str) -> Record | None:
        if uri in own:
            return own[uri]
        try:
            return Record.of(storage.read_json(uri, FORM))
        except (DataError, StorageError) as error:
            logger.warning("not counted: %s", error.message)
            return None

    with ThreadPoolExecutor(_READERS) as readers:
        return [record for record in readers.map(read, uris) if record is not None]
