"""A zip or tar of a data set of any kind: unpacked, and read as the folder that it was."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pyarrow as pa

from trainer import storage
from trainer.base.errors import DataError
from trainer.data.problem_counts import Problems
from trainer.data.sources.archives import Unpacked, unpack
from trainer.data.sources.coco import CocoSource
from trainer.data.sources.recognition import KINDS, kind_of, refuse_foreign
from trainer.data.sources.row_format import SOURCE_ROW
from trainer.data.sources.source import AS_PUBLISHED, Listing, Reading, Rows, Source, refuse_reading


@dataclass(frozen=True)
class ArchiveSource:
    """A data set in a zip or tar."""

    kind: str
    """One of `recognition.KINDS`; "" is to be seen when it is unpacked."""
    location: str
    """URI of the archive."""
    reading: Reading = AS_PUBLISHED
    cpu_bound = False
    origins_are_uris = False

    @property
    def uri(self) -> str:
        """Name the archive and its kind, for which it is unpacked where nobody told."""
        return f"{self.kind or self._kind_and_root(unpack(self.location))[0]}:{self.location}"

    @property
    def images_uri(self) -> str:
        """Name where the bytes come from."""
        return f"archive:{self.location}"

    def listing(self) -> Listing:
        """Unpack the archive and list what is in it.

        Raises:
            DataError: it cannot be unpacked, or what is in it cannot be used.
            StorageError: it cannot be reached.
        """
        unpacked = unpack(self.location)
        try:
            listing = self._inner(unpacked).listing()
        except DataError as error:
            raise DataError(self._outside(error.message, unpacked), fix=error.fix) from None
        lines = [f"{name} {version}\n" for name, version in sorted(unpacked.versions.items())]
        digest = hashlib.sha256(f"{self.uri}\n".encode())
        digest.update("".join(lines).encode("utf-8", "surrogateescape"))
        splits = {
            split: ArchivedRows(rows, self, unpacked, listing.problems)
            for split, rows in listing.splits.items()
        }
        self.name_outside(listing.problems, unpacked)
        return replace(listing, splits=splits, state=digest.hexdigest())

    def read(self, origin: str) -> bytes:
        """Return an image's bytes."""
        archive, _, name = origin.partition("#")
        if archive != self.location or not name:
            return storage.read_bytes(origin)
        return storage.read_bytes(storage.join(unpack(self.location).folder, name))

    def name_outside(self, problems: Problems, unpacked: Unpacked) -> None:
        """Let examples name the archive, not the folder that it was unpacked into."""
        for examples in problems.examples.values():
            examples[:] = [self._outside(example, unpacked) for example in examples]

    def place(self, origin: str, version: str, unpacked: Unpacked) -> tuple[str, str]:
        """Return an image's origin and version as they are on any machine."""
        folder = f"{unpacked.folder}/"
        if not origin.startswith(folder):
            return origin, version
        name = origin.removeprefix(folder)
        return f"{self.location}#{name}", unpacked.versions[name]

    def _outside(self, text: str, unpacked: Unpacked) -> str:
        return text.replace(unpacked.folder, self.location)

    def _inner(self, unpacked: Unpacked) -> Source:
        kind, root = self._kind_and_root(unpacked)
        source = KINDS[kind](root, unpacked.folder)
        if isinstance(source, CocoSource):
            return replace(source, reading=self.reading)
        refuse_reading(source, self.reading)
        return source

    def _kind_and_root(self, unpacked: Unpacked) -> tuple[str, str]:
        """Return the kind of what is in the archive, and its folder: often one that holds all."""
        roots = [unpacked.folder, *_lone_folders(unpacked)]
        for root in reversed(roots):
            kind = kind_of(root)
            refuse_foreign(root, kind)
            if kind and self.kind in ("", kind):
                return kind, root
        if self.kind:
            return self.kind, roots[-1]
        raise DataError(
            f"{self.location} holds no data set that is known",
            fix="pack a folder with a COCO JSON, VOC's XML files, or a YOLO data.yaml, and its images",
        )


@dataclass
class ArchivedRows:
    """The images of a split, named by their place in the archive."""

    rows: Rows
    source: ArchiveSource
    unpacked: Unpacked = field(repr=False)
    problems: Problems = field(repr=False)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield rows of SOURCE_ROW."""
        for batch in self.rows.batches():
            pairs = zip(batch["origin"].to_pylist(), batch["version"].to_pylist(), strict=True)
            places = [self.source.place(*pair, self.unpacked) for pair in pairs]
            columns = {name: batch[name] for name in SOURCE_ROW.names}
            columns["origin"] = pa.array([origin for origin, _ in places], pa.string())
            columns["version"] = pa.array([version for _, version in places], pa.string())
            details = batch["fault_detail"].to_pylist()
            outside = [text.replace(self.unpacked.folder, self.source.location) for text in details]
            columns["fault_detail"] = pa.array(outside, pa.string())
            yield pa.RecordBatch.from_pydict(columns, schema=SOURCE_ROW)
        self.source.name_outside(self.problems, self.unpacked)


def _lone_folders(unpacked: Unpacked) -> Iterator[str]:
    """Yield the folders that hold all of an archive, the outer ones first."""
    parents = [name.split("/")[:-1] for name in unpacked.versions]
    for depth in range(min(map(len, parents), default=0)):
        if len({tuple(parts[: depth + 1]) for parts in parents}) > 1:
            return
        yield "/".join([unpacked.folder, *parents[0][: depth + 1]])
