"""The manifest of a folder of raw images (see `trainer.data.raw_folder`); does not import pyarrow."""

from dataclasses import asdict, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic.dataclasses import dataclass

from trainer import storage
from trainer.base.json_files import STRICT
from trainer.data import image_keys
from trainer.data.problem_counts import BAD_IMAGES, UNLISTED_BOXES, Cases, Problems

if TYPE_CHECKING:
    from trainer.data.samples import RawRow

PLAN, MANIFEST = "plan.json", "manifest.json"


@dataclass(config=STRICT, frozen=True)
class Category:
    """A class of the data."""

    id: int  # Label, from 0.
    name: str
    original_id: int | str = ""  # Id in the source.
    frequency: str = ""  # LVIS's frequency r, c or f, else empty.


@dataclass(config=STRICT, frozen=True)
class SplitCounts:
    """Numbers of images and boxes in a split."""

    images: int
    boxes: int


@dataclass(config=STRICT, frozen=True)
class RawManifest:
    """The listing of a source (kind "plan"), or the result of its download (kind "raw")."""

    kind: Literal["plan", "raw"]
    version: Literal[7]
    fingerprint: str
    source: str
    images: str  # URI of the folder of the images.
    splits: dict[str, SplitCounts]
    categories: list[Category]
    hierarchy: dict[str, list[int]]  # Labels of all ancestors of a category, by its label as text.
    problems: dict[str, Cases]
    settings: dict[str, Any]  # Values of the `data` keys that it was created with.
    tables: dict[str, str] = field(default_factory=dict)  # sha256 of the table of each split.
    excluded: list[str] = field(default_factory=list)  # Lines of data.exclude: names and hashes of images.
    warnings: list[str] = field(default_factory=list)  # See `trainer.data.plausibility`.
    uri: str = ""  # Of the folder.
    content: str = ""  # Digest of the fetched images, see `write_image_table`; empty in a plan.
    unfetched: int = 0  # Images that were requested from the source and not received.

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest as a dictionary for JSON, without empty fields."""
        return {key: value for key, value in asdict(self).items() if value not in (None, "")}

    @property
    def image_count(self) -> int:
        """Number of images in all splits."""
        return sum(split.images for split in self.splits.values())

    def check(self, where: str, problems: Problems, max_bad_fraction: float) -> None:
        """Raise DataError if this step and earlier ones found too many problems; `where` names the data."""
        before = Problems.from_cases(self.problems)
        problems.check(
            where,
            images=self.image_count + before.total(BAD_IMAGES),
            boxes=sum(split.boxes for split in self.splits.values()) + before.total(UNLISTED_BOXES),
            max_bad_fraction=max_bad_fraction,
        )

    @property
    def class_names(self) -> list[str]:
        """Names of the classes, by label."""
        return [category.name for category in self.categories]

    def image_uri(self, row: "RawRow") -> str:
        """Return the URI of the image of a row of a table."""
        name = image_keys.image_path(row["key"], row["file_name"], row["origin"], row["version"])
        return storage.join(self.images, name)

    def write(self) -> None:
        """Write the manifest to its folder."""
        stored = self.to_dict() | {"images": f"images/{self.images.rpartition('/')[2]}"}
        del stored["uri"]
        storage.write_json(storage.join(self.uri, PLAN if self.kind == "plan" else MANIFEST), stored)
