"""Converts raw images and annotations to shards, with processes on one or many machines.

<data_root>/shards/<fingerprint>/
  <split>-00000.tar           standard tar: KEY.jpg, KEY.json
  <split>-00000.json          sidecar, written after the tar to mark the shard as complete
  annotations/<split>.json    ground truth of val and test
  <split>.samples.npy         location of each sample
  index.json                  written last

A shard holds images of one block of the raw table. So no step needs more than a block in memory, and the
shards do not depend on how the work is divided. Each process that torchrun started writes the next free
shard, and rank 0 writes the index.
"""

import base64
import hashlib
import json
import logging
import math
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from trainer import storage
from trainer.base import events, worker_pool
from trainer.base.daemon_threads import DaemonThreadPool, wait_for
from trainer.base.errors import DamagedError, DataError, FormatError, MissingError, StorageError
from trainer.base.log import progress
from trainer.base.os_errors import name_resource_errors
from trainer.config.schema import DataConfig
from trainer.data import plausibility, raw_folder, shard_folder, statistics, tiles
from trainer.data import problem_counts as reasons
from trainer.data.download import fingerprint
from trainer.data.ground_truth import Classes, GroundTruthBuilder
from trainer.data.image_fetching import refetch
from trainer.data.image_keys import hash_fraction
from trainer.data.images import MAX_PIXELS, NormalizedImage, UnreadableImage, crop, normalize, to_pixels
from trainer.data.problem_counts import Problems
from trainer.data.raw_manifest import RawManifest
from trainer.data.samples import Annotation, IndexedRecord, RawRow, Record, to_bbox
from trainer.data.shard_folder import DAMAGE_SUFFIX, INDEX, SAMPLE, QuarantinedImage, ShardIndex, Sidecar
from trainer.launching.shared_work import SharedWork, join_shared_work

logger = logging.getLogger(__name__)

SETTINGS = (
    "shard_bytes", "max_side", "jpeg_quality", "decode_check", "tile", "tile_overlap", "empty_images",
)  # fmt: skip
"""Keys of the section `data` that determine the shards."""

MIN_SIDE = 0.1  # Boxes with a shorter side, in pixels, count as having no area.
_ROUNDING = 1e-6  # Pixels outside the image that count as rounding errors of relative coordinates.
_MAX_HASHED_IMAGES = 100_000  # Maximum images of a split that are compared with other splits.
_QUARANTINED_SHOWN = 100
_TAR_BLOCK, _TAR_RECORD = 512, 10240  # Members are padded to the first, the file to the second.
_READ_AHEAD_BYTES = 64 * 1024 * 1024  # Maximum bytes of raw images to fetch ahead; at least one image.
_READERS = 16  # Connections of each process; one core cannot use more.


@dataclass(frozen=True)
class ShardTask:
    """The work of writing one shard, for a worker process."""

    raw: RawManifest
    config: DataConfig
    uri: str  # Folder of the shards.
    split: str
    name: str  # Name of the shard, without extension.
    block: int
    rows: list[int]  # Positions of the images in the block, in the order of the shard.
    sizes: list[int]  # Bytes of each raw image.
    hashes: list[str]  # sha256 of each raw image.


def shard(raw: RawManifest, data_root: str, config: DataConfig) -> ShardIndex:
    """Convert raw images to shards, and return the index; complete shards are kept.

    The result does not depend on the number of processes.

    Raises:
        DataError: too many images or boxes are bad, or a worker was killed.
        StorageError: the data root cannot be read or written.
    """
    with join_shared_work() as work:
        if index := work.run_on_first(lambda: find_complete(raw, data_root, config)):
            return index
        write_shards(raw, data_root, config, work)
        return work.run_on_first(lambda: write_index(raw, data_root, config))


def shards_uri(raw: RawManifest, data_root: str, config: DataConfig) -> str:
    """Return the URI of the folder for the shards of raw images; it may not exist yet."""
    if not raw.content:
        raise DataError(f"the images of {raw.uri} have not been downloaded", fix="run the download step")
    settings = _select_settings(config).values()
    name = fingerprint("shards", shard_folder.VERSION, raw.fingerprint, raw.content, *settings)
    return storage.join(storage.absolute(data_root), "shards", name)


def _select_settings(config: DataConfig) -> dict[str, Any]:
    """Return the keys of the section `data` that determine the shards, with their values."""
    return {key: getattr(config, key) for key in SETTINGS}


def find_complete(raw: RawManifest, data_root: str, config: DataConfig) -> ShardIndex | None:
    """Return the index if all shards are complete, else None."""
    uri = shards_uri(raw, data_root, config)
    if not storage.exists(storage.join(uri, INDEX)):
        return None
    try:
        index = shard_folder.read_index(uri)
    except (DamagedError, FormatError) as error:
        logger.warning("%s; rewriting it", error.message)
        return None
    storage.touch(storage.join(uri, INDEX))
    states = storage.list_states(uri, recursive=True)
    damaged = {*shard_folder.find_listing_faults(index, states), *shard_folder.list_damaged(states)}
    for name in index.files.keys() - damaged:
        try:
            shard_folder.read_checked(index, name)
        except DamagedError:
            damaged.add(name)
    if damaged:
        more = f" and {len(damaged) - 10} more" if len(damaged) > 10 else ""
        shown = ", ".join(sorted(damaged)[:10])
        logger.warning("%s: missing or damaged: %s%s; rewriting them", uri, shown, more)
        return None
    logger.info("shards of %s are there already: %s", raw.source, uri)
    events.emit(events.ResultReused(uri=uri))
    raw.check(f"shards of {raw.source}", Problems(dict(index.problems), {}), config.max_bad_fraction)
    return index


def write_shards(raw: RawManifest, data_root: str, config: DataConfig, work: SharedWork) -> None:
    """Write the incomplete shards that no other process is writing.

    A shard is complete if it and its sidecar exist, agree on the size and are not marked as damaged.
    """
    uri = shards_uri(raw, data_root, config)
    tasks = list(_plan_shards(raw, uri, config))
    missing = work.run_on_first(lambda: _missing_shards(uri, [task.name for task in tasks]))
    workers = min(config.processes or worker_pool.available_cores(), max(1, len(missing)))
    own = (tasks[missing[part]] for part in work.take_parts("shards", len(missing)))
    left = sum(len(tasks[number].rows) for number in missing)
    total, bad = sum(len(task.rows) for task in tasks), 0
    with progress("shard", total, "images", done=total - left, shown=work.rank == 0) as bar:
        written = worker_pool.run(write_shard, own, workers, processes=True, max_pending=lambda: workers)
        for images, quarantined in written:
            bad += quarantined
            bar.update(images * work.size, note=f"{bad} unreadable" if bad else "")


def _missing_shards(uri: str, names: list[str]) -> list[int]:
    """Return the positions of incomplete shards among `names`, which have no extension."""
    storage.remove_stale(uri)
    states = storage.list_states(uri)
    missing = []
    for number, name in enumerate(names):
        tar, record = f"{name}.tar", f"{name}.json"
        if {tar, record} <= states.keys() and not {
            tar + DAMAGE_SUFFIX,
            record + DAMAGE_SUFFIX,
        } & states.keys():
            with suppress(DamagedError, FormatError):
                if shard_folder.read_sidecar(uri, name).bytes == states[tar].size:
                    continue
        missing.append(number)
    if len(missing) < len(names):
        logger.info("%d of %d shards are there already", len(names) - len(missing), len(names))
    if INDEX in states and missing:
        shown = ", ".join(names[number] for number in missing[:10])
        logger.warning("%s: rewriting %s", uri, shown)
    return missing


def _plan_shards(raw: RawManifest, uri: str, config: DataConfig) -> Iterator[ShardTask]:
    """Yield the tasks of all shards: each block is sorted by a hash of the keys, and split by raw size."""
    images = raw_folder.read_image_table(raw)
    for split in raw.splits:
        table = raw_folder.open_table(raw, split)
        number = 0
        for block in range(table.block_count):
            columns = table.read_block(block, ["image_id", "key"]).to_pydict()
            ids, keys = np.array(columns["image_id"]), columns["key"]
            block_images = images[ids - 1]
            block_sizes = block_images["bytes"]
            shards: list[list[int]] = []
            filled = config.shard_bytes
            stored = np.flatnonzero(block_sizes).tolist()
            for _, row in sorted((hash_fraction(keys[row], "shard"), row) for row in stored):
                if filled >= config.shard_bytes:
                    shards.append([])
                    filled = 0
                shards[-1].append(row)
                filled += int(block_sizes[row])
            for rows in shards:
                hashes = [digest.tobytes().hex() for digest in block_images["sha256"][rows]]
                yield ShardTask(
                    raw,
                    config,
                    uri,
                    split,
                    f"{split}-{number:05}",
                    block,
                    rows,
                    block_sizes[rows].tolist(),
                    hashes,
                )
                number += 1


def write_shard(task: ShardTask) -> tuple[int, int]:
    """Write a shard, then its sidecar; return the numbers of its images and of unreadable ones.

    The tar file is in the USTAR format (POSIX.1-1988) with fixed times and owners, so that the same input
    gives the same bytes.
    """
    config, problems = task.config, Problems()
    labels = len(task.raw.categories)
    table = raw_folder.open_table(task.raw, task.split)
    hashed = min(1.0, _MAX_HASHED_IMAGES / max(1, len(table)))
    side = config.tile if task.split == "train" else 0
    longest = MAX_PIXELS if config.tile else config.max_side
    samples: list[IndexedRecord] = []
    quarantined: list[QuarantinedImage] = []
    hashes = []
    digest = hashlib.sha256()
    target = storage.join(task.uri, f"{task.name}.tar")
    written = storage.new_file(target, sha256=digest.hexdigest, confirm=True)
    with written as path, path.open("wb") as file:
        tar = _TarWriter(file, digest)
        for row, data in _read_images(task, table.read_block(task.block).take(task.rows).to_pylist()):
            name = row["file_name"]
            try:
                with name_resource_errors(name):
                    normal = normalize(data, longest, config.jpeg_quality, decode=config.decode_check)
                    places = tiles.tiling(normal.width, normal.height, side, config.tile_overlap)
                    jpegs = crop(normal, places, config.jpeg_quality)
            except UnreadableImage as error:
                quarantined.append(QuarantinedImage(name, str(error)))
                problems.add(reasons.IMAGE_UNREADABLE, f"{name}: {error}")
                continue
            whole = _make_record(row, normal, labels, problems)
            chosen = hash_fraction(row["key"], "near duplicates") < hashed
            picture = plausibility.picture_hash(normal.jpeg) if chosen else plausibility.NO_HASH
            for number, (window, jpeg) in enumerate(zip(places, jpegs, strict=True)):
                key, record = row["key"], whole
                if len(places) > 1:
                    # Keys of images do not contain @.
                    key, record = f"{key}@{window[0]}x{window[1]}", _make_tile_record(whole, window, number)
                    if config.empty_images == "drop" and not record["annotations"]:
                        continue
                text = json.dumps(record).encode()
                samples.append(
                    {
                        **record,
                        "offset": tar.add(f"{key}.jpg", jpeg),
                        "length": len(jpeg),
                        "json_offset": tar.add(f"{key}.json", text),
                        "json_length": len(text),
                        "crc32": zlib.crc32(text, zlib.crc32(jpeg)),
                    }
                )
                hashes.append(picture)
                picture = plausibility.NO_HASH  # Only the first tile carries the hash of the image.
        tar.close()
    Sidecar(
        block=task.block,
        samples=len(samples),
        boxes=sum(len(sample["annotations"]) for sample in samples),
        bytes=tar.size,
        sha256=digest.hexdigest(),
        quarantined=quarantined,
        problems=problems.cases(),
        statistics=statistics.compute_statistics(samples, labels),
        rows=samples,
        hashes=base64.b64encode(b"".join(hashes)).decode(),
    ).write(task.uri, task.name)
    return len(task.rows), len(quarantined)


def _read_images(task: ShardTask, rows: list[RawRow]) -> Iterator[tuple[RawRow, bytes]]:
    """Yield the rows of a shard with the bytes of their images; those in a store are read ahead."""
    if storage.is_local(task.raw.images):
        for row, sha256 in zip(rows, task.hashes, strict=True):
            yield row, _read_image(task, row, sha256)
        return
    readers = min(task.config.threads, _READERS)
    with DaemonThreadPool(readers, "images") as threads:
        reads: deque[Future[bytes]] = deque()
        ahead = at = 0  # Bytes that are read ahead; number of requested images.
        for number, row in enumerate(rows):
            while at < len(rows) and at - number < 2 * readers:
                if at > number and ahead + task.sizes[at] > _READ_AHEAD_BYTES:
                    break
                reads.append(threads.submit(_read_image, task, rows[at], task.hashes[at]))
                ahead += task.sizes[at]
                at += 1
            yield row, wait_for(reads.popleft())
            ahead -= task.sizes[number]


def _read_image(task: ShardTask, row: RawRow, sha256: str) -> bytes:
    """Read a raw image; if it is lost or damaged, restore it from the source.

    An image that cannot be read now is not left out as bad: the shards would lack it forever.
    """
    uri = task.raw.image_uri(row)
    try:
        return storage.read_bytes(uri, sha256=sha256)
    except (MissingError, DamagedError) as error:
        fault = error.message
    try:
        data = refetch(task.raw.source, row["origin"], task.config)
    except (StorageError, DataError) as error:
        message = f"{fault}; and it cannot be fetched again: {error.message}"
        raise StorageError(message, fix=error.fix) from error
    if hashlib.sha256(data).hexdigest() != sha256:
        fix = "run `kubedet data verify --repair` on the raw images to use the new one"
        raise StorageError(f"{fault}; and at the source {row['file_name']} is a different image now", fix=fix)
    storage.write_bytes(uri, data, sync=False)
    logger.warning("%s; fetched again from the source", fault)
    return data


def _make_record(row: RawRow, normal: NormalizedImage, labels: int, problems: Problems) -> Record:
    """Return the record of a sample, with cleaned boxes in pixels of the stored image."""
    name, size = row["file_name"], (row["width"], row["height"])
    boxes: list[Annotation] = []
    for box in row["boxes"]:
        before = to_bbox(box)
        after = to_pixels(before, normal, *size)
        old_area, new_area = before[2] * before[3], after[2] * after[3]
        area = box["area"] * (new_area / old_area if old_area > 0 else 1.0)
        boxes.append({"category_id": box["category"], "bbox": after, "area": area, "iscrowd": box["iscrowd"]})
    plausibility.count_size_problem(name, normal, size, [box["bbox"] for box in boxes], problems)
    record: Record = {
        "image_id": row["image_id"],
        "file_name": name,
        "width": normal.width,
        "height": normal.height,
        "annotations": clean_boxes(boxes, normal.width, normal.height, labels, problems, name),
    }
    if row["original_id"] != "null":
        record["original_id"] = json.loads(row["original_id"])
    if row["extra"]:
        record["extra"] = json.loads(row["extra"])
    return record


def _make_tile_record(whole: Record, window: tiles.Window, number: int) -> Record:
    """Return the record of a tile of an image."""
    return {
        **whole,
        "image_id": whole["image_id"] + number * tiles.TILE_ID_STEP,
        "width": window[2],
        "height": window[3],
        "annotations": tiles.crop_boxes(whole["annotations"], window),
        "tile": list(window),
    }


def clean_boxes(
    annotations: list[Annotation], width: int, height: int, labels: int, problems: Problems, where: str
) -> list[Annotation]:
    """Return the usable boxes of an image, clipped to it; count unusable ones in `problems`.

    `labels` is the number of categories, and `where` names the image in examples.
    """
    kept: list[Annotation] = []
    for annotation in annotations:
        reason, box = _check_box(annotation, width, height, labels)
        if reason:
            problems.add(reason, f"{where} {[round(value, 2) for value in annotation['bbox']]}")
        if box is not None:
            area = box[2] * box[3]
            if annotation["area"] > 0:
                area = min(annotation["area"], area)
            kept.append({**annotation, "bbox": box, "area": area})
    return kept


def _check_box(
    annotation: Annotation, width: int, height: int, labels: int
) -> tuple[str | None, list[float] | None]:
    """Return the problem of a box (or None), and its usable part (or None)."""
    box = annotation["bbox"]
    if len(box) != 4 or not math.isfinite(sum(box)):
        return reasons.BOX_NOT_FINITE, None
    if not 0 <= annotation["category_id"] < labels:
        return reasons.BOX_UNKNOWN_CATEGORY, None
    x, y, w, h = box
    if w < MIN_SIDE or h < MIN_SIDE:
        return reasons.BOX_WITHOUT_AREA, None
    if x >= 0 and y >= 0 and x + w <= width and y + h <= height:
        return None, box
    left, top = max(x, 0.0), max(y, 0.0)
    right, bottom = min(x + w, float(width)), min(y + h, float(height))
    if right - left < MIN_SIDE or bottom - top < MIN_SIDE:
        return reasons.BOX_OUTSIDE, None
    outside = max(left - x, top - y, x + w - right, y + h - bottom)
    reason = reasons.BOX_CLIPPED if outside > _ROUNDING else None
    return reason, [left, top, right - left, bottom - top]


class _TarWriter:
    """Writes a tar file, and updates its digest."""

    def __init__(self, file: BinaryIO, digest: "hashlib._Hash") -> None:
        self._file, self._digest = file, digest
        self.size = 0

    def add(self, name: str, data: bytes) -> int:
        """Append a file and return its offset; ten times faster than tarfile, with the same header."""
        # Name, mode, owner, group, size, time, checksum (blank while it is summed), type, magic and version.
        fields = (b"0000644", b"0000000", b"0000000", b"%011o" % len(data), b"%011o" % 0)
        head = name.encode("ascii").ljust(100, b"\0") + b"\0".join(fields) + b"\0"
        tail = b"0".ljust(101, b"\0") + b"ustar\x0000".ljust(255, b"\0")
        self._write(head + b"%06o\0 " % (sum(head) + sum(tail) + 8 * ord(" ")) + tail)
        offset = self.size
        self._write(data)
        self._write(bytes(-len(data) % _TAR_BLOCK))
        return offset

    def close(self) -> None:
        """Append the end of the archive."""
        self._write(bytes(2 * _TAR_BLOCK))
        self._write(bytes(-self.size % _TAR_RECORD))

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.size += len(data)


def write_index(raw: RawManifest, data_root: str, config: DataConfig) -> ShardIndex:
    """Write and return the index of all shards."""
    uri = shards_uri(raw, data_root, config)
    states = storage.list_states(uri)
    classes = Classes(raw.categories, raw.hierarchy)
    splits = {split: _SplitCollector(uri, split, classes) for split in raw.splits}
    for task in _plan_shards(raw, uri, config):
        if not {f"{task.name}.json", f"{task.name}.tar"} <= states.keys():
            fix = "run the same command again"
            raise DataError(f"the shard {task.name} is missing in {uri}", fix=fix)
        splits[task.split].stems.append(task.name)
    problems = Problems.from_cases(raw.problems)
    for part in splits.values():
        for sidecar in part.gather():
            problems.merge(sidecar.problems)
    warnings = _check_splits(splits, problems, raw, uri, config)
    index = ShardIndex(
        fingerprint=uri.rpartition("/")[2],
        source=raw.source,
        raw_fingerprint=raw.fingerprint,
        categories=raw.categories,
        splits={split: part.entry for split, part in splits.items()},
        problems=dict(sorted(problems.counts.items())),
        class_counts={
            split: dict(zip(raw.class_names, part.statistics.boxes_of_class, strict=True))
            for split, part in splits.items()
        },
        uri=uri,
        hierarchy=raw.hierarchy,
        warnings=[*raw.warnings, *warnings],
        quarantined=[one for part in splits.values() for one in part.quarantined][:_QUARANTINED_SHOWN],
        statistics={split: part.statistics for split, part in splits.items()},
        files={name: file for part in splits.values() for name, file in part.write().items()},
        settings=_select_settings(config),
        content=raw.content,
    )
    index.write()
    for name in shard_folder.list_damaged(states):
        storage.delete(storage.join(uri, name + DAMAGE_SUFFIX))
    summary = f" ({problems.summary()})" if problems.counts else ""
    counts = ", ".join(f"{samples} {split}" for split, samples in index.samples.items())
    logger.info("shards of %s: %s in %s%s", raw.source, counts, uri, summary)
    return index


def _check_splits(
    splits: dict[str, "_SplitCollector"], problems: Problems, raw: RawManifest, uri: str, config: DataConfig
) -> list[str]:
    """Return warnings; raise DataError if too many images or boxes are bad."""
    where = f"shards of {raw.source}"
    described = {split: part.statistics for split, part in splits.items()}
    images = sum(split.images for split in described.values())
    found = plausibility.check_statistics(problems, described, images)
    if problems.counts.get(reasons.IMAGE_ROTATED):  # Report it first, as it is the cause of bad boxes.
        found.raise_errors(where)
    raw.check(where, problems, config.max_bad_fraction)
    if "train" in splits and not splits["train"].statistics.images:
        raise DataError(f"no training image is left in {uri}: {problems.summary()}", fix="repair the source")
    found.raise_errors(where)
    found.warnings += plausibility.duplicate_warnings(
        {split: np.concatenate(part.hashes) for split, part in splits.items()},
        lambda split, row: splits[split].file_name(row),
    )
    for warning in found.warnings:
        logger.warning("%s", warning)
    return found.warnings


class _SplitCollector:
    """Collects the entries of a split for the index."""

    def __init__(self, uri: str, split: str, classes: Classes) -> None:
        self._uri, self._split = uri, split
        self._truth = GroundTruthBuilder(classes) if split != "train" else None
        self._rows: list[np.ndarray] = [np.zeros(0, SAMPLE)]
        self._shards: list[shard_folder.Shard] = []
        self.stems: list[str] = []  # Names of the shards, without extension.
        self.hashes: list[np.ndarray] = [plausibility.decode_hashes(b"")]  # Of the pictures, uint64 [N, 4].
        self.statistics = statistics.compute_statistics([], len(classes.categories))
        self.quarantined: list[QuarantinedImage] = []

    def gather(self) -> Iterator[Sidecar]:
        """Collect the entries of all shards, and yield their sidecars."""
        columns = SAMPLE.names or ()
        for name, sidecar in zip(self.stems, shard_folder.read_sidecars(self._uri, self.stems), strict=True):
            rows = [(len(self._shards), *(row[column] for column in columns[1:])) for row in sidecar.rows]
            self._rows.append(np.array(rows, dtype=SAMPLE))
            self.hashes.append(plausibility.decode_hashes(base64.b64decode(sidecar.hashes)))
            samples, boxes, size = sidecar.samples, sidecar.boxes, sidecar.bytes
            self._shards.append(shard_folder.Shard(f"{name}.tar", samples, boxes, size, sidecar.sha256))
            self.statistics += sidecar.statistics
            self.quarantined += sidecar.quarantined[: _QUARANTINED_SHOWN - len(self.quarantined)]
            if self._truth is not None:
                self._truth.add(sidecar.block, sidecar.rows)
            yield sidecar

    @property
    def entry(self) -> shard_folder.ShardSplit:
        samples, boxes = (sum(getattr(one, key) for one in self._shards) for key in ("samples", "boxes"))
        return shard_folder.ShardSplit(samples, boxes, self._shards)

    def file_name(self, row: int) -> str:
        """Return the file name of a sample, given its row in the split."""
        ends = np.cumsum([one.samples for one in self._shards])
        number = int(np.searchsorted(ends, row, "right"))
        sidecar = shard_folder.read_sidecar(self._uri, self.stems[number])
        return str(sidecar.rows[row - int(ends[number])]["file_name"])

    def write(self) -> dict[str, shard_folder.StoredFile]:
        """Write the table of samples and the ground truth; return the files by name."""
        contents = {f"{self._split}.samples.npy": raw_folder.to_npy(np.concatenate(self._rows))}
        if self._truth is not None:
            contents[f"annotations/{self._split}.json"] = self._truth.to_json()
        for name, data in contents.items():
            storage.write_bytes(storage.join(self._uri, name), data, confirm=True)
        return {
            name: shard_folder.StoredFile(len(data), hashlib.sha256(data).hexdigest())
            for name, data in contents.items()
        }
