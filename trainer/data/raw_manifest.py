"""The manifest of a folder of raw images, see `trainer.data.raw_folder`. Imports no library for tables."""

from dataclasses import asdict, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic.dataclasses import dataclass

from trainer import storage
from trainer.base.json_files import STRICT
from trainer.data import image_keys
from trainer.data.problem_counts import BAD_IMAGES, UNLISTED_BOXES, Cases, Problems

if TYPE_CHECKING:
    from trainer.data.raw_folder import Table
    from trainer.data.samples import RawRow

PLAN, MANIFEST = "plan.json", "manifest.json"


@dataclass(config=STRICT, frozen=True)
class Category:
    """A class of the data."""

    id: int  # Label, from 0.
    name: str
    original_id: int | str = ""  # Of the source.
    frequency: str = ""  # r, c or f: that of LVIS, else empty.


@dataclass(config=STRICT, frozen=True)
class SplitCounts:
    """Images and boxes of a split."""

    images: int
    boxes: int


@dataclass(config=STRICT, frozen=True)
class RawManifest:
    """The listing of a source (kind "plan"), or the outcome of its download (kind "raw")."""

    kind: Literal["plan", "raw"]
    version: Literal[7]
    fingerprint: str
    source: str
    images: str  # URI of the folder of the images.
    splits: dict[str, SplitCounts]
    categories: list[Category]
    hierarchy: dict[str, list[int]]  # Labels of all categories above one, by its label as text.
    problems: dict[str, Cases]
    settings: dict[str, Any]  # Keys of `data` that it was made with.
    tables: dict[str, str] = field(default_factory=dict)  # sha256 of the table of each split.
    excluded: list[str] = field(default_factory=list)  # Lines of data.exclude: names and hashes of images.
    warnings: list[str] = field(default_factory=list)  # See `trainer.data.plausibility`.
    uri: str = ""  # Of the folder.
    content: str = ""  # Digest of the fetched images, see `write_images`; empty in a plan.
    unfetched: int = 0  # Images that the source was asked for and did not give.

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, without empty fields that are optional."""
        return {key: value for key, value in asdict(self).items() if value not in (None, "")}

    @property
    def listed_images(self) -> int:
        """Images of all splits."""
        return sum(split.images for split in self.splits.values())

    def check(self, where: str, problems: Problems, max_bad_fraction: float) -> None:
        """Check the problems of this and earlier steps; `where` names the data in the message."""
        before = Problems.of(self.problems)
        problems.check(
            where,
            images=self.listed_images + before.total(BAD_IMAGES),
            boxes=sum(split.boxes for split in self.splits.values()) + before.total(UNLISTED_BOXES),
            max_bad_fraction=max_bad_fraction,
        )

    @property
    def names(self) -> list[str]:
        """Names of the classes, by label."""
        return [category.name for category in self.categories]

    def image_uri(self, row: "RawRow") -> str:
        """Return the URI of the image of a row of a table."""
        name = image_keys.image_path(row["key"], row["file_name"], row["origin"], row["version"])
        return storage.join(self.images, name)

    def table(self, split: str) -> "Table":
        """Open the table of a split; see `Table`."""
        from trainer.data.raw_folder import Table

        return Table(storage.join(self.uri, f"{split}.parquet"), self.tables.get(split, ""))

    def write(self) -> None:
        """Write it into its folder."""
        stored = self.to_json() | {"images": f"images/{self.images.rpartition('/')[2]}"}
        del stored["uri"]
        storage.write_json(storage.join(self.uri, PLAN if self.kind == "plan" else MANIFEST), stored)
