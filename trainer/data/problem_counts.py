"""Counts problems of the input by reason, with examples, and checks them against max_bad_fraction."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pydantic import dataclasses as models

from trainer.base.errors import DataError
from trainer.base.json_files import STRICT

EXAMPLES = 10  # Examples of each reason.
IMAGE_MISSING = "image missing"
IMAGE_NOT_FETCHED = "image not fetched"
IMAGE_UNREADABLE = "image unreadable"
IMAGE_REFUSED = "image at an address that nobody allowed"
IMAGE_ID_TWICE = "image id of two images"
BAD_IMAGES = (IMAGE_MISSING, IMAGE_NOT_FETCHED, IMAGE_UNREADABLE, IMAGE_REFUSED, IMAGE_ID_TWICE)
"""Reasons to leave out an image."""

BOX_WITHOUT_AREA = "box without area"
BOX_OUTSIDE = "box outside the image"
BOX_NOT_FINITE = "box not of four finite numbers"
BOX_UNKNOWN_CATEGORY = "box of an unknown category"
BOX_UNKNOWN_IMAGE = "box of an unknown image"
BOX_ABSENT = "annotation without a box"
BOX_ONLY_SEGMENTATION = "annotation with a segmentation and no box"
SEGMENTATION_UNUSABLE = "segmentation that is not polygons"
LABEL_LINE = "label line that cannot be used"
UNLISTED_BOXES = (
    BOX_UNKNOWN_IMAGE, BOX_ABSENT, BOX_ONLY_SEGMENTATION, BOX_NOT_FINITE, SEGMENTATION_UNUSABLE, LABEL_LINE,
)  # fmt: skip
"""Reasons to leave out a box that the annotations alone show."""

BAD_BOXES = (
    BOX_WITHOUT_AREA,
    BOX_OUTSIDE,
    BOX_UNKNOWN_CATEGORY,
    *UNLISTED_BOXES,
)  # Reasons to leave out a box.

_REMEDIES = {
    IMAGE_REFUSED: 'allow the servers and buckets that you trust: --set \'data.allow_hosts=["HOST", '
    '"s3://BUCKET"]\'',
    BOX_ABSENT: "give each annotation a bbox [x, y, width, height], each VOC object a bndbox",
    BOX_ONLY_SEGMENTATION: "use the boxes of the segmentations with --set data.boxes_from=segmentation",
    BOX_NOT_FINITE: "write each box as four numbers, without quotation marks, with decimal points",
    BOX_UNKNOWN_CATEGORY: "list the category; its id and category_id must be the same integer",
    BOX_UNKNOWN_IMAGE: 'write image_id as the id of the image: 7 and "7" differ',
    SEGMENTATION_UNUSABLE: "write polygons [[x1, y1, x2, y2, ...]], or leave data.boxes_from at bbox",
    LABEL_LINE: "write lines `class x y width height`, or `class x1 y1 x2 y2 x3 y3 ...`; number classes "
    "from 0, and write coordinates as shares of the image's sides, from 0 to 1",
}

BOX_CLIPPED = "box clipped to the image"
SIZE_DIFFERS = "image size differs from the annotated one"
IMAGE_RESIZED = "image resized since it was annotated"
FITS_UNSCALED = "resized image whose boxes also fit as they are"
SIZE_EXCHANGED = "annotated width and height exchanged"
IMAGE_ROTATED = "image rotated since it was annotated"
IMAGE_HIDDEN = "hidden image ignored"
IMAGE_EXCLUDED = "image left out by data.exclude"
SPLIT_EMPTY = "listed split without images"
LABELS_SHARED = "label file of two images"
MAY_BE_KEY_POINTS = "outline that may be a box and key points"
IMAGE_LISTED_TWICE = "image listed twice"
IMAGE_IN_TWO_SPLITS = "image in two splits"
IMAGE_COPY_WITHOUT_BOXES = "copy of an image without its boxes"
ANNOTATION_ID_TWICE = "annotation id used again"
IMAGE_WITHOUT_BOXES = "image without boxes left out"
IMAGE_WITHOUT_ANNOTATION = "image without an annotation file left out"
CLASS_WITHOUT_BOXES = "class without boxes in train"
# This last group of reasons is only reported and does not count as bad.


_MIN_FOR_ONE_BAD = 10


def max_bad(listed: int, fraction: float) -> float:
    """Return how many of `listed` items may be bad: a fraction, but at least one of ten or more."""
    return max(fraction * listed, 1 if fraction and listed >= _MIN_FOR_ONE_BAD else 0)


@models.dataclass(config=STRICT, frozen=True)
class Cases:
    """Count and examples of one reason."""

    count: int
    examples: list[str] = field(default_factory=list)


@dataclass
class Problems:
    """Counts and first examples by reason."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, example: str, count: int = 1) -> None:
        """Count `count` cases of a reason, with one example."""
        self.merge({reason: Cases(count, [example])})

    @classmethod
    def from_cases(cls, cases: Mapping[str, Cases]) -> "Problems":
        """Create problems that start with these cases."""
        problems = cls()
        problems.merge(cases)
        return problems

    def merge(self, other: Mapping[str, Cases]) -> None:
        """Add these cases."""
        for reason, cases in other.items():
            self.counts[reason] = self.counts.get(reason, 0) + cases.count
            kept = self.examples.setdefault(reason, [])
            kept.extend(cases.examples[: EXAMPLES - len(kept)])

    def total(self, reasons: Iterable[str]) -> int:
        """Return the total number of cases for the given reasons."""
        return sum(self.counts.get(reason, 0) for reason in reasons)

    def cases(self) -> dict[str, Cases]:
        """Return the cases, sorted by reason."""
        return {reason: Cases(self.counts[reason], self.examples[reason]) for reason in sorted(self.counts)}

    def check(
        self, where: str, *, images: int, boxes: int, max_bad_fraction: float, examples: bool = True
    ) -> None:
        """Raise DataError if too many of the listed images or boxes are bad.

        `where` names the data. With `examples`, the error lists the first ten cases, otherwise only their
        counts.
        """
        for noun, reasons, listed in (("images", BAD_IMAGES, images), ("boxes", BAD_BOXES, boxes)):
            bad = self.total(reasons)
            if bad <= max_bad(listed, max_bad_fraction):
                continue
            cases = [f"\n    {reason}: {one}" for reason in reasons for one in self.examples.get(reason, [])]
            found = [f"{reason}: {self.counts[reason]:,}" for reason in reasons if reason in self.counts]
            shown = f"; the first ten:{''.join(cases[:EXAMPLES])}" if examples else f" ({', '.join(found)})"
            most_frequent = max(reasons, key=lambda reason: self.counts.get(reason, 0))
            problem = (
                f"{bad} of {listed} {noun} are bad, more than data.max_bad_fraction = {max_bad_fraction:g}"
            )
            fix = f"{_REMEDIES.get(most_frequent, 'repair the source')}, or raise data.max_bad_fraction"
            raise DataError(f"{where}: {problem}{shown}", fix=fix)

    def summary(self) -> str:
        """Format the counts as one line: "box without area: 2, image missing: 1", or ""."""
        return ", ".join(f"{reason}: {count:,}" for reason, count in sorted(self.counts.items()))
