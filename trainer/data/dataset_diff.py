"""Compares the listing of a source with earlier raw tables."""

import hashlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from trainer.data import image_keys, raw_folder
from trainer.data.raw_manifest import RawManifest

_IMAGE_COLUMNS = ["key", "file_name", "origin", "version"]
_ANNOTATION_COLUMNS = ["width", "height", "extra", "boxes"]


@dataclass(frozen=True)
class DatasetDiff:
    """The differences between a listing and earlier raw tables."""

    new: int = 0
    changed: int = 0  # Images with the same key and different bytes or annotations.
    removed: int = 0
    other_classes: bool = False
    other_exclusions: bool = False  # The content of data.exclude changed.

    @property
    def image_count(self) -> int:
        """Number of new, changed and removed images together."""
        return self.new + self.changed + self.removed

    def __str__(self) -> str:
        counts = f"{self.new} new, {self.changed} changed, {self.removed} removed images"
        counts += ", and different classes" if self.other_classes else ""
        return counts + (", and a different data.exclude" if self.other_exclusions else "")


def compare(planned: RawManifest, before: RawManifest) -> DatasetDiff:
    """Compare the tables of a plan with earlier ones, without reading images.

    Raises:
        DataError: a table is damaged.
        StorageError: a table cannot be read.
    """
    new, old = _digests(planned), _digests(before)
    both, in_new, in_old = np.intersect1d(new[0], old[0], assume_unique=True, return_indices=True)
    changed = (new[1:, in_new] != old[1:, in_old]).any(axis=0)
    return DatasetDiff(
        new=new.shape[1] - len(both),
        changed=int(changed.sum()),
        removed=old.shape[1] - len(both),
        other_classes=planned.class_names != before.class_names,
        other_exclusions=planned.excluded != before.excluded,
    )


def _digests(raw: RawManifest) -> np.ndarray:
    """Return digests of key (with split), file and annotations of each image, uint64 [3, images].

    Images are sorted by the first digest, which is unique.
    """
    parts = [np.zeros((3, 0), np.uint64)]
    for split in raw.splits:
        table = raw_folder.open_table(raw, split)
        for block in range(table.block_count):
            rows = table.read_block(block, [*_IMAGE_COLUMNS, *_ANNOTATION_COLUMNS])
            images = list(zip(*(rows[name].to_pylist() for name in _IMAGE_COLUMNS), strict=True))
            numbers = [image_keys.key_hash(f"{split}/{key}") for key, *_ in images]
            places = [int(image_keys.path_digest(image_keys.image_path(*image)), 16) for image in images]
            parts.append(np.array([numbers, places, _annotation_digests(rows)], np.uint64))
    columns = np.concatenate(parts, axis=1)
    return columns[:, np.unique(columns[0], return_index=True)[1]]


def _annotation_digests(rows: pa.Table) -> list[int]:
    """Return a digest of the annotations of each image; the order of boxes is ignored."""
    lists = rows.column("boxes").combine_chunks()
    boxes = lists.flatten()
    fields = [np.asarray(boxes.field(n), np.float64) for n in range(boxes.type.num_fields)]
    values = (np.stack(fields, axis=1) + 0.0).astype("<f8")  # Adding 0 converts -0 to 0.
    ends = np.append(0, np.cumsum(lists.value_lengths().to_numpy(zero_copy_only=False)))
    texts = zip(*(rows.column(name).to_pylist() for name in _ANNOTATION_COLUMNS[:-1]), strict=True)
    digests = []
    for row, text in enumerate(texts):
        boxes_of_row = values[ends[row] : ends[row + 1]]
        ordered = boxes_of_row[np.lexsort(boxes_of_row.T)] if len(boxes_of_row) > 1 else boxes_of_row
        hashed = hashlib.blake2b(repr(text).encode() + ordered.tobytes(), digest_size=8)
        digests.append(int.from_bytes(hashed.digest(), "little"))
    return digests
