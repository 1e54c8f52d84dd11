"""What a run saw: `<data_root>/seen/<shards>.parquet`, a row for each image of a set of shards.

It outlives the raw data and the shards: from it follow what a model was trained on, who saw an image, and
what of a source is new since. A row is some 30 bytes; it is written block by block, from the raw tables.

    key         of the image, unique in its split
    file_name   as the source has it; empty where it is KEY.jpg
    split       train, val or test
    image       8 bytes: digest of where its bytes came from and of their version there, as far as the source
                tells one; it ends the name of its file under `images/` (`image_keys.place`)
    annotations 8 bytes: digest of its boxes and of all else that the source says of it
    crc32       of its JPEG and its JSON in the shards; null where it is listed but not in them (it could not
                be had or used): nothing was trained on it

Beside it lies its hash, `<shards>.parquet.sha256`; those that earlier programs wrote have none.
"""

import hashlib
import io
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer import storage
from trainer.base.errors import DamagedError
from trainer.base.os_errors import refuse_want
from trainer.data import forgotten, image_keys
from trainer.data.raw_folder import RawManifest, Table
from trainer.data.shard_folder import SAMPLE, ShardIndex

logger = logging.getLogger(__name__)

FOLDER = "seen"
SUFFIX = ".parquet"

ROW = pa.schema(
    [
        ("key", pa.string()), ("file_name", pa.string()), ("split", pa.dictionary(pa.int8(), pa.string())),
        ("image", pa.uint64()), ("annotations", pa.uint64()), ("crc32", pa.uint32()),
    ]
)  # fmt: skip
_HEADER = b"kubedet"
_SUM = ".sha256"
_REMEDY = "run the step of these data again, which writes it anew; where the data are gone, put a copy back"
_OF_IMAGE = ["image_id", "key", "file_name", "origin", "version"]
_OF_ANNOTATIONS = ["width", "height", "orientation", "extra", "boxes"]


def place(data_root: str, shards: str) -> str:
    """Return the URI of what was seen in the shards of a fingerprint."""
    return storage.join(data_root, FOLDER, f"{shards}{SUFFIX}")


def write(raw: RawManifest, index: ShardIndex, data_root: str) -> None:
    """Write what is in a set of shards, unless it is written already and whole.

    Args:
        raw: manifest of the raw images that they were made of.
        index: of the shards.
        data_root: URI under which data are kept.

    Raises:
        DataError: the raw tables are damaged.
        StorageError: the data root cannot be read or written.
    """
    uri = place(data_root, index.fingerprint)
    if storage.exists(uri) and _is_whole(uri):
        return
    header: dict[str, Any] = {"shards": index.fingerprint, "raw": raw.fingerprint, "source": raw.source}
    header["classes"] = index.names
    schema = ROW.with_metadata({_HEADER: json.dumps(header)})
    known: list[str] = []
    with storage.new_file(uri, sha256=lambda: known[0], confirm=True) as path:
        with pq.ParquetWriter(path, schema, compression="zstd") as file:
            for split in raw.splits:
                crc32 = _Checksums(index.uri, split) if split in index.splits else None
                for rows in _digests(raw.table(split)):
                    batch = rows.described(split, crc32)
                    file.write_table(pa.Table.from_arrays(batch, schema=schema))
        with path.open("rb") as written:
            known.append(hashlib.file_digest(written, "sha256").hexdigest())
        # First: what is there and whole is not written again, and would have none for good.
        storage.write_bytes(uri + _SUM, f"{known[0]}  {uri.rpartition('/')[2]}\n".encode())


def _is_whole(uri: str) -> bool:
    try:
        _open(uri)
    except DamagedError as error:
        logger.warning("%s; mending it", error.message)
        return False
    return True


def listed(data_root: str) -> list[str]:
    """Return the fingerprints of the shards of which it is known what was seen in them.

    Raises:
        StorageError: the data root cannot be read.
    """
    names = storage.list_files(storage.join(data_root, FOLDER))
    return [name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)]


@dataclass
class _Rows:
    """A block of a raw table in short."""

    ids: list[int]
    keys: list[str]
    names: list[str]
    images: np.ndarray
    annotations: np.ndarray

    def described(self, split: str, crc32: "_Checksums | None") -> list[pa.Array]:
        """Return the columns of ROW."""
        plain = zip(self.keys, self.names, strict=True)
        names = ["" if name == f"{key}.jpg" else name for key, name in plain]
        splits = pa.array([split] * len(self.keys)).dictionary_encode()
        count = len(self.ids)
        crc32_of_rows = crc32.of(np.array(self.ids)) if crc32 else pa.nulls(count, pa.uint32())
        columns = [pa.array(self.keys), pa.array(names), splits.cast(ROW.field("split").type)]
        return [*columns, pa.array(self.images), pa.array(self.annotations), crc32_of_rows]


class _Checksums:
    """CRC-32 of the samples of a split, by the image's id: 12 bytes for each."""

    def __init__(self, shards: str, split: str) -> None:
        data = storage.read_bytes(storage.join(shards, f"{split}.samples.npy"))
        samples = np.load(io.BytesIO(data), allow_pickle=False)
        assert samples.dtype == SAMPLE
        order = np.argsort(samples["image_id"])
        self._ids, self._crc32 = samples["image_id"][order], samples["crc32"][order]

    def of(self, ids: np.ndarray) -> pa.Array:
        if not len(self._ids):
            return pa.nulls(len(ids), pa.uint32())
        at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        return pa.array(self._crc32[at], mask=self._ids[at] != ids)


def _digests(table: Table) -> Iterator[_Rows]:
    """Yield the blocks of a raw table in short."""
    for block in range(table.blocks):
        columns = table.columns(block, _OF_IMAGE)
        described = zip(*(columns[name] for name in _OF_IMAGE[1:]), strict=True)
        images = [int(image_keys.place_digest(image_keys.place(*row)), 16) for row in described]
        annotations = _annotations(table.batch(block, _OF_ANNOTATIONS))
        ids, keys, names = columns["image_id"], columns["key"], columns["file_name"]
        yield _Rows(ids, keys, names, np.array(images, np.uint64), annotations)


def _annotations(rows: pa.Table) -> np.ndarray:
    """Return a digest of what the source says of each image, uint64 [rows]."""
    lists = rows.column("boxes").combine_chunks()
    boxes = lists.flatten()
    fields = [np.asarray(boxes.field(n), np.float64) for n in range(boxes.type.num_fields)]
    values = np.stack(fields, axis=1).astype("<f8") if fields else np.zeros((0, 0))
    # In an order of their own: a source may list the same boxes in another.
    values += 0.0  # Of -0 makes 0.
    ends = np.append(0, np.cumsum(lists.value_lengths().to_numpy(zero_copy_only=False)))
    said = zip(*(rows.column(name).to_pylist() for name in _OF_ANNOTATIONS[:-1]), strict=True)
    digests = np.empty(len(rows), np.uint64)
    for row, text in enumerate(said):
        of_row = values[ends[row] : ends[row + 1]]
        ordered = of_row[np.lexsort(of_row.T)] if len(of_row) > 1 else of_row
        hashed = hashlib.blake2b(repr(text).encode() + ordered.tobytes(), digest_size=8)
        digests[row] = int.from_bytes(hashed.digest(), "little")
    return digests


@dataclass(frozen=True)
class News:
    """How what a source holds now differs from what was seen."""

    new: int = 0
    changed: int = 0
    """Images of the same key with other bytes or annotations."""
    removed: int = 0
    other_classes: bool = False
    forgotten: int = 0
    """Of the removed: those that were to be forgotten (`trainer.data.forgotten`)."""

    @property
    def images(self) -> int:
        """New, changed and removed images together."""
        return self.new + self.changed + self.removed

    def __str__(self) -> str:
        """Say it."""
        counts = f"{self.new} new, {self.changed} changed, {self.removed} removed images"
        return counts + (", and other classes" if self.other_classes else "")


def news(planned: RawManifest, seen: str, forgotten: frozenset[str] = frozenset()) -> News:
    """Compare what a source holds now with what was seen. Memory: 32 bytes an image.

    Args:
        planned: what `download.plan` returned, or a raw manifest: its tables are read, and no image.
        seen: URI of what was seen, see `place`.
        forgotten: keys and file names that no run may have any more; they are in no table.

    Raises:
        DataError: a table is damaged.
        StorageError: something cannot be read; DamagedError: what was seen is not what was written.
    """
    now = _sorted(_planned_columns(planned))
    header, columns = _seen_columns(seen)
    before = _sorted(columns)
    both, at_now, at_before = np.intersect1d(now[0], before[0], assume_unique=True, return_indices=True)
    same = (now[1][at_now] == before[1][at_before]) & (now[2][at_now] == before[2][at_before])
    gone = list(find(seen, forgotten)) if forgotten else []
    return News(
        new=len(now[0]) - len(both),
        changed=int((~same).sum()),
        removed=len(before[0]) - len(both),
        other_classes=header["classes"] != [category.name for category in planned.categories],
        forgotten=sum(row["seen"] for row in gone),
    )


Columns = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Of each image: a number for split and key, digest of the image, digest of its annotations; uint64."""


def _sorted(parts: Iterator[Columns]) -> Columns:
    columns = [np.concatenate([np.zeros(0, np.uint64), *some]) for some in zip(*parts, strict=True)]
    if not columns:
        return (np.zeros(0, np.uint64),) * 3
    number, first = np.unique(columns[0], return_index=True)
    return number, columns[1][first], columns[2][first]


def _numbers(split: str, keys: list[str]) -> np.ndarray:
    return np.array([image_keys.number(f"{split}/{key}") for key in keys], np.uint64)


def _planned_columns(planned: RawManifest) -> Iterator[Columns]:
    for split in planned.splits:
        for rows in _digests(planned.table(split)):
            yield _numbers(split, rows.keys), rows.images, rows.annotations


def _open(uri: str) -> pq.ParquetFile:
    noted = storage.read_bytes(uri + _SUM).decode("ascii", "replace") if storage.exists(uri + _SUM) else ""
    try:
        file = pq.ParquetFile(storage.local_copy(uri, sha256=noted.partition(" ")[0]))
    except DamagedError as error:
        raise DamagedError(error.message, fix=_REMEDY) from None
    except (pa.ArrowException, OSError) as error:
        refuse_want(error, uri)
        raise DamagedError(f"{uri} is damaged: {str(error).splitlines()[0]}", fix=_REMEDY) from None
    if _HEADER not in (file.schema_arrow.metadata or {}):
        raise DamagedError(f"{uri} is not what was seen in shards", fix=_REMEDY)
    return file


def header(uri: str) -> dict[str, Any]:
    """Return shards, raw (fingerprints), source and classes (names by label) of what was seen."""
    return json.loads(_open(uri).schema_arrow.metadata[_HEADER])


def _seen_columns(uri: str) -> tuple[dict[str, Any], Iterator[Columns]]:
    file = _open(uri)

    def parts() -> Iterator[Columns]:
        for batch in file.iter_batches(columns=["key", "split", "image", "annotations"]):
            keys, splits = batch["key"].to_pylist(), batch["split"].to_pylist()
            pairs = zip(splits, keys, strict=True)
            numbers = np.array([image_keys.number(f"{split}/{key}") for split, key in pairs], np.uint64)
            yield numbers, batch["image"].to_numpy(), batch["annotations"].to_numpy()

    return json.loads(file.schema_arrow.metadata[_HEADER]), parts()


def find(uri: str, names: frozenset[str]) -> Iterator[dict[str, Any]]:
    """Yield the images that are meant: by key, file name, or digest of image or annotations (16 hex digits).

    Args:
        uri: see `place`.
        names: what is meant.

    Yields:
        key, file_name, split, image and annotations (hex), seen (whether it is in the shards).
    """
    digests = pa.array([int(text, 16) for text in names if _is_digest(text)], pa.uint64())
    texts = pa.array(sorted(names), pa.string())
    # A file name that is not kept: KEY.jpg.
    keys = pa.array(sorted({*names, *(text.removesuffix(".jpg") for text in names)}), pa.string())
    import pyarrow.compute as pc

    for batch in _open(uri).iter_batches():
        chosen = pc.or_(pc.is_in(batch["key"], keys), pc.is_in(batch["file_name"], texts))
        for name in ("image", "annotations"):
            chosen = pc.or_(chosen, pc.is_in(batch[name], digests))
        for row in batch.filter(chosen).to_pylist():
            name = row["file_name"] or f"{row['key']}.jpg"
            named = {row["key"], name, _hex(row["image"]), _hex(row["annotations"])}
            if named & names:
                yield {
                    "key": row["key"], "file_name": name, "split": row["split"], "image": _hex(row["image"]),
                    "annotations": _hex(row["annotations"]), "seen": row["crc32"] is not None,
                }  # fmt: skip


def forgotten_in(data_root: str, shards: str) -> int:
    """Return how many images that are to be forgotten a set of shards had, given its fingerprint."""
    uri = place(data_root, shards)
    if not forgotten.read(data_root) or not storage.exists(uri):
        return 0
    names = forgotten.names(data_root, header(uri)["source"])
    return sum(row["seen"] for row in find(uri, names)) if names else 0


def _hex(digest: int) -> str:
    return f"{digest:016x}"


def _is_digest(text: str) -> bool:
    return len(text) == 16 and not set(text) - set("0123456789abcdef")
