"""What the steps of a run use: a record for each try of a step and each node of a training."""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from components import environment
from trainer import storage
from trainer.base.errors import DataError, StorageError
from trainer.launching.usage import FORM, Meter, Record, begin

logger = logging.getLogger(__name__)

_READERS = 16

_meters: list[Meter] = []
"""The meter of the step that this process runs."""


def place(data_root: str, run_id: str) -> str:
    """Return the URI of the folder of a run's records, <step>-<began>-<rank>-<id>.json."""
    return storage.join(data_root, "usage", run_id)


@contextmanager
def metered(step: str) -> Iterator[None]:
    """Meter a step's work while the block runs, if the step belongs to a run; `keep` sets the destination."""
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

    `processes` compute on a GPU each, if there are GPUs. `nodes` is 0 if the step only waits for others,
    which have their own records.
    """
    run_id = environment.run_id()
    for meter in _meters:
        meter.keep(place(data_root, run_id), run_id, processes=processes, nodes=nodes)


def of_run(data_root: str, *run_ids: str) -> list[Record]:
    """Return the records of a run, identified by one or more IDs; for this process's step, its use so far."""
    folders = dict.fromkeys(place(data_root, each) for each in run_ids if each)
    own = {meter.uri: meter.record() for meter in _meters if storage.parent(meter.uri) in folders}
    uris = {storage.join(folder, name) for folder in folders for name in storage.list_files(folder)}

    def read(uri: str) -> Record | None:
        try:
            return Record.of(storage.read_json(uri, FORM))
        except (DataError, StorageError) as error:
            logger.warning("not counted: %s", error.message)
            return None

    others = [uri for uri in uris if uri.endswith(".json") and uri not in own]
    with ThreadPoolExecutor(_READERS) as readers:
        return [*own.values(), *(record for record in readers.map(read, others) if record)]
