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
from trainer.data import raw_folder, raw_manifest, source_names, sources
from trainer.data.decoding import read_sample
from trainer.data.images import UnreadableImage, normalize, place_box
from trainer.data.plausibility import merge_similar_classes
from trainer.data.problem_counts import Problems
from trainer.data.raw_manifest import RawManifest
from trainer.data.samples import RawRow, to_bbox
from trainer.data.shard_folder import INDEX, ShardIndex, read_index
from trainer.data.shard_index import ShardDataset

_MAX_SIDE, _JPEG_QUALITY = 1600, 95
LOCAL_SAMPLE_SIZE, REMOTE_SAMPLE_SIZE = 2000, 100
"""Images of a split that `inspect` reads on this machine, and in an object store."""

Box = tuple[int, list[float], bool]  # Label, [x, y, width, height] in pixels, and whether it is a crowd.


class Picture(NamedTuple):
    """An image with its boxes."""

    file_name: str
    image: Image.Image | None  # None if it cannot be read: `fault` says why.
    boxes: list[Box]
    fault: str = ""


def open_view(text: str, config: DataConfig | None = None) -> "View":
    """Open a folder of shards or of raw images by its URI, or a source as `trainer.data.sources` takes it.

    Raises:
        DataError: it is unknown, unfinished, or was written by another version of kubedet.
        StorageError: it cannot be reached.
    """
    remote = storage.scheme(text) in storage.OBJECT_STORES
    if remote or storage.is_local(text):
        folder = storage.absolute(text)
        if _is_record(folder, INDEX, "shards"):
            return Shards(read_index(folder))
        if _is_record(folder, raw_manifest.MANIFEST, "raw"):
            return RawImages(raw_folder.read_manifest(folder))
        names = storage.list_states(folder)
        shards_begun = any(
            name.endswith(".tar") and f"{name.removesuffix('.tar')}.json" in names for name in names
        )
        if shards_begun or _is_record(folder, raw_manifest.PLAN, "plan"):
            step = "shard" if shards_begun else "download"
            fix = "run it again to continue"
            raise DataError(f"{folder} is incomplete: the {step} step has not finished", fix=fix)
        if remote and not storage.exists(folder) and next(iter(storage.scan(folder)), None) is None:
            raise DataError(f"{text} does not exist", fix="check the URI and the endpoint")
    return SourceRows(text, config or DataConfig())


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


class RawImages:
    """A folder that the download step wrote; its rows are those of the available images."""

    kind = "raw images"
    box_format = ""

    def __init__(self, manifest: RawManifest) -> None:
        self.uri, self.manifest = manifest.uri, manifest
        self.names, self.splits = manifest.names, list(manifest.splits)
        self.sample_size = LOCAL_SAMPLE_SIZE if storage.is_local(manifest.images) else REMOTE_SAMPLE_SIZE
        """Images of a split that `inspect` reads."""

    def read(self, row: RawRow) -> bytes:
        """Return the image of a row; raise StorageError if it cannot be read."""
        return storage.read_bytes(self.manifest.image_uri(row))

    def batches(self, split: str) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a split, a bounded number at a time."""
        table = self.manifest.table(split)
        sizes = raw_folder.read_images(self.manifest)["bytes"]
        for block in range(table.blocks):
            rows = table.batch(block)
            rows = rows.filter(pa.array(sizes[rows["image_id"].to_numpy() - 1] > 0))
            yield from rows.combine_chunks().to_batches()

    def rows(self) -> Iterator[RawRow]:
        """Yield the rows of all splits."""
        for split in self.splits:
            for batch in self.batches(split):
                yield from batch.to_pylist()

    def problems(self) -> Problems:
        return Problems.of(self.manifest.problems)


class SourceRows:
    """A source, as it is published."""

    kind = "source"

    def __init__(self, text: str, config: DataConfig) -> None:
        """List it; raise DataError if it is missing, empty or not of its format."""
        self._source = sources.parse(text, config)
        listing = self._source.listing()
        self._listing = merge_similar_classes(listing) if config.merge_classes else listing
        self.uri = self._source.uri
        self.box_format, self.read_as = listing.box_format, listing.read_as
        self.names = [category.name for category in self._listing.categories]
        self.splits = list(listing.splits)
        schemes = {storage.scheme(uri) for uri in source_names.places(self.uri)}
        self.sample_size = REMOTE_SAMPLE_SIZE if schemes & set(storage.OBJECT_STORES) else LOCAL_SAMPLE_SIZE
        if self._source.cpu_bound or schemes & set(storage.WEB):
            self.sample_size = 0

    def read(self, row: RawRow) -> bytes:
        return self._source.read(row["origin"])

    def batches(self, split: str) -> Iterator[pa.RecordBatch]:
        return self._listing.splits[split].batches()

    def problems(self) -> Problems:
        return Problems.of(self._listing.problems.cases())


View = Shards | RawImages | SourceRows


def pictures(view: View, split: str, count: int, generator: np.random.Generator) -> list[Picture]:
    """Return some images of a split, chosen at random; rows are read in one pass."""
    if not isinstance(view, Shards):
        drawn: list[tuple[float, pa.RecordBatch]] = []
        for batch in view.batches(split) if count else ():
            lots = generator.random(batch.num_rows)
            drawn += [(float(lots[row]), batch.take([row])) for row in np.argsort(lots)[:count]]
            drawn = sorted(drawn, key=lambda pair: pair[0])[:count]
        return [as_picture(row.to_pylist()[0], view.read) for _, row in drawn]
    dataset = ShardDataset(view.uri, split)
    found = []
    for index in np.sort(generator.choice(len(dataset), min(count, len(dataset)), replace=False)).tolist():
        try:
            pixels, record = read_sample(dataset, index)
            image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        except (DataError, StorageError) as error:
            name = f"image id {dataset.samples[index]['image_id']}"
            found.append(Picture(name, None, [], error.message))
            continue
        boxes = [(box["category_id"], box["bbox"], bool(box["iscrowd"])) for box in record["annotations"]]
        found.append(Picture(record["file_name"], image, boxes))
    return found


def as_picture(row: RawRow, read: Callable[[RawRow], bytes]) -> Picture:
    """Return the image of a row as the shard step would store it."""
    name = row["file_name"]
    if row["fault_reason"]:
        return Picture(name, None, [], row["fault_detail"] or row["fault_reason"])
    try:
        normal = normalize(read(row), _MAX_SIDE, _JPEG_QUALITY)
        image = Image.open(io.BytesIO(normal.jpeg)).convert("RGB")
    except (StorageError, DataError) as error:
        return Picture(name, None, [], error.message)
    except (UnreadableImage, OSError) as error:
        return Picture(name, None, [], str(error))
    size = (row["width"], row["height"])
    boxes = [
        (box["category"], place_box(to_bbox(box), normal, *size), bool(box["iscrowd"]))
        for box in row["boxes"]
    ]
    return Picture(name, image, boxes)
