"""One shard: a tar file of images and their boxes, and its sidecar. Runs in worker processes.

Members are KEY.jpg and KEY.json, in the USTAR format (POSIX.1-1988) with fixed times and owners,
so that the same input gives the same bytes.
"""

import hashlib
import json
import tarfile
from dataclasses import dataclass
from typing import Any, BinaryIO

from trainer import storage
from trainer.data import problems as reasons
from trainer.data.annotations import clean
from trainer.data.images import NormalImage, UnreadableImage, normalize, place_box, size_agrees
from trainer.data.problems import Problems
from trainer.errors import StorageError

_RECORD = 10240  # tar files end at a multiple of this


@dataclass(frozen=True)
class ShardTask:
    """What a worker needs to write one shard."""

    images_uri: str
    """Folder of the split's raw images."""
    shards_uri: str
    name: str
    """Of the shard, without extension."""
    images: list[tuple[dict[str, Any], list[dict[str, Any]]]]
    """Each image of the internal form with its annotations."""
    labels: int
    """How many categories there are."""
    max_side: int
    jpeg_quality: int


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
        for image, annotations in task.images:
            try:
                samples.append(_add_sample(tar, task, image, annotations, problems))
            except UnreadableImage as error:
                name = image.get("original_file_name", image["file_name"])
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
        "rows": samples,
    }
    storage.write_json(storage.join(task.shards_uri, f"{task.name}.json"), sidecar)
    return sidecar


def _add_sample(
    tar: "_Tar",
    task: ShardTask,
    image: dict[str, Any],
    annotations: list[dict[str, Any]],
    problems: Problems,
) -> dict[str, Any]:
    """Append one image and its cleaned boxes; return what the index needs of it."""
    where = image.get("original_file_name", image["file_name"])
    try:
        data = storage.read_bytes(storage.join(task.images_uri, image["file_name"]))
    except StorageError as error:
        raise UnreadableImage(error.message) from error
    normal = normalize(data, task.max_side, task.jpeg_quality)
    size = (image["width"], image["height"])
    if not size_agrees(normal, *size):
        shown = f"{size[0]}x{size[1]} annotated, {normal.stored_width}x{normal.stored_height} stored"
        problems.add(reasons.SIZE_DIFFERS, f"{where}: {shown}")
    placed = [_place(annotation, normal, size) for annotation in annotations]
    boxes = clean(placed, normal.width, normal.height, task.labels, problems, where)
    key = image["file_name"].partition(".")[0]
    sample = {
        "image_id": image["id"],
        "file_name": image["file_name"],
        "width": normal.width,
        "height": normal.height,
        "annotations": boxes,
    }
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


def _place(annotation: dict[str, Any], image: NormalImage, size: tuple[int, int]) -> dict[str, Any]:
    """Return an annotation in pixels of the normal image."""
    before = annotation["bbox"]
    if len(before) != 4:
        return annotation
    after = place_box(before, image, *size)
    old_area, new_area = before[2] * before[3], after[2] * after[3]
    grown = new_area / old_area if old_area > 0 else 1.0
    return {**annotation, "bbox": after, "area": annotation["area"] * grown}


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
