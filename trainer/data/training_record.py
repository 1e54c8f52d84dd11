"""The images of each set of shards: `<data_root>/seen/<shards>.parquet`, one row per image.

It is kept when raw data and shards are deleted, and tells which images a model was trained on, who used an
image, and what changed in a source since. Its hash is in `<shards>.parquet.sha256`; older files have none.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trainer import storage
from trainer.base import typed_json
from trainer.base.errors import DamagedError
from trainer.base.os_errors import check_resources
from trainer.data import exclusions, image_keys
from trainer.data.raw_folder import RawManifest, new_hashed_file, noted_copy, npy_array
from trainer.data.shard_folder import ShardIndex, read_known
from trainer.data.tiles import TILE_ID_STEP

logger = logging.getLogger(__name__)

FOLDER = "seen"
SUFFIX = ".parquet"

ROW = pa.schema(
    [
        ("key", pa.string()),
        ("file_name", pa.string()),
        ("split", pa.dictionary(pa.int8(), pa.string())),
        ("image", pa.uint64()),
        ("annotations", pa.uint64()),
        ("crc32", pa.uint32()),
    ]
)
"""
key          unique in the split
file_name    as in the source; empty if it is KEY.jpg
image        digest of where the bytes came from and of their version, as in the file's name under `images/`
annotations  digest of the boxes and of everything else that the source says of the image
crc32        of its JPEG and JSON in the shards; null if it was listed but could not be used
"""

_HEADER = b"kubedet"
_REMEDY = "run the step of these data again, which writes it; if the data are deleted, restore a copy"
_IMAGE_COLUMNS = ["key", "file_name", "origin", "version"]
_ANNOTATION_COLUMNS = ["width", "height", "orientation", "extra", "boxes"]


@dataclass(frozen=True)
class Header:
    """The origin of a record; shards and raw images by their fingerprints."""

    shards: str
    raw: str
    source: str
    classes: list[str]  # Names by label.


@dataclass(frozen=True)
class RecordedImage:
    """A row of a record, with digests as 16 hex digits."""

    key: str
    file_name: str
    split: str
    image: str
    annotations: str
    seen: bool  # Whether it is in the shards.


@dataclass(frozen=True)
class DatasetDiff:
    """How a source differs from a record."""

    new: int = 0
    changed: int = 0  # Images with the same key and other bytes or annotations.
    removed: int = 0
    other_classes: bool = False
    excluded: int = 0  # Removed images that are in `trainer.data.exclusions`.

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
    """Return the fingerprints of all shards that have a record."""
    names = storage.list_files(storage.join(data_root, FOLDER))
    return [name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)]


def write(raw: RawManifest, index: ShardIndex, data_root: str) -> None:
    """Write the record of shards, unless a sound one exists."""
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
                name = f"{split}.samples.npy"
                samples = npy_array(f"{index.uri}/{name}", read_known(index, name), _REMEDY)
                images = (samples["image_id"] % TILE_ID_STEP).tolist()  # Tiles are of an image.
                checksums = dict(zip(images, samples["crc32"].tolist(), strict=True))
            for rows in _blocks(raw, split):
                ids = rows["image_id"].to_pylist()
                crc32 = pa.array([checksums.get(image_id) for image_id in ids], pa.uint32())
                file.write_table(rows.drop("image_id").append_column("crc32", crc32).cast(schema))


def header(uri: str) -> Header:
    """Return the origin of a record."""
    content = json.loads(_open(uri).schema_arrow.metadata[_HEADER])
    return typed_json.load(Header, content, uri, _REMEDY)


def diff(planned: RawManifest, uri: str, excluded: frozenset[str] = frozenset()) -> DatasetDiff:
    """Compare the tables of a plan or raw manifest with a record; no image is read.

    `excluded` are keys and file names of images that the plan leaves out on request.

    Raises:
        DataError: a table is damaged.
        StorageError: something cannot be read; DamagedError: the record is damaged.
    """
    now = _digests(rows for split in planned.splits for rows in _blocks(planned, split))
    before = _digests(_open(uri).iter_batches(columns=["key", "split", "image", "annotations"]))
    both, at_now, at_before = np.intersect1d(now[0], before[0], assume_unique=True, return_indices=True)
    changed = (now[1:, at_now] != before[1:, at_before]).any(axis=0)
    return DatasetDiff(
        new=now.shape[1] - len(both),
        changed=int(changed.sum()),
        removed=before.shape[1] - len(both),
        other_classes=header(uri).classes != planned.names,
        excluded=sum(image.seen for image in find(uri, excluded)),
    )


def _digests(blocks: Iterable[pa.RecordBatch | pa.Table]) -> np.ndarray:
    """Return, by rows, a number for split and key, and digests of image and annotations; uint64 [3, images].

    The images are sorted by their number, which is unique.
    """
    parts = [np.zeros((3, 0), np.uint64)]
    for rows in blocks:
        names = zip(rows["split"].to_pylist(), rows["key"].to_pylist(), strict=True)
        numbers = np.array([image_keys.number(f"{split}/{key}") for split, key in names], np.uint64)
        parts.append(np.stack([numbers, rows["image"].to_numpy(), rows["annotations"].to_numpy()]))
    columns = np.concatenate(parts, axis=1)
    return columns[:, np.unique(columns[0], return_index=True)[1]]


def _blocks(raw: RawManifest, split: str) -> Iterator[pa.Table]:
    """Yield rows of ROW for the blocks of a raw table, with image_id instead of crc32."""
    table = raw.table(split)
    for block in range(table.blocks):
        rows = table.batch(block, ["image_id", *_IMAGE_COLUMNS, *_ANNOTATION_COLUMNS])
        keys, names, *others = (rows[name].to_pylist() for name in _IMAGE_COLUMNS)
        places = [image_keys.place(*row) for row in zip(keys, names, *others, strict=True)]
        images = [int(image_keys.place_digest(place), 16) for place in places]
        columns = {
            "image_id": rows["image_id"],
            "key": keys,
            "file_name": ["" if n == f"{k}.jpg" else n for k, n in zip(keys, names, strict=True)],
            "split": pa.array([split] * len(keys)).dictionary_encode().cast(ROW.field("split").type),
            "image": np.array(images, np.uint64),
            "annotations": _annotation_digests(rows),
        }
        yield pa.table(columns)


def _annotation_digests(rows: pa.Table) -> np.ndarray:
    """Return a digest of what the source says of each image, uint64 [rows]; the order of boxes is ignored."""
    lists = rows.column("boxes").combine_chunks()
    boxes = lists.flatten()
    fields = [np.asarray(boxes.field(n), np.float64) for n in range(boxes.type.num_fields)]
    values = (np.stack(fields, axis=1) + 0.0).astype("<f8")  # Adding 0 turns -0 into 0.
    ends = np.append(0, np.cumsum(lists.value_lengths().to_numpy(zero_copy_only=False)))
    texts = zip(*(rows.column(name).to_pylist() for name in _ANNOTATION_COLUMNS[:-1]), strict=True)
    digests = np.empty(len(rows), np.uint64)
    for row, text in enumerate(texts):
        of_row = values[ends[row] : ends[row + 1]]
        ordered = of_row[np.lexsort(of_row.T)] if len(of_row) > 1 else of_row
        hashed = hashlib.blake2b(repr(text).encode() + ordered.tobytes(), digest_size=8)
        digests[row] = int.from_bytes(hashed.digest(), "little")
    return digests


def find(uri: str, names: frozenset[str]) -> Iterator[RecordedImage]:
    """Yield the images with one of these names: key, file name, or digest of image or annotations."""
    if not names:
        return
    digests = pa.array([int(name, 16) for name in names if re.fullmatch("[0-9a-f]{16}", name)], pa.uint64())
    # The file name KEY.jpg is not stored.
    keys = pa.array(sorted({*names, *(name.removesuffix(".jpg") for name in names)}), pa.string())
    for batch in _open(uri).iter_batches():
        chosen = pc.or_(pc.is_in(batch["key"], keys), pc.is_in(batch["file_name"], keys))
        for name in ("image", "annotations"):
            chosen = pc.or_(chosen, pc.is_in(batch[name], digests))
        for key, name, split, image, annotations, crc32 in map(dict.values, batch.filter(chosen).to_pylist()):
            found = RecordedImage(
                key, name or f"{key}.jpg", split, f"{image:016x}", f"{annotations:016x}", crc32 is not None
            )
            if {key, found.file_name, found.image, found.annotations} & names:
                yield found


def excluded_in(data_root: str, shards: str) -> int:
    """Return how many excluded images the shards with this fingerprint had."""
    uri = place(data_root, shards)
    if not exclusions.read(data_root) or not storage.exists(uri):
        return 0
    return sum(image.seen for image in find(uri, exclusions.names(data_root, header(uri).source)))


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
