"""The report of one partition of a download: a Parquet table with a row for each image.

A row holds the image's id in the plan and its bytes with their hash, or 0 bytes and the reason why it was not
fetched. The report's own hash lies beside it.
"""

import hashlib
import logging
from array import array
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trainer import storage
from trainer.base.errors import DamagedError
from trainer.base.os_errors import refuse_want
from trainer.data.problem_counts import TRIED_AGAIN
from trainer.data.raw_folder import SUM

_LOG = logging.getLogger("data")
_SUM = ".sha256"
"""What is appended to a report's name for the file with its hash, as `sha256sum -c` reads it."""

_ROW = pa.schema(
    [("image_id", pa.int64()), ("bytes", pa.int32()), *((name, pa.string()) for name in
     ("split", "file_name", "origin", "reason", "detail")),
     ("place", pa.uint64()), ("sha256", pa.binary(32)), ("requested", pa.bool_())]
)  # fmt: skip
_ADDED = ("place", "sha256", "requested")
"""What reports of earlier programs lack."""


Fault = tuple[str, str, bool]
"""Reason, detail, and whether the source was asked."""


class Failure(NamedTuple):
    """An image that could not be fetched."""

    split: str
    file_name: str
    origin: str
    reason: str
    detail: str
    requested: bool = True
    """Whether the source was asked for it, and may answer otherwise another time; not where it lists none."""

    @property
    def message(self) -> str:
        """Name the image and the reason."""
        return f"{self.split}/{self.file_name}: {self.detail}"


def place(plan: str, partition: int, partitions: int) -> str:
    """Return the URI of a partition's report.

    Args:
        plan: URI of the folder with the plan.
        partition: which, from 0.
        partitions: how many.
    """
    return storage.join(plan, "fetched", f"{partition}-of-{partitions}.parquet")


def write(
    uri: str, ids: "array[int]", sizes: "array[int]", failures: Mapping[int, Failure], sums: np.ndarray
) -> None:
    """Write a report.

    Args:
        uri: its place.
        ids: of the images that are there, int64.
        sizes: their bytes, int32.
        failures: by id, the images that could not be fetched.
        sums: rows of `raw_folder.SUM` by id - 1: place and hash of each.
    """
    failed = pa.Table.from_pylist(
        [{"image_id": key, "bytes": 0, **failure._asdict()} for key, failure in failures.items()], _ROW
    )
    columns = [np.array(ids, np.int64), np.array(sizes, np.int32)]
    nothing = pa.nulls(len(ids), pa.string())
    mine = sums[np.array(ids, np.int64) - 1]
    added = [
        pa.array(np.ascontiguousarray(mine["place"])),
        pa.array(np.ascontiguousarray(mine["sha256"]).tolist(), pa.binary(32)),
        pa.nulls(len(ids), pa.bool_()),
    ]
    stored = pa.Table.from_arrays([*map(pa.array, columns), *[nothing] * 5, *added], schema=_ROW)
    known: list[str] = []
    with storage.new_file(uri, sha256=lambda: known[0], confirm=True) as path:
        # In order, so that it does not depend on who was first, or how often it was begun.
        pq.write_table(pa.concat_tables([stored, failed]).sort_by("image_id"), path)
        with path.open("rb") as file:
            known.append(hashlib.file_digest(file, "sha256").hexdigest())
        # First: a report that is there is not written again, and would have none for good.
        storage.write_bytes(uri + _SUM, f"{known[0]}  {uri.rpartition('/')[2]}\n".encode())


def digest(uri: str) -> str:
    """Return the sha256 of a report as it was written; "" where it is not known."""
    text = storage.read_bytes(uri + _SUM).decode("ascii", "replace") if storage.exists(uri + _SUM) else ""
    return text.partition(" ")[0]


def _table(uri: str) -> pa.Table:
    """Read a report with all columns of today.

    Raises:
        DamagedError: it is not what was written, or no report.
        StorageError: it is missing or cannot be read.
    """
    path = storage.local_copy(uri, sha256=digest(uri))
    try:
        table = pq.read_table(path)
        for name in _ADDED:
            if name not in table.column_names:
                table = table.append_column(_ROW.field(name), pa.nulls(len(table), _ROW.field(name).type))
        return table.select(_ROW.names).cast(_ROW)
    except (pa.ArrowException, OSError, KeyError) as error:
        refuse_want(error, uri)
        raise DamagedError(
            f"{uri} is damaged: {str(error).splitlines()[0]}", fix="run the download again: it writes it anew"
        ) from None


class Report(NamedTuple):
    """What one partition of a download brought."""

    ids: np.ndarray
    """int64 [images]."""
    sums: np.ndarray
    """Rows of `raw_folder.SUM` of these images; 0 bytes where one was not fetched."""
    failures: list[Failure]


def read(uri: str) -> Report:
    """Read a partition's report.

    Raises:
        DamagedError: it is not what was written.
        StorageError: it is missing: that partition has not been fetched.
    """
    table = _table(uri)
    failed = table.filter(pc.equal(table["bytes"], 0)).select(list(Failure._fields)).to_pylist()
    # An earlier program did not note which of the missing ones were asked for.
    failures = [Failure(**{**row, "requested": row["requested"] is not False}) for row in failed]
    sums = np.zeros(len(table), SUM)
    sums["bytes"] = table["bytes"].to_numpy()
    sums["place"] = pc.fill_null(table["place"], 0).to_numpy()
    hashes = pc.fill_null(table["sha256"], bytes(32)).to_pylist()
    sums["sha256"] = np.frombuffer(b"".join(hashes), "V32") if hashes else sums["sha256"]
    return Report(table["image_id"].to_numpy(), sums, failures)


def known_sums(plan: str, total: int) -> np.ndarray:
    """Return rows of `raw_folder.SUM` by id - 1, as all readable reports of a plan tell them."""
    known = np.zeros(total, SUM)
    folder = storage.parent(place(plan, 0, 1))
    for name in storage.list_files(folder):
        if name.endswith(".parquet"):
            with suppress(DamagedError):
                report = read(storage.join(folder, name))
                present = (report.sums["bytes"] > 0) & (report.ids <= total)
                known[report.ids[present] - 1] = report.sums[present]
    return known


def known_failures(plan: str, partition: int, partitions: int, *, again: bool) -> dict[int, Fault]:
    """Return the failures of earlier downloads of a plan, by image id.

    Earlier downloads may have had another number of partitions: all reports count. Those of the other
    partitions of this number do not: they are about other images, and may be being written.

    Args:
        plan: see `place`.
        partition: see `place`.
        partitions: see `place`.
        again: whether to leave out failures that are worth another try: those that the source was asked for.
    """
    own_uri = place(plan, partition, partitions)
    uris = [storage.join(plan, "fetched", name) for name in storage.list_files(storage.parent(own_uri))]
    condition = pc.field("bytes") == 0
    if again:
        condition &= pc.field("requested") == False  # noqa: E712 (of a column)
    rows = []
    for uri in uris:
        if uri.endswith(_SUM) or (uri != own_uri and uri.endswith(f"-of-{partitions}.parquet")):
            continue
        try:
            rows += _table(uri).filter(condition).to_pylist()
        except DamagedError as error:
            _LOG.warning("%s; mending it", error.message)
    # What one did not fetch, another may have found missing.
    rows.sort(key=lambda row: row["reason"] not in TRIED_AGAIN)
    return {row["image_id"]: (row["reason"], row["detail"], row["requested"] is not False) for row in rows}


def worth_another_try(uri: str) -> bool:
    """Tell whether a partition's report names images that the source may have by now, or cannot be read."""
    try:
        return any(failure.requested for failure in read(uri).failures)
    except DamagedError as error:
        _LOG.warning("%s; mending it", error.message)
        return True
