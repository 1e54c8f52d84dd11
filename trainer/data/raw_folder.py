"""Reads, checks and writes the files of a folder of raw images.

<raw>/plan.json                     what the source lists
<raw>/<split>.parquet               a table of images and annotations
<raw>/fetched/<k>-of-<n>.parquet    what one of n partitions fetched, and its hash in a file next to it
<raw>/sizes-<content>.npy           bytes of each image, by id; 0 if it could not be fetched
<raw>/sums-<digest>.npy             place, bytes and sha256 of each image, by id
<raw>/failed.csv                    the images that could not be fetched, and why
<raw>/manifest.json                 written last

A table is a Parquet file with one row per image; its row groups are blocks of bounded size. No file names
another by its whole URI, so a data root may be moved, copied or mounted elsewhere.
"""

import csv
import hashlib
import io
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trainer import storage
from trainer.base import typed_json
from trainer.base.errors import DamagedError, DataError, FormError, MissingError
from trainer.base.os_errors import check_resources
from trainer.data.problem_counts import BAD_IMAGES, TRIED_AGAIN, UNLISTED_BOXES, Cases, Problems
from trainer.data.samples import RawRow
from trainer.data.sources.source import SOURCE_ROW

logger = logging.getLogger(__name__)

VERSION = 5
"""Increase it if the same source gives other raw tables."""

BLOCK = 1000
"""Images of a block."""

ROW = pa.schema([("image_id", pa.int64()), ("key", pa.string()), *SOURCE_ROW])
"""A row of a split's table: an id that is unique in the data set, a key that is unique in the split."""

PLAN, MANIFEST = "plan.json", "manifest.json"

SUM = np.dtype([("place", "<u8"), ("bytes", "<i4"), ("sha256", "V32")])
"""One row per image: digest of its place (see `image_keys.place`), bytes (0: not fetched), and hash."""

UNKNOWN_HASH = bytes(32)
_REMEDY = "run the same command again, or `kubedet data verify --repair {}`: both write it again"


@contextmanager
def new_hashed_file(uri: str, *, note: bool = False) -> Iterator[tuple[Path, list[str]]]:
    """Yield a path to write to and a list that gets the file's sha256; `note` writes `<uri>.sha256`."""
    digest: list[str] = []
    with storage.new_file(uri, sha256=lambda: digest[0], confirm=True) as path:
        yield path, digest
        with path.open("rb") as written:
            digest.append(hashlib.file_digest(written, "sha256").hexdigest())
        if note:  # First: a file without its hash would stay without it.
            storage.write_bytes(f"{uri}.sha256", f"{digest[0]}  {uri.rpartition('/')[2]}\n".encode())


def noted_copy(uri: str) -> Path:
    """Return a local copy of a file, checked against `<uri>.sha256` if that exists.

    Raises:
        StorageError: it cannot be read; DamagedError: it has another hash.
    """
    noted = f"{uri}.sha256"
    digest = storage.read_bytes(noted).decode("ascii", "replace") if storage.exists(noted) else ""
    return storage.local_copy(uri, sha256=digest.partition(" ")[0])


def write_table(uri: str, batches: Iterable[pa.RecordBatch]) -> str:
    """Write rows of ROW as a table in blocks of BLOCK rows; return its sha256.

    Raises:
        StorageError: it cannot be written.
    """
    with new_hashed_file(uri) as (path, digest), pq.ParquetWriter(path, ROW, compression="zstd") as file:
        pending = ROW.empty_table()
        for batch in batches:
            pending = pa.concat_tables([pending, pa.Table.from_batches([batch])])
            ready = len(pending) - len(pending) % BLOCK
            if ready:
                file.write_table(pending.slice(0, ready), row_group_size=BLOCK)
                # Copied: a slice would keep all rows in memory.
                pending = pa.Table.from_batches(pending.slice(ready).combine_chunks().to_batches(), ROW)
        if len(pending):
            file.write_table(pending, row_group_size=BLOCK)
    return digest[0]


class Table:
    """A complete table."""

    def __init__(self, uri: str, sha256: str = "") -> None:
        """Open it, in the local cache if it is in an object store; `sha256` "" is unknown.

        Raises:
            StorageError: it is missing or cannot be read; DamagedError: it has another hash.
            DataError: it is no table.
        """
        self.uri = uri
        with self._errors():
            self._file = pq.ParquetFile(storage.local_copy(uri, sha256=sha256))
            if not self._file.schema_arrow.equals(ROW):
                raise pa.ArrowInvalid("it has other columns")

    def __len__(self) -> int:
        """Rows."""
        return self._file.metadata.num_rows

    @property
    def blocks(self) -> int:
        """Blocks; all but the last have BLOCK rows."""
        return self._file.metadata.num_row_groups

    def batch(self, block: int, names: list[str]) -> pa.Table:
        """Return some columns of a block."""
        with self._errors():
            return self._file.read_row_group(block, columns=names)

    def columns(self, block: int, names: list[str]) -> dict[str, list[Any]]:
        """Return some columns of a block as lists, by name."""
        return self.batch(block, names).to_pydict()

    def rows(self, block: int, positions: list[int] | None = None) -> list[RawRow]:
        """Return all rows of a block, or those at some positions, as dictionaries."""
        group = self.batch(block, ROW.names)
        rows: list[RawRow] = (group if positions is None else group.take(positions)).to_pylist()
        return rows

    def box_counts(self) -> np.ndarray:
        """Boxes of each row of the table, int64 [rows]."""
        chunks = [
            chunk for block in range(self.blocks) for chunk in self.batch(block, ["boxes"])["boxes"].chunks
        ]
        return np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in chunks])

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            check_resources(error, self.uri)  # Lack of memory is no damage.
            raise DataError(
                f"{self.uri} is damaged: {error}", fix="run the command that made it again: it replaces it"
            ) from None


@dataclass(frozen=True)
class Category:
    """A class of the data."""

    id: int
    """Label, from 0."""
    name: str
    original_id: int | str = ""
    """Of the source."""


@dataclass(frozen=True)
class SplitCounts:
    """Images and boxes of a split."""

    images: int
    boxes: int


@dataclass(frozen=True)
class RawManifest:
    """The listing of a source (kind "plan"), or the outcome of its download (kind "raw")."""

    kind: str
    version: int
    fingerprint: str
    source: str
    images: str
    """URI of the folder of the images."""
    splits: dict[str, SplitCounts]
    categories: list[Category]
    hierarchy: dict[str, list[int]]
    """Labels of all categories above one, by its label as text."""
    problems: dict[str, Cases]
    tables: dict[str, str] = field(default_factory=dict)
    """sha256 of the table of each split."""
    warnings: list[str] | None = None
    """See `trainer.data.plausibility`; None if it was not checked."""
    settings: dict[str, Any] | None = None
    """Keys of the section `data` that it was made with; None in files from before 0.2."""
    uri: str = ""
    """Of the folder."""
    content: str = ""
    """Digest of the fetched images, see `content_of`; empty in a plan."""
    sums: str = ""
    """sha256 of the file of rows of SUM."""
    unfetched: int = 0
    """Images that the source was asked for and did not give."""
    data_version: str = ""
    """Name of these data, see `components.data_versions`."""

    @classmethod
    def load(cls, record: Any, where: str) -> "RawManifest":
        """Return what `to_json` gave.

        Raises:
            FormError: it is of another form.
        """
        return typed_json.load(cls, record, where, "run the download step again")

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, without empty fields that are optional."""
        return {key: value for key, value in asdict(self).items() if value not in (None, "")}

    @property
    def listed_images(self) -> int:
        """Images of all splits."""
        return sum(split.images for split in self.splits.values())

    def check(self, where: str, problems: Problems, max_bad_fraction: float) -> None:
        """Check the problems of this and earlier steps; `where` names the data in the message.

        Raises:
            DataError: a larger fraction of images or boxes is bad.
        """
        before = Problems.of(self.problems)
        problems.check(
            where,
            images=self.listed_images + before.total(BAD_IMAGES),
            boxes=sum(split.boxes for split in self.splits.values()) + before.total(UNLISTED_BOXES),
            max_bad_fraction=max_bad_fraction,
        )

    def table(self, split: str) -> Table:
        """Open the table of a split; see `Table`."""
        return Table(storage.join(self.uri, f"{split}.parquet"), self.tables.get(split, ""))

    def write(self) -> None:
        """Write it into its folder.

        Raises:
            StorageError: it cannot be written.
        """
        stored = self.to_json() | {"images": f"images/{_last(self.images)}"}
        del stored["uri"]
        storage.write_json(storage.join(self.uri, PLAN if self.kind == "plan" else MANIFEST), stored)


def read_plan(folder: str) -> RawManifest:
    """Return the plan of a folder of raw images, with its present URIs.

    Raises:
        StorageError: it is missing, cannot be read, or is damaged.
        DataError: it is of a newer version, or of another form.
    """
    return _read(folder, PLAN, "plan")


def read_manifest(folder: str) -> RawManifest:
    """Return the manifest of a folder of raw images; see `read_plan`."""
    return _read(folder, MANIFEST, "raw")


def _read(folder: str, name: str, kind: str) -> RawManifest:
    place, remedy, uri = storage.join(folder, name), _REMEDY.format(folder), storage.absolute(folder)
    record = storage.read_json(place, storage.Form(kind, VERSION, remedy=remedy))
    root = storage.parent(storage.parent(uri))
    raw = typed_json.load(RawManifest, record | {"uri": uri}, place, remedy)
    return replace(raw, images=storage.join(root, "images", _last(raw.images)))


def _last(uri: str) -> str:
    return uri.rpartition("/")[2]


def find_plan(folder: str) -> RawManifest | None:
    """Return the plan of a folder if it and its tables are complete, else None.

    Raises:
        DataError: it is of a newer version.
        StorageError: the folder cannot be read.
    """
    if not storage.exists(storage.join(folder, PLAN)):
        return None
    try:
        planned = read_plan(folder)
        for split in planned.splits:
            table = storage.join(folder, f"{split}.parquet")
            storage.local_copy(table, sha256=planned.tables.get(split, ""))
    except (DamagedError, FormError, MissingError) as error:
        logger.warning("%s; repairing it from the source", error.message)
        return None
    return planned


def find_manifest(planned: RawManifest) -> RawManifest | None:
    """Return the manifest of a finished download of a plan if it is complete, else None; see `find_plan`."""
    if not storage.exists(storage.join(planned.uri, MANIFEST)):
        return None
    try:
        manifest = read_manifest(planned.uri)
        read_sizes(manifest.uri, manifest.content)
        read_sums(manifest)
    except (DamagedError, FormError, MissingError) as error:
        logger.warning("%s; repairing it", error.message)
        return None
    return manifest if manifest.tables == planned.tables else None


def content_of(sizes: np.ndarray) -> str:
    """Return 16 hex digits that change with the fetched images, from their bytes (0: none)."""
    return hashlib.sha256(sizes.astype("<i4").tobytes()).hexdigest()[:16]


def sizes_uri(raw: str, content: str) -> str:
    """Return the URI of the bytes of each image: a .npy file, int32 [images], 0 if one was not fetched."""
    return storage.join(raw, f"sizes-{content}.npy")


def read_sizes(raw: str, content: str) -> np.ndarray:
    """Return the bytes of each image by id - 1, int32; 0 if it was not fetched.

    Raises:
        DamagedError: they are not those of `content`.
        StorageError: they cannot be read.
    """
    uri = sizes_uri(raw, content)
    sizes = _array(uri, storage.read_bytes(uri))
    if content_of(sizes) != content:
        raise DamagedError(f"{uri} is damaged: it differs from its name", fix=_REMEDY.format(raw))
    return sizes


def read_sums(raw: RawManifest) -> np.ndarray | None:
    """Return rows of SUM by id - 1; None if the manifest is from before 0.2.

    Raises:
        DamagedError: they are not those of the manifest.
        StorageError: they cannot be read.
    """
    if not raw.sums:
        return None
    uri = storage.join(raw.uri, f"sums-{raw.sums[:16]}.npy")
    try:
        return _array(uri, storage.read_bytes(uri, sha256=raw.sums))
    except DamagedError as error:
        raise DamagedError(error.message, fix=_REMEDY.format(raw.uri)) from None


def known_hash(sums: np.ndarray | None, image_id: int) -> str:
    """Return the sha256 of an image; "" if it is unknown."""
    if sums is None:
        return ""
    digest = bytes(sums["sha256"][image_id - 1])
    return "" if digest == UNKNOWN_HASH else digest.hex()


def hash_of(data: bytes) -> str:
    """Return the sha256 of an image's bytes."""
    return hashlib.sha256(data).hexdigest()


def write_arrays(raw: str, sums: np.ndarray, failures: list["Failure"]) -> tuple[str, str]:
    """Write sizes, sums (rows of SUM by id - 1) and failed.csv; return their digests."""
    content, data = content_of(sums["bytes"]), _bytes(sums)
    digest = hashlib.sha256(data).hexdigest()
    storage.write_bytes(sizes_uri(raw, content), _bytes(sums["bytes"]), confirm=True)
    storage.write_bytes(storage.join(raw, f"sums-{digest[:16]}.npy"), data, confirm=True)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = Failure._fields[:-1]
    writer.writerow(columns)
    writer.writerows(failure[: len(columns)] for failure in failures)
    storage.write_bytes(storage.join(raw, "failed.csv"), text.getvalue().encode())
    return content, digest


def _bytes(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _array(uri: str, data: bytes) -> np.ndarray:
    try:
        return np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DamagedError(f"{uri} is damaged: {error}", fix=_REMEDY.format(storage.parent(uri))) from error


class Failure(NamedTuple):
    """An image that could not be fetched."""

    split: str
    file_name: str
    origin: str
    reason: str
    detail: str
    requested: bool = True
    """Whether the source was asked for it; False if its listing shows the fault."""

    @property
    def message(self) -> str:
        """The image and the reason."""
        return f"{self.split}/{self.file_name}: {self.detail}"


_REPORT = pa.schema(
    [("image_id", pa.int64()), ("bytes", pa.int32()), *((name, pa.string()) for name in
     ("split", "file_name", "origin", "reason", "detail")),
     ("place", pa.uint64()), ("sha256", pa.binary(32)), ("requested", pa.bool_())]
)  # fmt: skip


class Fetched(NamedTuple):
    """The images of one or all partitions of a download."""

    sums: np.ndarray
    """Rows of SUM of all images of the plan by id - 1: 0 bytes if one was not fetched."""
    failures: dict[int, Failure]
    """By id."""


def write_report(planned: RawManifest, partition: int, partitions: int, fetched: Fetched) -> None:
    """Write what one of several partitions fetched."""
    ids = np.flatnonzero(fetched.sums["bytes"]) + 1
    mine = fetched.sums[ids - 1]
    columns = {name: pa.array(np.ascontiguousarray(mine[name])) for name in ("bytes", "place")}
    columns["image_id"] = pa.array(ids)
    columns["sha256"] = pa.array(np.ascontiguousarray(mine["sha256"]).tolist(), pa.binary(32))
    stored = pa.table([columns.get(one.name, pa.nulls(len(ids), one.type)) for one in _REPORT], _REPORT)
    failed = pa.Table.from_pylist(
        [{"image_id": key, "bytes": 0, **failure._asdict()} for key, failure in fetched.failures.items()],
        _REPORT,
    )
    uri = storage.join(planned.uri, "fetched", f"{partition}-of-{partitions}.parquet")
    with new_hashed_file(uri, note=True) as (path, _):
        pq.write_table(pa.concat_tables([stored, failed]).sort_by("image_id"), path)


def read_reports(planned: RawManifest, partitions: int) -> Fetched:
    """Return the images that all partitions of a download fetched.

    Raises:
        DamagedError: a report is damaged.
        StorageError: a report is missing: that partition has not been fetched.
    """
    folder = storage.join(planned.uri, "fetched")
    names = (f"{partition}-of-{partitions}.parquet" for partition in range(partitions))
    return _gathered(planned, [_report(storage.join(folder, name)) for name in names])


def known_fetched(planned: RawManifest) -> Fetched:
    """Return the images of all readable reports, also those of other numbers of partitions.

    If reports differ on why an image could not be fetched, a lasting reason is taken.
    """
    folder = storage.join(planned.uri, "fetched")
    reports = []
    for name in storage.list_files(folder):
        if name.endswith(".parquet"):
            try:
                reports.append(_report(storage.join(folder, name)))
            except DamagedError as error:
                logger.warning("%s; repairing it", error.message)
    return _gathered(planned, reports)


def _report(uri: str) -> pa.Table:
    path = noted_copy(uri)
    try:
        return pq.read_table(path).select(_REPORT.names).cast(_REPORT)
    except (pa.ArrowException, OSError, KeyError) as error:
        check_resources(error, uri)
        raise DamagedError(
            f"{uri} is damaged: {str(error).splitlines()[0]}", fix="run the download again: it replaces it"
        ) from None


def _gathered(planned: RawManifest, reports: list[pa.Table]) -> Fetched:
    sums = np.zeros(planned.listed_images, SUM)
    failed: list[dict[str, Any]] = []
    for report in reports:
        is_stored = pc.and_(
            pc.greater(report["bytes"], 0), pc.less_equal(report["image_id"], planned.listed_images)
        )
        stored = report.filter(is_stored)
        at = stored["image_id"].to_numpy() - 1
        sums["bytes"][at] = stored["bytes"].to_numpy()
        sums["place"][at] = pc.fill_null(stored["place"], 0).to_numpy()
        hashes = b"".join(pc.fill_null(stored["sha256"], UNKNOWN_HASH).to_pylist())
        sums["sha256"][at] = np.frombuffer(hashes, "V32")
        failed += report.filter(pc.equal(report["bytes"], 0)).to_pylist()
    failed.sort(key=lambda row: row["reason"] not in TRIED_AGAIN)
    return Fetched(
        sums, {row["image_id"]: Failure(*(row[name] for name in Failure._fields)) for row in failed}
    )
