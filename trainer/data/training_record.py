"""The images of each set of shards: `<data_root>/seen/<shards>.parquet`, one row per image.

It is kept when raw data and shards are deleted, and tells which images a model was trained on, who used an
image, and what changed in a source since. Its hash is in `<shards>.parquet.sha256`; older files have none.
"""

import hashlib
import io
import json
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trainer import storage
from trainer.base import typed_json
from trainer.base.errors import DamagedError
from trainer.base.os_errors import check_resources
from trainer.data import exclusions, image_keys
from trainer.data.raw_folder import RawManifest, Table, new_hashed_file, noted_copy
from trainer.data.shard_folder import ShardIndex

logger = logging.getLogger(__name__)

FOLDER = "seen"
SUFFIX = ".parquet"

ROW = pa.schema(
    [
        ("key", pa.string()), ("file_name", pa.string()), ("split", pa.dictionary(pa.int8(), pa.string())),
        ("image", pa.uint64()), ("annotations", pa.uint64()), ("crc32", pa.uint32()),
    ]
)  # fmt: skip
"""
key          unique in the split
file_name    as in the source; empty if it is KEY.jpg
image        digest of where the bytes came from and of their version, as in the file's name under `images/`
annotations  digest of the boxes and of everything else that the source says of the image
crc32        of its JPEG and JSON in the shards; null if it was listed but could not be used
"""

_HEADER = b"kubedet"
_REMEDY = "run the step of these data again, which writes it; if the data are deleted, restore a copy"
_OF_IMAGE = ["key", "file_name", "origin", "version"]
_OF_ANNOTATIONS = ["width", "height", "orientation", "extra", "boxes"]


@dataclass(frozen=True)
class Header:
    """The origin of a record; shards and raw images by their fingerprints."""

    shards: str
    raw: str
    source: str
    classes: list[str]
    """Names by label."""


@dataclass(frozen=True)
class RecordedImage:
    """A row of a record, with digests as 16 hex digits."""

    key: str
    file_name: str
    split: str
    image: str
    annotations: str
    seen: bool
    """Whether it is in the shards."""


@dataclass(frozen=True)
class DatasetDiff:
    """How a source differs from a record."""

    new: int = 0
    changed: int = 0
    """Images with the same key and other bytes or annotations."""
    removed: int = 0
    other_classes: bool = False
    excluded: int = 0
    """Removed images that are in `trainer.data.exclusions`."""

    @property
    def images(self) -> int:
        """New, changed and removed images together."""
        return self.new + self.changed + self.removed

    def __str__(self) -> str:
        counts = f"{self.new} new, {self.changed} changed, {self.removed} removed images"
        return counts + (", and other classes" if self.other_classes else "")


def place(data_root: str, shards: str) -> str:
    """Return the URI of the record of shards with this fingerprint."""
    return storage.join(data_root, FOLDER, f"{shards}{SUFFIX}")


def listed(data_root: str) -> list[str]:
    """Return the fingerprints of all shards that have a record.

    Raises:
        StorageError: the data root cannot be read.
    """
    names = storage.list_files(storage.join(data_root, FOLDER))
    return [name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)]


def write(raw: RawManifest, index: ShardIndex, data_root: str) -> None:
    """Write the record of shards, unless a sound one exists.

    Raises:
        DataError: the raw tables are damaged.
        StorageError: the data root cannot be read or written.
    """
    uri = place(data_root, index.fingerprint)
    try:
        if storage.exists(uri) and _open(uri):
            return
    except DamagedError as error:
        logger.warning("%s; writing it again", error.message)
    content = Header(index.fingerprint, raw.fingerprint, raw.source, index.names)
    schema = ROW.with_metadata({_HEADER: json.dumps(vars(content))})
    with (
        new_hashed_file(uri, note=True) as (path, _),
        pq.ParquetWriter(path, schema, compression="zstd") as file,
    ):
        for split in raw.splits:
            checksums: dict[int, int] = {}
            if split in index.splits:
                data = storage.read_bytes(storage.join(index.uri, f"{split}.samples.npy"))
                samples = np.load(io.BytesIO(data), allow_pickle=False)
                checksums = dict(zip(samples["image_id"].tolist(), samples["crc32"].tolist(), strict=True))
            for ids, keys, names, images, annotations in _rows(raw.table(split)):
                columns = [
                    pa.array(keys),
                    pa.array(["" if n == f"{k}.jpg" else n for k, n in zip(keys, names, strict=True)]),
                    pa.array([split] * len(keys)).dictionary_encode().cast(ROW.field("split").type),
                    pa.array(images),
                    pa.array(annotations),
                    pa.array([checksums.get(image_id) for image_id in ids], pa.uint32()),
                ]
                file.write_table(pa.Table.from_arrays(columns, schema=schema))


def header(uri: str) -> Header:
    """Return the origin of a record.

    Raises:
        StorageError: it cannot be read or is damaged.
    """
    content = json.loads(_open(uri).schema_arrow.metadata[_HEADER])
    return typed_json.load(Header, content, uri, _REMEDY)


def diff(planned: RawManifest, uri: str, excluded: frozenset[str] = frozenset()) -> DatasetDiff:
    """Compare the tables of a plan or raw manifest with a record; no image is read.

    `excluded` are keys and file names of images that the plan leaves out on request.

    Raises:
        DataError: a table is damaged.
        StorageError: something cannot be read; DamagedError: the record is damaged.
    """
    now = _sorted(
        (_numbers(repeat(split), rows.keys), rows.images, rows.annotations)
        for split in planned.splits
        for rows in _rows(planned.table(split))
    )
    before = _sorted(
        (
            _numbers(batch["split"].to_pylist(), batch["key"].to_pylist()),
            batch["image"].to_numpy(),
            batch["annotations"].to_numpy(),
        )
        for batch in _open(uri).iter_batches(columns=["key", "split", "image", "annotations"])
    )
    both, at_now, at_before = np.intersect1d(now[0], before[0], assume_unique=True, return_indices=True)
    same = (now[1][at_now] == before[1][at_before]) & (now[2][at_now] == before[2][at_before])
    return DatasetDiff(
        new=len(now[0]) - len(both),
        changed=int((~same).sum()),
        removed=len(before[0]) - len(both),
        other_classes=header(uri).classes != [category.name for category in planned.categories],
        excluded=sum(image.seen for image in find(uri, excluded)),
    )


def find(uri: str, names: frozenset[str]) -> Iterator[RecordedImage]:
    """Yield the images with one of these names: key, file name, or digest of image or annotations.

    Raises:
        StorageError: the record cannot be read or is damaged.
    """
    if not names:
        return
    digests = pa.array([int(name, 16) for name in names if re.fullmatch("[0-9a-f]{16}", name)], pa.uint64())
    # The file name KEY.jpg is not stored.
    keys = pa.array(sorted({*names, *(name.removesuffix(".jpg") for name in names)}), pa.string())
    for batch in _open(uri).iter_batches():
        chosen = pc.or_(pc.is_in(batch["key"], keys), pc.is_in(batch["file_name"], keys))
        for name in ("image", "annotations"):
            chosen = pc.or_(chosen, pc.is_in(batch[name], digests))
        for row in batch.filter(chosen).to_pylist():
            key, file_name, split, image, annotations, crc32 = row.values()
            found = RecordedImage(
                key,
                file_name or f"{key}.jpg",
                split,
                f"{image:016x}",
                f"{annotations:016x}",
                crc32 is not None,
            )
            if {key, found.file_name, found.image, found.annotations} & names:
                yield found


def excluded_in(data_root: str, shards: str) -> int:
    """Return how many excluded images the shards with this fingerprint had."""
    uri = place(data_root, shards)
    if not exclusions.read(data_root) or not storage.exists(uri):
        return 0
    return sum(image.seen for image in find(uri, exclusions.names(data_root, header(uri).source)))


class _Rows(NamedTuple):
    """A block of a raw table; the digests of images and annotations are uint64."""

    ids: list[int]
    keys: list[str]
    names: list[str]
    images: np.ndarray
    annotations: np.ndarray


def _rows(table: Table) -> Iterator[_Rows]:
    for block in range(table.blocks):
        columns = table.columns(block, ["image_id", *_OF_IMAGE])
        described = zip(*(columns[name] for name in _OF_IMAGE), strict=True)
        images = [int(image_keys.place_digest(image_keys.place(*row)), 16) for row in described]
        annotations = _annotations(table.batch(block, _OF_ANNOTATIONS))
        ids, keys, names = columns["image_id"], columns["key"], columns["file_name"]
        yield _Rows(ids, keys, names, np.array(images, np.uint64), annotations)


def _annotations(rows: pa.Table) -> np.ndarray:
    """Return a digest of what the source says of each image, uint64 [rows]; the order of boxes is ignored."""
    lists = rows.column("boxes").combine_chunks()
    boxes = lists.flatten()
    fields = [np.asarray(boxes.field(n), np.float64) for n in range(boxes.type.num_fields)]
    values = np.stack(fields, axis=1).astype("<f8") if fields else np.zeros((0, 0))
    values += 0.0  # Turns -0 into 0.
    ends = np.append(0, np.cumsum(lists.value_lengths().to_numpy(zero_copy_only=False)))
    texts = zip(*(rows.column(name).to_pylist() for name in _OF_ANNOTATIONS[:-1]), strict=True)
    digests = np.empty(len(rows), np.uint64)
    for row, text in enumerate(texts):
        of_row = values[ends[row] : ends[row + 1]]
        ordered = of_row[np.lexsort(of_row.T)] if len(of_row) > 1 else of_row
        hashed = hashlib.blake2b(repr(text).encode() + ordered.tobytes(), digest_size=8)
        digests[row] = int.from_bytes(hashed.digest(), "little")
    return digests


Columns = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Of each image, uint64: a number for split and key, digest of the image, digest of its annotations."""


def _sorted(parts: Iterator[Columns]) -> Columns:
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    if not columns:
        return (np.zeros(0, np.uint64),) * 3
    number, first = np.unique(columns[0], return_index=True)
    return number, columns[1][first], columns[2][first]


def _numbers(splits: Iterable[str], keys: list[str]) -> np.ndarray:
    pairs = zip(splits, keys, strict=False)
    return np.array([image_keys.number(f"{split}/{key}") for split, key in pairs], np.uint64)


def _open(uri: str) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(noted_copy(uri))
    except DamagedError as error:
        raise DamagedError(error.message, fix=_REMEDY) from None
    except (pa.ArrowException, OSError) as error:
        check_resources(error, uri)
        raise DamagedError(f"{uri} is damaged: {str(error).splitlines()[0]}", fix=_REMEDY) from None
    if _HEADER not in (file.schema_arrow.metadata or {}):
        raise DamagedError(f"{uri} is not a record of shards", fix=_REMEDY)
    return file
