"""One shard: a tar file of images and their boxes, and its sidecar. Runs in worker processes.

Members are KEY.jpg and KEY.json, in the USTAR format (POSIX.1-1988) with fixed times and owners,
so that the same input gives the same bytes.
"""

import hashlib
import json
import tarfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO

from trainer import storage
from trainer.data import problems as reasons
from trainer.data import statistics
from trainer.data.cleaning import clean
from trainer.data.images import NormalImage, UnreadableImage, normalize, place_box, size_agrees
from trainer.data.keys import place
from trainer.data.problems import Problems
from trainer.data.table import Table
from trainer.errors import StorageError

_RECORD = 10240  # tar files end at a multiple of this


@dataclass(frozen=True)
class ShardTask:
    """What a worker needs to write one shard."""

    table_uri: str
    """The split's raw table."""
    images_uri: str
    """Folder of the raw images."""
    shards_uri: str
    split: str
    name: str
    """Of the shard, without extension."""
    block: int
    """Block of the table that its images are from."""
    rows: list[int]
    """Their positions in the block, in the order of the shard."""
    labels: int
    """How many categories there are."""
    max_side: int
    jpeg_quality: int
    min_box_side: float
    readers: int
    """Raw images that are fetched at the same time, where that takes time."""


def write_shard(task: ShardTask) -> dict[str, Any]:
    """Write a shard and then its sidecar; return the sidecar.

    Raises:
        StorageError: it cannot be written (disk full, refused). Nothing is left of it then.
    """
    problems = Problems()
    samples: list[dict[str, Any]] = []
    quarantined: list[dict[str, str]] = []
    target = storage.join(task.shards_uri, f"{task.name}.tar")
    with storage.new_file(target) as path, path.open("wb") as file:
        tar = _Tar(file)
        for row, data in _images(task):
            try:
                samples.append(_add_sample(tar, task, row, data, problems))
            except UnreadableImage as error:
                name = row["file_name"]
                quarantined.append({"file_name": name, "reason": str(error)})
                problems.add(reasons.IMAGE_UNREADABLE, f"{name}: {error}")
        tar.close()
    sidecar = {
        "samples": len(samples),
        "boxes": sum(len(sample["annotations"]) for sample in samples),
        "bytes": tar.size,
        "sha256": tar.sha256.hexdigest(),
        "quarantined": quarantined,
        "problems": problems.to_json(),
        "statistics": statistics.describe(samples, task.labels),
        "rows": samples,
    }
    storage.write_json(storage.join(task.shards_uri, f"{task.name}.json"), sidecar)
    return sidecar


def _images(task: ShardTask) -> Iterator[tuple[dict[str, Any], bytes | StorageError]]:
    """Yield the rows of a shard with the bytes of their images, read a little ahead."""
    rows = Table(task.table_uri).rows(task.block, task.rows)
    uris = [
        storage.join(task.images_uri, place(row["key"], row["file_name"], row["origin"], row["version"]))
        for row in rows
    ]
    if storage.is_local(task.images_uri):
        yield from zip(rows, map(_read, uris), strict=True)
        return
    with ThreadPoolExecutor(task.readers) as readers:
        ahead: deque[Future[bytes | StorageError]] = deque()
        waiting = iter(uris)
        for row in rows:
            while len(ahead) < 2 * task.readers and (uri := next(waiting, None)):
                ahead.append(readers.submit(_read, uri))
            yield row, ahead.popleft().result()


def _read(uri: str) -> bytes | StorageError:
    try:
        return storage.read_bytes(uri)
    except StorageError as error:
        return error


def _add_sample(
    tar: "_Tar", task: ShardTask, row: dict[str, Any], data: bytes | StorageError, problems: Problems
) -> dict[str, Any]:
    """Append one image and its cleaned boxes; return what the index needs of it."""
    where = row["file_name"]
    if isinstance(data, StorageError):
        raise UnreadableImage(data.message)
    normal = normalize(data, task.max_side, task.jpeg_quality, row["orientation"])
    size = (row["width"], row["height"])
    if not size_agrees(normal, *size):
        shown = f"{size[0]}x{size[1]} annotated, {normal.stored_width}x{normal.stored_height} stored"
        problems.add(reasons.SIZE_DIFFERS, f"{where}: {shown}")
    placed = [_place(box, normal, size) for box in row["boxes"]]
    boxes = clean(placed, normal.width, normal.height, task.labels, problems, where, task.min_box_side)
    key = row["key"]
    sample = {
        "image_id": row["image_id"],
        "file_name": row["file_name"],
        "width": normal.width,
        "height": normal.height,
        "annotations": boxes,
    }
    if row["original_id"] != "null":
        sample["original_id"] = json.loads(row["original_id"])
    if row["extra"]:
        sample["extra"] = json.loads(row["extra"])
    text = json.dumps(sample).encode()
    offset = tar.add(f"{key}.jpg", normal.jpeg)
    json_offset = tar.add(f"{key}.json", text)
    place = {
        "offset": offset,
        "length": len(normal.jpeg),
        "json_offset": json_offset,
        "json_length": len(text),
    }
    return {**sample, **place}


def _place(box: dict[str, Any], image: NormalImage, size: tuple[int, int]) -> dict[str, Any]:
    """Return a box of the table as an annotation, in pixels of the normal image."""
    before = [box[name] for name in "xywh"]
    after = place_box(before, image, *size)
    old_area, new_area = before[2] * before[3], after[2] * after[3]
    grown = new_area / old_area if old_area > 0 else 1.0
    return {
        "category_id": box["category"],
        "bbox": after,
        "area": box["area"] * grown,
        "iscrowd": box["iscrowd"],
    }


class _Tar:
    """Appends members to a tar file, and knows where each one's bytes are."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = 0
        self.sha256 = hashlib.sha256()

    def add(self, name: str, data: bytes) -> int:
        """Append a member; return the offset of its bytes."""
        header = tarfile.TarInfo(name)
        header.size = len(data)
        header.mode = 0o644
        self._write(header.tobuf(tarfile.USTAR_FORMAT))
        offset = self.size
        self._write(data)
        self._write(bytes(-len(data) % tarfile.BLOCKSIZE))
        return offset

    def close(self) -> None:
        """Append the end of the archive."""
        self._write(bytes(2 * tarfile.BLOCKSIZE))
        self._write(bytes(-self.size % _RECORD))

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self.sha256.update(data)
        self.size += len(data)
