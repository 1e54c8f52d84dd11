"""The report of one partition of a download: a Parquet table with a row for each image.

A row holds the image's id in the plan and its bytes, or 0 bytes and the reason why it was not fetched.
"""

from array import array
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trainer import storage
from trainer.data.problem_counts import TRIED_AGAIN

_ROW = pa.schema(
    [("image_id", pa.int64()), ("bytes", pa.int32()), *((name, pa.string()) for name in
     ("split", "file_name", "origin", "reason", "detail"))]
)  # fmt: skip


class Failure(NamedTuple):
    """An image that could not be fetched."""

    split: str
    file_name: str
    origin: str
    reason: str
    detail: str

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


def write(uri: str, ids: "array[int]", sizes: "array[int]", failures: Mapping[int, Failure]) -> None:
    """Write a report.

    Args:
        uri: its place.
        ids: of the images that are there, int64.
        sizes: their bytes, int32.
        failures: by id, the images that could not be fetched.
    """
    failed = pa.Table.from_pylist(
        [{"image_id": key, "bytes": 0, **failure._asdict()} for key, failure in failures.items()], _ROW
    )
    columns = [np.array(ids, np.int64), np.array(sizes, np.int32)]
    nothing = pa.nulls(len(ids), pa.string())
    stored = pa.Table.from_arrays([*map(pa.array, columns), *[nothing] * 5], schema=_ROW)
    with storage.new_file(uri) as path:
        # In order, so that it does not depend on who was first, or how often it was begun.
        pq.write_table(pa.concat_tables([stored, failed]).sort_by("image_id"), path)


def read(uri: str) -> tuple[np.ndarray, np.ndarray, list[Failure]]:
    """Read a partition's report.

    Returns:
        Ids of its images, their bytes (0 where it was not fetched), and its failures.

    Raises:
        StorageError: it is missing: that partition has not been fetched.
    """
    table = pq.read_table(storage.local_copy(uri))
    failed = table.filter(pc.equal(table["bytes"], 0)).select(list(Failure._fields))
    failures = [Failure(**row) for row in failed.to_pylist()]
    return table["image_id"].to_numpy(), table["bytes"].to_numpy(), failures


def known_failures(plan: str, partition: int, partitions: int, *, again: bool) -> dict[int, tuple[str, str]]:
    """Return reason and detail, by image id, of the failures of earlier downloads of a plan.

    Earlier downloads may have had another number of partitions: all reports count. Those of the other
    partitions of this number do not: they are about other images, and may be being written.

    Args:
        plan: see `place`.
        partition: see `place`.
        partitions: see `place`.
        again: whether to leave out failures that are worth another try.
    """
    own_uri = place(plan, partition, partitions)
    uris = [storage.join(plan, "fetched", name) for name in storage.list_files(storage.parent(own_uri))]
    condition = pc.field("bytes") == 0
    if again:
        condition &= ~pc.field("reason").isin(TRIED_AGAIN)
    rows = [
        row
        for uri in uris
        if uri == own_uri or not uri.endswith(f"-of-{partitions}.parquet")
        for row in pq.read_table(storage.local_copy(uri), filters=condition).to_pylist()
    ]
    # What one did not fetch, another may have found missing.
    rows.sort(key=lambda row: row["reason"] not in TRIED_AGAIN)
    return {row["image_id"]: (row["reason"], row["detail"]) for row in rows}


def worth_another_try(uri: str) -> bool:
    """Tell whether a partition's report names images that failed otherwise than by being missing."""
    return any(failure.reason in TRIED_AGAIN for failure in read(uri)[2])
