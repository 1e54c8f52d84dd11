"""From raw images and annotations to shards, by several processes on one or many machines.

<data_root>/shards/<fingerprint>/
  <split>-00000.tar           standard tar: KEY.jpg, KEY.json
  <split>-00000.json          sidecar, written after its tar: the shard is complete
  annotations/<split>.json    ground truth of val and test
  <split>.samples.npy         where each sample is
  index.json                  written last

A shard holds images of one block of the raw table. So it is planned, written and indexed with no more than a
block in memory, and does not depend on how the work is divided: `shard` does everything in one process and
its workers, several machines call `shard_partition` for each part, and then `join`.
"""

import base64
import hashlib
import io
import logging
from collections.abc import Iterator

import numpy as np

from trainer import storage
from trainer.base import worker_pool
from trainer.base.errors import DataError
from trainer.base.log import progress
from trainer.config.schema import DataConfig
from trainer.data import plausibility, raw_folder, shard_folder, statistics, training_record
from trainer.data import problem_counts as reasons
from trainer.data.download import fingerprint
from trainer.data.ground_truth import Classes, GroundTruthWriter
from trainer.data.image_keys import hash_fraction
from trainer.data.problem_counts import Problems
from trainer.data.raw_folder import RawManifest
from trainer.data.shard_folder import (
    INDEX,
    NOTE,
    SAMPLE,
    VERSION,
    DuplicatePair,
    Quarantined,
    Shard,
    ShardIndex,
    ShardSplit,
    Sidecar,
    StoredFile,
)
from trainer.data.shard_writer import ShardTask, write_shard

logger = logging.getLogger(__name__)

SETTINGS = ("shard_bytes", "min_side", "max_side", "jpeg_quality", "min_box_side", "decode_check")
"""Keys of the section `data` that decide on shards, in the order of their fingerprint."""

_HASHED = 100_000
"""Most images of a split that are compared with those of other splits."""
_QUARANTINED_SHOWN = 100


def shard(raw: RawManifest, data_root: str, config: DataConfig) -> ShardIndex:
    """Write the shards of raw images, and return their index; complete shards are kept.

    The result does not depend on the number of processes.

    Raises:
        DataError: too many images or boxes are bad, or a worker was killed.
        StorageError: the data root cannot be read or written.
    """
    index = finished(raw, data_root, config)
    if index is None:
        shard_partition(raw, data_root, config)
        index = join(raw, data_root, config)
    return index


def place(raw: RawManifest, data_root: str, config: DataConfig) -> str:
    """Return the URI of the folder of the shards of raw images, which need not exist.

    Raises:
        DataError: the raw images are those of another version of this program.
    """
    if raw.version != raw_folder.VERSION or not raw.content:
        raise DataError(
            f"{raw.uri} was written by another version of this program",
            fix="run the download step again",
        )
    name = fingerprint("shards", VERSION, raw.fingerprint, raw.content, *_settings(config).values())
    return storage.join(storage.absolute(data_root), "shards", name)


def _settings(config: DataConfig) -> dict[str, int | float | bool]:
    return {key: getattr(config, key) for key in SETTINGS}


def finished(raw: RawManifest, data_root: str, config: DataConfig) -> ShardIndex | None:
    """Return the index of shards if they are complete, and write their record; else None.

    Raises:
        DataError: more is bad than the configuration allows, or the raw images or the index are of another
            version of this program.
        StorageError: the data root cannot be read.
    """
    index = shard_folder.find_index(place(raw, data_root, config))
    if index:
        logger.info("shards of %s are there already: %s", raw.source, index.uri)
        raw.check(f"shards of {raw.source}", Problems(dict(index.problems), {}), config.max_bad_fraction)
        training_record.write(raw, index, data_root)
    return index


def shard_partition(
    raw: RawManifest, data_root: str, config: DataConfig, partition: int = 0, partitions: int = 1
) -> None:
    """Write the shards of one of several partitions (from 0); complete ones are kept.

    Raises:
        DataError: a worker was killed, or the raw tables are damaged.
        StorageError: the data root cannot be read or written.
    """
    uri = place(raw, data_root, config)
    storage.remove_stale(uri)
    states = storage.list_states(uri)
    tasks = [task for number, task in enumerate(_plan(raw, uri, config)) if number % partitions == partition]
    missing = [task for task in tasks if not shard_folder.is_complete(uri, task.name, states)]
    if len(missing) < len(tasks):
        logger.info("%d of %d shards are there already", len(tasks) - len(missing), len(tasks))
    if INDEX in states and missing:
        logger.warning("%s: writing again %s", uri, ", ".join(task.name for task in missing[:10]))
    workers = min(config.processes or worker_pool.available_cores(), max(1, len(missing)))
    total, left = (sum(len(task.rows) for task in some) for some in (tasks, missing))
    bad = 0
    with progress("shard", total, "images", done=total - left) as bar:
        for images, quarantined in worker_pool.run(write_shard, missing, workers, processes=True):
            bad += quarantined
            bar.update(images, note=f"{bad} unreadable" if bad else "")


def _plan(raw: RawManifest, uri: str, config: DataConfig) -> Iterator[ShardTask]:
    """Yield all shards: each block in the order of a hash of the keys, cut by raw sizes."""
    sizes, sums = raw_folder.read_sizes(raw.uri, raw.content), raw_folder.read_sums(raw)
    for split in raw.splits:
        table = raw.table(split)
        number = 0
        for block in range(table.blocks):
            columns = table.columns(block, ["image_id", "key"])
            ids = np.array(columns["image_id"])
            block_sizes = sizes[ids - 1]
            for rows in _divide_block(columns["key"], block_sizes, config.shard_bytes):
                yield ShardTask(
                    source=raw.source, table_uri=table.uri, table_sha256=raw.tables.get(split, ""),
                    images_uri=raw.images, shards_uri=uri, split=split, name=f"{split}-{number:05}",
                    block=block, rows=rows, sizes=block_sizes[rows].tolist(),
                    hashes=[raw_folder.known_hash(sums, image_id) for image_id in ids[rows]],
                    labels=len(raw.categories), hashed=min(1.0, _HASHED / max(1, len(table))), config=config,
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


def join(raw: RawManifest, data_root: str, config: DataConfig) -> ShardIndex:
    """Write the index over the shards of all partitions; return it.

    Raises:
        DataError: too many images or boxes are bad, a shard is missing, no training image is left, or
            `plausibility.check_samples` finds an error.
        StorageError: the data root cannot be read or written.
    """
    uri = place(raw, data_root, config)
    states = storage.list_states(uri)
    names: dict[str, list[str]] = {split: [] for split in raw.splits}
    for task in _plan(raw, uri, config):
        names[task.split].append(task.name)
        if not {f"{task.name}.json", f"{task.name}.tar"} <= states.keys():
            raise DataError(
                f"the shard {task.name} is missing in {uri}", fix="run the shard step of every partition"
            )
    problems = Problems.of(raw.problems)
    classes = Classes(raw.categories, raw.hierarchy)
    splits: dict[str, _Split] = {}
    for split, shards in names.items():
        truth = GroundTruthWriter(classes) if split != "train" else None
        splits[split] = _Split(len(raw.categories), truth)
        for name, sidecar in shard_folder.sidecars(uri, shards):
            splits[split].add(name, sidecar)
            problems.merge(sidecar.problems)
    warnings, duplicates = _check(splits, problems, raw, uri, config)
    files: dict[str, StoredFile] = {}
    for split, gathered in splits.items():
        files |= gathered.write(uri, split)
    class_names = [category.name for category in raw.categories]
    index = ShardIndex(
        fingerprint=uri.rpartition("/")[2],
        source=raw.source,
        raw_fingerprint=raw.fingerprint,
        categories=raw.categories,
        splits={split: gathered.entry for split, gathered in splits.items()},
        problems=dict(sorted(problems.counts.items())),
        class_counts={
            split: dict(zip(class_names, gathered.statistics.boxes_of_class, strict=True))
            for split, gathered in splits.items()
        },
        uri=uri,
        hierarchy=raw.hierarchy,
        warnings=[*(raw.warnings or []), *warnings],
        near_duplicates=duplicates,
        quarantined=[one for part in splits.values() for one in part.quarantined][:_QUARANTINED_SHOWN],
        statistics={split: part.statistics for split, part in splits.items()},
        files=files,
        settings=_settings(config),
        content=raw.content,
    )
    index.write()
    training_record.write(raw, index, data_root)
    for name in shard_folder.noted(states):
        storage.delete(storage.join(uri, name + NOTE))
    summary = f" ({problems.summary()})" if problems.counts else ""
    counts = ", ".join(f"{samples} {split}" for split, samples in index.samples.items())
    logger.info("shards of %s: %s in %s%s", raw.source, counts, uri, summary)
    return index


def _check(
    splits: dict[str, "_Split"], problems: Problems, raw: RawManifest, uri: str, config: DataConfig
) -> tuple[list[str], list[DuplicatePair]]:
    """Return warnings, and the first near duplicates; raise DataError if too much is bad."""
    where = f"shards of {raw.source}"
    found = plausibility.check_samples(
        problems.counts, {split: part.statistics for split, part in splits.items()}
    )
    if problems.counts.get(reasons.IMAGE_ROTATED):  # The cause of bad boxes is named first.
        found.check(where)
    raw.check(where, problems, config.max_bad_fraction)
    if "train" in splits and not splits["train"].statistics.images:
        raise DataError(
            f"no training image is left in {uri}: {problems.summary()}",
            fix="accept smaller images with data.min_side, or repair the source",
        )
    found.check(where)
    named, warnings = plausibility.near_duplicates(
        {split: part.hashes() for split, part in splits.items()},
        lambda split, row: splits[split].file_name(uri, row),
    )
    found.warnings += warnings
    for warning in found.warnings:
        logger.warning("%s", warning)
    return found.warnings, named


class _Split:
    """The entries of a split in the index, gathered shard by shard."""

    def __init__(self, labels: int, truth: GroundTruthWriter | None) -> None:
        self._rows: list[np.ndarray] = [np.zeros(0, SAMPLE)]
        self._hashes: list[np.ndarray] = [plausibility.hashes_of(b"")]
        self._shards: list[Shard] = []
        self._truth = truth
        self.statistics = statistics.describe([], labels)
        self.quarantined: list[Quarantined] = []

    def add(self, name: str, sidecar: Sidecar) -> None:
        columns = SAMPLE.names or ()
        rows = [(len(self._shards), *(row[column] for column in columns[1:])) for row in sidecar.rows]
        self._rows.append(np.array(rows, dtype=SAMPLE))
        # Shards of older versions have no hashes.
        hashes = base64.b64decode(sidecar.hashes) or plausibility.NO_HASH * len(rows)
        self._hashes.append(plausibility.hashes_of(hashes))
        self._shards.append(
            Shard(f"{name}.tar", sidecar.samples, sidecar.boxes, sidecar.bytes, sidecar.sha256)
        )
        self.statistics += sidecar.statistics
        self.quarantined += sidecar.quarantined[: _QUARANTINED_SHOWN - len(self.quarantined)]
        if self._truth is not None:
            self._truth.add(sidecar.block, sidecar.rows)

    def hashes(self) -> np.ndarray:
        """Return the hashes of the pictures, uint64 [N, 4]."""
        return np.concatenate(self._hashes)

    @property
    def entry(self) -> ShardSplit:
        samples, boxes = (sum(getattr(one, key) for one in self._shards) for key in ("samples", "boxes"))
        return ShardSplit(samples, boxes, self._shards)

    def file_name(self, uri: str, row: int) -> str:
        """Return the name of an image by its row in the split."""
        ends = np.cumsum([one.samples for one in self._shards])
        number = int(np.searchsorted(ends, row, "right"))
        sidecar = shard_folder.read_sidecar(uri, self._shards[number].name.removesuffix(".tar"))
        return str(sidecar.rows[row - int(ends[number])]["file_name"])

    def write(self, uri: str, split: str) -> dict[str, StoredFile]:
        """Write the table of samples and the ground truth; return each file by its name."""
        buffer = io.BytesIO()
        np.save(buffer, np.concatenate(self._rows), allow_pickle=False)
        data, name = buffer.getvalue(), f"{split}.samples.npy"
        storage.write_bytes(storage.join(uri, name), data, confirm=True)
        files = {name: StoredFile(len(data), hashlib.sha256(data).hexdigest())}
        if self._truth is not None:
            name = f"annotations/{split}.json"
            files[name] = self._truth.write(storage.join(uri, name))
        return files
