"""From raw images and annotations to shards, by several processes on one or many machines.

<data_root>/shards/<fingerprint>/
  <split>-00000.tar           standard tar: KEY.jpg, KEY.json
  <split>-00000.json          sidecar, written after its tar: the shard is whole
  annotations/<split>.json    cleaned internal form of val and test: the ground truth of evaluation
  <split>.samples.npy         where each sample is
  index.json                  written last

A shard holds images of one block of the raw table, so that it is planned, written and joined
without more than a block in memory, and does not depend on how the work is divided.
"""

import logging
from collections.abc import Iterator

import numpy as np

from trainer import storage
from trainer.base import worker_pool
from trainer.base.errors import DamagedError, DataError, FormError
from trainer.base.log import progress
from trainer.config.schema import DataConfig
from trainer.data import problem_counts as reasons
from trainer.data import raw_folder, seen
from trainer.data.download import fingerprint
from trainer.data.image_keys import hash_fraction
from trainer.data.problem_counts import Problems
from trainer.data.raw_folder import RawManifest
from trainer.data.shard_folder import (
    INDEX,
    NOTE,
    VERSION,
    ShardIndex,
    faults,
    noted,
    read_index,
    read_sidecar,
)
from trainer.data.shard_index import write_index
from trainer.data.shard_writer import ShardTask, write_shard

logger = logging.getLogger(__name__)

SETTINGS = ("shard_bytes", "min_side", "max_side", "jpeg_quality", "min_box_side", "decode_check")
"""Keys of the section `data` that decide on shards, in the order of their fingerprint."""

_HASHED = 100_000
"""Images of a split that are compared with those of other splits; of more a sample is taken."""

_READERS = 16
"""Connections of each process: one processor cannot use more."""


def shard(raw: RawManifest, data_root: str, config: DataConfig) -> ShardIndex:
    """Write the shards of what `download` brought, or find them there.

    A call that was killed is continued: shards that are whole are not written again. Files that are
    missing, cut off or noted as damaged are. The result does not depend on the number of processes.

    Args:
        raw: the manifest that `download` returned.
        data_root: URI of a folder, local or in an object store.
        config: size of shards and images, how much may be bad, how many processes.

    Returns:
        The index, which is in `<uri>/index.json` too.

    Raises:
        DataError: too many images or boxes are bad, or a worker was killed.
        StorageError: the data root cannot be read or written.
    """
    shard_partition(raw, data_root, config)
    return join(raw, data_root, config)


def place(raw: RawManifest, data_root: str, config: DataConfig) -> str:
    """Return the URI of the folder of the shards of raw images, which need not be there.

    Raises:
        DataError: the raw images are those of another version of this program.
    """
    if raw.version != raw_folder.VERSION or not raw.content:
        raise DataError(
            f"{raw.uri} was written by another version of this program",
            fix="run the download step again",
        )
    name = fingerprint(
        "shards", VERSION, raw.fingerprint, raw.content, *(getattr(config, key) for key in SETTINGS)
    )
    return storage.join(storage.absolute(data_root), "shards", name)


def is_complete(raw: RawManifest, data_root: str, config: DataConfig) -> bool:
    """Return whether the shards of raw images are all there, so that nothing has to be written.

    Raises:
        DataError: the raw images or the index are of another version of this program.
        StorageError: the data root cannot be read.
    """
    return _finished(place(raw, data_root, config)) is not None


def shard_partition(
    raw: RawManifest, data_root: str, config: DataConfig, partition: int = 0, partitions: int = 1
) -> None:
    """Write the shards of one of several partitions; those that are whole are left as they are.

    Args:
        raw: see `shard`.
        data_root: see `shard`.
        config: see `shard`.
        partition: which, from 0.
        partitions: how many.

    Raises:
        DataError: a worker was killed, or the raw tables are damaged.
        StorageError: the data root cannot be read or written.
    """
    uri = place(raw, data_root, config)
    if _finished(uri):
        if partitions > 1:  # Of a single one `join` tells.
            logger.info("shards of %s are there already: %s", raw.source, uri)
        return
    storage.remove_stale(uri)
    states = storage.list_states(uri)
    tasks = [task for number, task in enumerate(_plan(raw, uri, config)) if number % partitions == partition]
    missing = [task for task in tasks if not _is_whole(uri, task.name, states)]
    if len(missing) < len(tasks):
        logger.info("%d of %d shards are there already", len(tasks) - len(missing), len(tasks))
    if INDEX in states and missing:
        logger.warning("mending %s: writing %s anew", uri, ", ".join(task.name for task in missing[:10]))
    workers = min(config.processes or worker_pool.available_cores(), max(1, len(missing)))
    total = sum(len(task.rows) for task in tasks)
    bad = 0
    with progress("shard", total, "images", done=total - sum(len(task.rows) for task in missing)) as bar:
        for images, quarantined in worker_pool.run(_write_one, missing, workers, processes=True):
            bad += quarantined
            bar.update(images, note=f"{bad} unreadable" if bad else "")


def join(raw: RawManifest, data_root: str, config: DataConfig) -> ShardIndex:
    """Write the index over the shards of all partitions, or find it there; return it.

    Raises:
        DataError: too many images or boxes are bad, or a shard is missing.
        StorageError: the data root cannot be read or written.
    """
    uri = place(raw, data_root, config)
    index = _finished(uri)
    if index:
        logger.info("shards of %s are there already: %s", raw.source, uri)
        _check(Problems(dict(index.problems), {}), raw, config)
        seen.write(raw, index, data_root)
        return index
    problems = Problems.of(raw.problems)
    states = storage.list_states(uri)
    names: dict[str, list[str]] = {split: [] for split in raw.splits}
    for task in _plan(raw, uri, config):
        names[task.split].append(task.name)
        if not {f"{task.name}.json", f"{task.name}.tar"} <= states.keys():
            raise DataError(
                f"the shard {task.name} is missing in {uri}", fix="run the shard step of every partition"
            )
    settings = {key: getattr(config, key) for key in SETTINGS}
    index = write_index(raw, uri, settings, names, problems, lambda: _check(problems, raw, config))
    seen.write(raw, index, data_root)
    for name in noted(states):
        storage.delete(storage.join(uri, name + NOTE))
    summary = f" ({problems.summary()})" if problems.counts else ""
    counts = ", ".join(f"{samples} {split}" for split, samples in index.samples.items())
    logger.info("shards of %s: %s in %s%s", raw.source, counts, uri, summary)
    return index


def _plan(raw: RawManifest, uri: str, config: DataConfig) -> Iterator[ShardTask]:
    """Yield all shards: the images of each block, cut by their raw sizes.

    Images are ordered by a hash of their keys, so every shard is a random sample of its block.
    """
    sizes, sums = raw_folder.read_sizes(raw.uri, raw.content), raw_folder.read_sums(raw)
    for split in raw.splits:
        table = raw.table(split)
        number = 0
        hashed = min(1.0, _HASHED / max(1, len(table)))
        for block in range(table.blocks):
            columns = table.columns(block, ["image_id", "key"])
            ids = np.array(columns["image_id"])
            block_sizes = sizes[ids - 1]
            for rows in _divide_block(columns["key"], block_sizes, config.shard_bytes):
                yield ShardTask(
                    table_uri=table.uri, images_uri=raw.images, shards_uri=uri, split=split,
                    name=f"{split}-{number:05}", block=block, rows=rows, sizes=block_sizes[rows].tolist(),
                    table_sha256=raw.tables.get(split, ""),
                    hashes=[raw_folder.known_hash(sums, one) for one in ids[rows]],
                    source=raw.source, hosts=tuple(config.allow_hosts),
                    labels=len(raw.categories), min_side=config.min_side, max_side=config.max_side,
                    jpeg_quality=config.jpeg_quality, min_box_side=config.min_box_side,
                    decode_check=config.decode_check, hashed=hashed, readers=min(config.threads, _READERS),
                )  # fmt: skip
                number += 1


def _divide_block(keys: list[str], sizes: np.ndarray, shard_bytes: int) -> list[list[int]]:
    """Divide a block into shards: the positions of the images of each."""
    shards: list[list[int]] = []
    filled = shard_bytes
    for row in sorted(np.flatnonzero(sizes).tolist(), key=lambda row: hash_fraction(keys[row], "shard")):
        if filled >= shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(row)
        filled += int(sizes[row])
    return shards


def _write_one(task: ShardTask) -> tuple[int, int]:
    """Return the number of images, and how many of them are unreadable."""
    return len(task.rows), len(write_shard(task).quarantined)


def _finished(uri: str) -> ShardIndex | None:
    """Return the index of shards that are there and whole; None where something has to be written.

    Raises:
        DataError: the index is of a newer version.
        StorageError: the folder cannot be read.
    """
    if not storage.exists(storage.join(uri, INDEX)):
        return None
    try:
        index = read_index(uri)
    except (DamagedError, FormError) as error:
        logger.warning("%s; mending it", error.message)
        return None
    wrong = faults(index)
    if wrong:
        more = f" and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        logger.warning("%s: missing or damaged: %s%s; mending it", uri, ", ".join(wrong[:10]), more)
    return None if wrong else index


def _is_whole(uri: str, name: str, states: dict[str, storage.FileState]) -> bool:
    """Whether a shard and its sidecar exist, sound as far as is known, and of the size it says."""
    files = {f"{name}.tar", f"{name}.json"}
    if not files <= states.keys() or {file + NOTE for file in files} & states.keys():
        return False
    try:
        return read_sidecar(uri, name).bytes == states[f"{name}.tar"].size
    except (DamagedError, FormError):
        return False


def _check(problems: Problems, raw: RawManifest, config: DataConfig) -> None:
    """Raise DataError if more is bad than the configuration lets pass."""
    before = Problems.of(raw.problems)
    problems.check(
        f"shards of {raw.source}",
        images=raw.listed_images + before.total(reasons.BAD_IMAGES),
        boxes=raw.listed_boxes + before.total(reasons.UNLISTED_BOXES),
        max_bad_fraction=config.max_bad_fraction,
    )
