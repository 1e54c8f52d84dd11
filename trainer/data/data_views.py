"""Views of data for inspection: shards, raw images or a source, with rows and pictures."""

import io
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from PIL import Image

from trainer import storage
from trainer.base.errors import DataError, StorageError
from trainer.config.schema import DataConfig
from trainer.data import raw_folder, sources
from trainer.data.decoding import read_sample
from trainer.data.image_keys import place
from trainer.data.images import UnreadableImage, normalize, place_box
from trainer.data.plausibility import merged
from trainer.data.problem_counts import Problems
from trainer.data.raw_folder import ROW, RawManifest
from trainer.data.samples import RawRow, bbox_of
from trainer.data.shard_folder import INDEX, ShardIndex, read_index
from trainer.data.shard_index import ShardDataset

_LARGEST, _QUALITY = 1600, 95
LOCAL_SAMPLE, REMOTE_SAMPLE = 2000, 100
"""Images of a split that `inspect` reads on this machine, and in an object store."""

Box = tuple[int, list[float], bool]
"""Label, [x, y, width, height] in pixels of the image, and whether it is a crowd region."""


class Picture(NamedTuple):
    """An image with its boxes."""

    file_name: str
    image: Image.Image | None
    """None if it cannot be read: `fault` says why."""
    boxes: list[Box]
    fault: str = ""


def open_view(text: str, config: DataConfig | None = None) -> "Shards | RawImages | SourceRows":
    """Open a folder of shards or of raw images by its URI, or a source by its text.

    Args:
        text: see `trainer.data.sources` for sources.
        config: how a source is read; None takes the defaults.

    Raises:
        DataError: it is unknown, unfinished, or was written by another version of this program.
        StorageError: it cannot be reached.
    """
    remote = storage.scheme(text) in storage.OBJECT_STORES
    if remote or storage.is_local(text):
        folder = storage.absolute(text)
        if _is_record(folder, INDEX, "shards"):
            return Shards(read_index(folder))
        if _is_record(folder, raw_folder.MANIFEST, "raw"):
            return RawImages(raw_folder.read_manifest(folder))
        _refuse_unfinished(folder)
        if remote and not storage.exists(folder) and next(iter(storage.scan(folder)), None) is None:
            raise DataError(f"there is nothing at {text}", fix="check the URI, and the endpoint it leads to")
    return SourceRows(text, config or DataConfig())


def _refuse_unfinished(folder: str) -> None:
    names = storage.list_states(folder)
    unfinished = ""
    if any(name.endswith(".tar") and f"{name.removesuffix('.tar')}.json" in names for name in names):
        unfinished = "shard"
    elif _is_record(folder, raw_folder.PLAN, "plan"):
        unfinished = "download"
    if unfinished:
        raise DataError(
            f"{folder} is incomplete: the {unfinished} step has not finished",
            fix="run it again: it continues its work",
        )


def _is_record(folder: str, name: str, kind: str) -> bool:
    """Return whether a folder has a JSON record of this kind."""
    uri = storage.join(folder, name)
    if not storage.exists(uri):
        return False
    record = storage.read_json(uri)
    return isinstance(record, dict) and record.get("kind") == kind


class Shards:
    """A folder that the shard step wrote."""

    kind = "shards"

    def __init__(self, index: ShardIndex) -> None:
        self.uri, self.index = index.uri, index
        self.names, self.splits = index.names, list(index.splits)

    def absent(self) -> Problems:
        """Return which files are missing or of another size, from a listing."""
        states = storage.list_states(self.uri, recursive=True)
        problems = Problems()
        sizes = {shard.name: shard.bytes for part in self.index.splits.values() for shard in part.shards}
        for name, size in (sizes | {name: file.bytes for name, file in self.index.files.items()}).items():
            if name not in states:
                problems.add("file missing", name)
            elif size != states[name].size:
                problems.add("file of another size", f"{name}: {states[name].size:,} bytes, not {size:,}")
        return problems

    def pictures(self, split: str, count: int, generator: np.random.Generator) -> list[Picture]:
        """Return some samples of a split, chosen at random."""
        dataset = ShardDataset(self.uri, split)
        chosen = np.sort(generator.choice(len(dataset), min(count, len(dataset)), replace=False))
        return [self._picture(dataset, int(index)) for index in chosen]

    def _picture(self, dataset: ShardDataset, index: int) -> Picture:
        try:
            pixels, record = read_sample(dataset, index)
            image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        except (DataError, StorageError) as error:
            return Picture(f"image id {dataset.samples[index]['image_id']}", None, [], error.message)
        boxes = [(box["category_id"], box["bbox"], bool(box["iscrowd"])) for box in record["annotations"]]
        return Picture(record["file_name"], image, boxes)


class RawImages:
    """A folder that the download step wrote."""

    kind = "raw images"
    box_format = ""

    def __init__(self, manifest: RawManifest) -> None:
        self.uri, self.manifest, self._images = manifest.uri, manifest, manifest.images
        self.names = [category.name for category in manifest.categories]
        self.splits = list(manifest.splits)

    def sizes(self) -> np.ndarray:
        """Return the bytes of each image by id - 1; 0 if it is not available."""
        return raw_folder.read_sizes(self.uri, self.manifest.content)

    def place(self, row: RawRow) -> str:
        """Return the URI of a row's image."""
        name = place(row["key"], row["file_name"], row["origin"], row["version"])
        return storage.join(self._images, name)

    @property
    def sample_size(self) -> int:
        """Images of a split that `inspect` reads."""
        return LOCAL_SAMPLE if storage.is_local(self._images) else REMOTE_SAMPLE

    def read(self, row: RawRow) -> bytes:
        """Return the image of a row; raise StorageError if it cannot be read."""
        return storage.read_bytes(self.place(row))

    def batches(self, split: str) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the available images, a bounded number at a time."""
        table, sizes = self.manifest.table(split), self.sizes()
        for block in range(table.blocks):
            rows = table.batch(block, ROW.names)
            stored = sizes[rows["image_id"].to_numpy() - 1] > 0
            yield from rows.filter(pa.array(stored)).combine_chunks().to_batches()

    def blocks(self, split: str) -> Iterator[list[RawRow]]:
        """Yield the rows of `batches` as dictionaries."""
        yield from (batch.to_pylist() for batch in self.batches(split))

    def problems(self) -> Problems:
        """Return what the source and the download found."""
        return Problems.of(self.manifest.problems)

    def pictures(self, split: str, count: int, generator: np.random.Generator) -> list[Picture]:
        """Return some images of a split, chosen at random."""
        table, sizes = self.manifest.table(split), self.sizes()
        stored = [
            (block, row)
            for block in range(table.blocks)
            for row, image_id in enumerate(table.columns(block, ["image_id"])["image_id"])
            if sizes[image_id - 1]
        ]
        chosen = np.sort(generator.choice(len(stored), min(count, len(stored)), replace=False))
        rows = [table.rows(block, [row])[0] for block, row in (stored[index] for index in chosen)]
        return [as_picture(row, self.read) for row in rows]


class Listing(RawImages):
    """The tables of a folder of raw images, of which no image is read."""

    kind = "listing"

    def batches(self, split: str) -> Iterator[pa.RecordBatch]:
        """Yield the rows of all listed images, a block at a time."""
        table = self.manifest.table(split)
        for block in range(table.blocks):
            yield from table.batch(block, ROW.names).combine_chunks().to_batches()

    def pictures(self, split: str, count: int, generator: np.random.Generator) -> list[Picture]:
        """Return nothing."""
        return []


class SourceRows:
    """A source, as it is published."""

    kind = "source"

    def __init__(self, text: str, config: DataConfig) -> None:
        """List it.

        Args:
            text: see `trainer.data.sources`.
            config: boxes_from, box_format, allow_hosts and merge_classes are used.

        Raises:
            DataError: it is missing, empty or not of its format.
        """
        self._source = sources.parse(text, config)
        self._listing = merged(self._source.listing()) if config.merge_classes else self._source.listing()
        self.uri = self._source.uri
        self.box_format = self._listing.box_format
        self.read_as = self._listing.read_as
        self.names = [category.name for category in self._listing.categories]
        self.splits = list(self._listing.splits)

    @property
    def sample_size(self) -> int:
        """Images of a split that `inspect` reads: none on the web, and none that are computed."""
        schemes = {storage.scheme(uri) for uri in sources.places(self.uri)}
        if self._source.cpu_bound or schemes & set(storage.WEB):
            return 0
        return REMOTE_SAMPLE if schemes & set(storage.OBJECT_STORES) else LOCAL_SAMPLE

    def read(self, row: RawRow) -> bytes:
        """Return the image of a row; raise StorageError if it cannot be read."""
        return self._source.read(row["origin"])

    def batches(self, split: str) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a split, a bounded number at a time."""
        yield from self._listing.splits[split].batches()

    def blocks(self, split: str) -> Iterator[list[RawRow]]:
        """Yield the rows of `batches` as dictionaries."""
        yield from (batch.to_pylist() for batch in self.batches(split))

    def problems(self) -> Problems:
        """Return what the source found; complete when all rows have been read."""
        return Problems.of(self._listing.problems.cases())

    def pictures(self, split: str, count: int, generator: np.random.Generator) -> list[Picture]:
        """Return some images of a split, chosen at random in one pass."""
        drawn: list[tuple[float, pa.RecordBatch]] = []
        for batch in self._listing.splits[split].batches():
            lots = generator.random(batch.num_rows)
            best = np.argsort(lots)[:count]
            drawn += [(float(lots[row]), batch.take([row])) for row in best]
            drawn = sorted(drawn, key=lambda pair: pair[0])[:count]
        rows = [row.to_pylist()[0] for _, row in drawn]
        return [as_picture(row, self.read) for row in rows]


def as_picture(row: RawRow, read: Callable[[RawRow], bytes]) -> Picture:
    """Return the image of a row as the shard step would store it."""
    name = row["file_name"]
    if row["fault_reason"]:
        return Picture(name, None, [], row["fault_detail"] or row["fault_reason"])
    try:
        normal = normalize(read(row), _LARGEST, _QUALITY, row["orientation"])
        image = Image.open(io.BytesIO(normal.jpeg)).convert("RGB")
    except (StorageError, DataError) as error:
        return Picture(name, None, [], error.message)
    except (UnreadableImage, OSError) as error:
        return Picture(name, None, [], str(error))
    size = (row["width"], row["height"])
    boxes = [
        (box["category"], place_box(bbox_of(box), normal, *size), bool(box["iscrowd"]))
        for box in row["boxes"]
    ]
    return Picture(name, image, boxes)
