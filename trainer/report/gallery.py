"""The worst images, with right and wrong boxes."""

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from PIL import Image

from trainer.evaluation.box_matching import BoxMatches
from trainer.evaluation.scoring import SHOWN_SCORE
from trainer.evaluation.truth_and_predictions import Predictions, Truth
from trainer.report.figures import thumbnail

IOU = 0.5  # IoU of a right detection
_SIDE = 560  # Longer side of the images, pixels.
_MAX_NAMED_BOXES, _MAX_NAME_LENGTH = 8, 24  # Wrong boxes with a name, and its characters.
# Font size as a share of the image's longer side; a character's width and a line's height as shares of it.
_FONT, _CHARACTER, _LINE = 0.034, 0.6, 1.25


@dataclass(frozen=True)
class MarkedBox:
    """A box of the ground truth or of the predictions."""

    box: tuple[float, float, float, float]  # x, y, width, height in pixels of the image
    name: str
    matched: bool
    score: float | None = None  # None for ground truth

    @property
    def kind(self) -> str:
        """CSS classes."""
        side, wrong = ("truth", "missed") if self.score is None else ("found", "false")
        return f"{'right' if self.matched else wrong} {side}"

    def label(self, longest: int = 10**9) -> str:
        name = self.name if len(self.name) <= longest else self.name[: longest - 1] + "…"
        return name if self.score is None else f"{name} {self.score:.2f}"


@dataclass(frozen=True)
class GalleryImage:
    """An image with its objects and detections."""

    image_id: int
    file_name: str
    width: int
    height: int
    source: str  # a thumbnail as a data URI
    truth: tuple[MarkedBox, ...]
    predictions: tuple[MarkedBox, ...]

    @property
    def missed(self) -> int:
        return sum(not item.matched for item in self.truth)

    @property
    def false(self) -> int:
        return sum(not item.matched for item in self.predictions)

    @property
    def f1(self) -> float:
        total = len(self.truth) + len(self.predictions)
        return 2 * (len(self.truth) - self.missed) / total if total else 1.0

    @property
    def letters(self) -> float:
        """Font size of the labels, pixels."""
        return round(_FONT * max(self.width, self.height), 1)

    @property
    def labels(self) -> list[tuple[float, float, str, str]]:
        """Names of the first wrong boxes of each side that do not overlap another name.

        Each with the left end of its baseline, x and y, and its CSS classes.
        """
        placed: list[tuple[float, float, str, str]] = []
        taken: list[tuple[float, float, float]] = []
        line = _LINE * self.letters
        for side in (self.truth, self.predictions):
            for box in [item for item in side if not item.matched][:_MAX_NAMED_BOXES]:
                text = box.label(_MAX_NAME_LENGTH)
                width = _CHARACTER * self.letters * len(text)
                left = max(min(box.box[0], self.width - width), 0.0)
                top = max(min(box.box[1], self.height - line), 0.0)
                if not any(
                    abs(top - y) < line and left < end and start < left + width for start, end, y in taken
                ):
                    taken.append((left, left + width, top))
                    x, y = round(left + 0.15 * self.letters, 1), round(top + self.letters, 1)
                    placed.append((x, y, box.kind, text))
        return placed


def worst_images(
    truth: Truth,
    predictions: Predictions,
    matches: BoxMatches,
    load_image: Callable[[int], bytes],
    count: int = 12,
) -> list[GalleryImage]:
    """Return the images with errors by ascending F1, then by most errors, without detections in crowds."""
    images = len(truth.images)
    shown = np.flatnonzero((matches.scores >= SHOWN_SCORE) & ~matches.ignored[:, 0])
    right = np.bincount(matches.images[shown[matches.right[shown, 0]]], minlength=images)
    false = np.bincount(matches.images[shown], minlength=images) - right
    missed = np.bincount(matches.truth_images, minlength=images) - right
    f1 = 2 * right / np.maximum(2 * right + false + missed, 1)
    order = np.lexsort((-(false + missed), f1))
    worst = [place for place in order.tolist() if false[place] + missed[place]][:count]
    by_id = {image["id"]: image for image in truth.images}
    names = dict(zip(truth.category_ids.tolist(), truth.names, strict=True))
    listed = []
    for place in worst:
        image = by_id[int(truth.all_image_ids[place])]
        these = shown[matches.images[shown] == place]
        these = these[np.argsort(-matches.scores[these], kind="stable")]
        found = _mark_boxes(
            predictions, matches.rows[these], names, matches.right[these, 0], matches.scores[these].tolist()
        )
        objects = np.flatnonzero((truth.image_ids == image["id"]) & ~truth.crowd)
        marked = _mark_boxes(truth, objects, names, np.isin(objects, matches.partners[these]))
        with Image.open(io.BytesIO(load_image(image["id"]))) as opened:
            source = thumbnail(opened.convert("RGB"), _SIDE)
        listed.append(
            GalleryImage(
                image["id"],
                image.get("original_file_name", image["file_name"]),
                image["width"],
                image["height"],
                source,
                marked,
                found,
            )
        )
    return listed


def _mark_boxes(
    items: Truth | Predictions,
    rows: np.ndarray,
    names: dict[int, str],
    matched: np.ndarray,
    scores: Iterable[float | None] = repeat(None),
) -> tuple[MarkedBox, ...]:
    columns = items.labels[rows].tolist(), items.boxes[rows].tolist(), matched.tolist(), scores
    return tuple(
        MarkedBox(tuple(box), names[label], is_matched, score)
        for label, box, is_matched, score in zip(*columns, strict=False)
    )
