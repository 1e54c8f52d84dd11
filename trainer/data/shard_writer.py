"""Writes one shard: a tar file of images and their cleaned boxes, and its sidecar. Runs in worker processes.

Members are KEY.jpg and KEY.json in the USTAR format (POSIX.1-1988) with fixed times and owners, so that the
same input gives the same bytes.
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
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from trainer import storage
from trainer.base.daemon_threads import DaemonThreadPool, result_of
from trainer.base.errors import DamagedError, DataError, MissingError, StorageError
from trainer.base.os_errors import name_resource_errors
from trainer.config.schema import DataConfig
from trainer.data import fetch, statistics
from trainer.data import problem_counts as reasons
from trainer.data.image_keys import hash_fraction, place
from trainer.data.images import NormalImage, UnreadableImage, normalize, place_box
from trainer.data.plausibility import NO_HASH, note_image, picture_hash
from trainer.data.problem_counts import Problems
from trainer.data.raw_folder import Table, hash_of
from trainer.data.samples import Annotation, IndexedRecord, RawBox, RawRow, Record, bbox_of
from trainer.data.shard_folder import Quarantined, Sidecar

logger = logging.getLogger(__name__)

MIN_SIDE = 0.1
"""Boxes with a shorter side, in pixels, count as having no area."""
_ROUNDING = 1e-6
"""Pixels outside of the image that are rounding errors of boxes that are shares of its sides."""
_TAR_BLOCK, _RECORD = 512, 10240  # Headers and data are padded to the one, the file to the other.
_WINDOW = 64 * 1024 * 1024
"""Most bytes of raw images that are fetched ahead, or one image."""
_READERS = 16
"""Connections of each process: one processor cannot use more."""


def clean(
    annotations: list[Annotation], width: int, height: int, labels: int, problems: Problems, where: str,
    min_side: float = 0.0,
) -> list[Annotation]:  # fmt: skip
    """Return the usable boxes of one image, clipped to it; count the others in `problems`.

    `labels` is the number of categories, `where` names the image in examples, and `min_side` is the shortest
    side of a box in pixels.
    """
    kept: list[Annotation] = []
    for annotation in annotations:
        reason, box = _judge(annotation, width, height, labels)
        if box is not None and min(box[2:]) < min_side:
            reason, box = reasons.BOX_SMALL, None
        if reason:
            problems.add(reason, f"{where} {[round(value, 2) for value in annotation['bbox']]}")
        if box is not None:
            area = box[2] * box[3]
            if annotation["area"] > 0:
                area = min(annotation["area"], area)
            kept.append({**annotation, "bbox": box, "area": area})
    return kept


def _judge(
    annotation: Annotation, width: int, height: int, labels: int
) -> tuple[str | None, list[float] | None]:
    """Return the problem of a box, or None, and its usable part, or None."""
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


@dataclass(frozen=True)
class ShardTask:
    """What a worker needs to write one shard."""

    source: str
    """Replaces raw images that are lost or damaged."""
    table_uri: str
    """The split's raw table."""
    table_sha256: str
    images_uri: str
    shards_uri: str
    split: str
    name: str
    """Of the shard, without extension."""
    block: int
    rows: list[int]
    """Positions of the images in the block of the table, in the order of the shard."""
    sizes: list[int]
    """Bytes of each raw image."""
    hashes: list[str]
    """sha256 of each raw image; "" if it is unknown."""
    labels: int
    """Number of categories."""
    hashed: float
    """Share of the images that are compared with those of other splits."""
    config: DataConfig


def write_shard(task: ShardTask) -> tuple[int, int]:
    """Write a shard and then its sidecar; return the number of its images, and of the unreadable ones.

    Raises:
        StorageError: it cannot be written, or a raw image cannot be read, or is not as it was downloaded.
            Then nothing of the shard is left.
    """
    config, problems = task.config, Problems()
    samples: list[IndexedRecord] = []
    quarantined: list[Quarantined] = []
    hashes = []
    target = storage.join(task.shards_uri, f"{task.name}.tar")
    digest = hashlib.sha256()
    written = storage.new_file(target, sha256=digest.hexdigest, confirm=True)
    with written as path, path.open("wb") as file:
        tar = _Tar(file, digest)
        for row, data in _images(task):
            name = row["file_name"]
            try:
                with name_resource_errors(name):
                    normal = normalize(
                        data, config.max_side, config.jpeg_quality, row["orientation"],
                        decode=config.decode_check,
                    )  # fmt: skip
            except UnreadableImage as error:
                quarantined.append(Quarantined(name, str(error)))
                problems.add(reasons.IMAGE_UNREADABLE, f"{name}: {error}")
                continue
            if min(normal.stored_width, normal.stored_height) < config.min_side:
                problems.add(reasons.IMAGE_SMALL, f"{name}: {normal.stored_width}x{normal.stored_height}")
                continue
            samples.append(_add_sample(tar, task, row, normal, problems))
            chosen = hash_fraction(row["key"], "near duplicates") < task.hashed
            hashes.append(picture_hash(normal.jpeg) if chosen else NO_HASH)
        tar.close()
    Sidecar(
        block=task.block,
        samples=len(samples),
        boxes=sum(len(sample["annotations"]) for sample in samples),
        bytes=tar.size,
        sha256=digest.hexdigest(),
        quarantined=quarantined,
        problems=problems.cases(),
        statistics=statistics.describe(samples, task.labels),
        rows=samples,
        hashes=base64.b64encode(b"".join(hashes)).decode(),
    ).write(task.shards_uri, task.name)
    return len(task.rows), len(quarantined)


def _images(task: ShardTask) -> Iterator[tuple[RawRow, bytes]]:
    """Yield the rows of a shard with the bytes of their images, fetched a little ahead from a store."""
    rows = Table(task.table_uri, task.table_sha256).rows(task.block, task.rows)
    stored = []
    for row, size, sha256 in zip(rows, task.sizes, task.hashes, strict=True):
        name = place(row["key"], row["file_name"], row["origin"], row["version"])
        stored.append(_Stored(storage.join(task.images_uri, name), size, sha256, row))
    if storage.is_local(task.images_uri):
        for one in stored:
            yield one.row, one.read(task)
        return
    readers = min(task.config.threads, _READERS)
    with DaemonThreadPool(readers, "images") as threads:
        reads: deque[Future[bytes]] = deque()
        ahead = at = 0  # Bytes in the window; images that were requested.
        for number, one in enumerate(stored):
            while at < len(stored) and at - number < 2 * readers:
                if at > number and ahead + stored[at].size > _WINDOW:
                    break
                reads.append(threads.submit(stored[at].read, task))
                ahead += stored[at].size
                at += 1
            yield one.row, result_of(reads.popleft())
            ahead -= one.size


class _Stored(NamedTuple):
    """A raw image that was fetched, with its expected size and hash."""

    uri: str
    size: int
    sha256: str
    row: RawRow

    def read(self, task: ShardTask) -> bytes:
        """Return its bytes; if they are lost or damaged, restore them from the source.

        An image that cannot be read now is not a bad image: leaving it out would lose it for good.

        Raises:
            StorageError: it cannot be read from either, or is another one at the source now.
        """
        try:
            data = storage.read_bytes(self.uri, sha256=self.sha256)
            if len(data) == self.size:
                return data
            fault = f"{self.uri} is not as it was downloaded: {len(data)} bytes, not {self.size}"
        except (MissingError, DamagedError) as error:
            fault = error.message
        try:
            data = fetch.read_again(task.source, self.row["origin"], tuple(task.config.allow_hosts))
        except (StorageError, DataError) as error:
            raise StorageError(
                f"{fault}; and it cannot be fetched again: {error.message}", fix=error.fix
            ) from error
        if len(data) != self.size or self.sha256 not in ("", hash_of(data)):
            raise StorageError(
                f"{fault}; and at the source {self.row['file_name']} is another image now",
                fix="run `kubedet data verify --repair` on the raw images: it takes the new one",
            )
        storage.write_bytes(self.uri, data, sync=False)
        logger.warning("%s; fetched again from the source", fault)
        return data


def _add_sample(
    tar: "_Tar", task: ShardTask, row: RawRow, normal: NormalImage, problems: Problems
) -> IndexedRecord:
    """Append one image and its cleaned boxes."""
    name, size = row["file_name"], (row["width"], row["height"])
    placed = [_place(box, normal, size) for box in row["boxes"]]
    note_image(name, normal, size, [box["bbox"] for box in placed], problems)
    record: Record = {
        "image_id": row["image_id"],
        "file_name": name,
        "width": normal.width,
        "height": normal.height,
        "annotations": clean(
            placed, normal.width, normal.height, task.labels, problems, name, task.config.min_box_side
        ),
    }
    if row["original_id"] != "null":
        record["original_id"] = json.loads(row["original_id"])
    if row["extra"]:
        record["extra"] = json.loads(row["extra"])
    text = json.dumps(record).encode()
    return {
        **record,
        "offset": tar.add(f"{row['key']}.jpg", normal.jpeg),
        "length": len(normal.jpeg),
        "json_offset": tar.add(f"{row['key']}.json", text),
        "json_length": len(text),
        "crc32": zlib.crc32(text, zlib.crc32(normal.jpeg)),
    }


def _place(box: RawBox, image: NormalImage, size: tuple[int, int]) -> Annotation:
    """Return a box of the table in pixels of the normal image."""
    before = bbox_of(box)
    after = place_box(before, image, *size)
    old_area, new_area = before[2] * before[3], after[2] * after[3]
    return {
        "category_id": box["category"],
        "bbox": after,
        "area": box["area"] * (new_area / old_area if old_area > 0 else 1.0),
        "iscrowd": box["iscrowd"],
    }


def _header(name: str, size: int) -> bytes:
    """Return the USTAR header of a file: tarfile makes the same one in ten times the time."""
    # Name, mode, owner, group, size, time, checksum (blank while it is summed), type, magic and version.
    fields = (b"0000644", b"0000000", b"0000000", b"%011o" % size, b"%011o" % 0)
    head = name.encode("ascii").ljust(100, b"\0") + b"\0".join(fields) + b"\0"
    tail = b"0".ljust(101, b"\0") + b"ustar\x0000".ljust(255, b"\0")
    return head + b"%06o\0 " % (sum(head) + sum(tail) + 8 * ord(" ")) + tail


class _Tar:
    """Appends members to a tar file, and returns the offset of each."""

    def __init__(self, file: BinaryIO, digest: "hashlib._Hash") -> None:
        self._file, self._digest = file, digest
        self.size = 0

    def add(self, name: str, data: bytes) -> int:
        self._write(_header(name, len(data)))
        offset = self.size
        self._write(data)
        self._write(bytes(-len(data) % _TAR_BLOCK))
        return offset

    def close(self) -> None:
        """Append the end of the archive."""
        self._write(bytes(2 * _TAR_BLOCK))
        self._write(bytes(-self.size % _RECORD))

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.size += len(data)
