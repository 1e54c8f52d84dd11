"""Selects the worst images of an evaluation, and marks their correct and wrong boxes."""

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from PIL import Image

from trainer.evaluation.box_matching import BoxMatches
from trainer.evaluation.scoring import MIN_SHOWN_SCORE
from trainer.evaluation.truth_and_predictions import Predictions, Truth
from trainer.report.figures import thumbnail_uri

IOU = 0.5  # minimum IoU of a correct detection
_SIDE = 560  # Longer side of the images, pixels.
_MAX_NAMED_BOXES = 8  # labeled wrong boxes per image, of the truth and of the predictions
_FONT = 0.034  # font size as a share of the image's longer side


@dataclass(frozen=True)
class MarkedBox:
    """A box of the ground truth or of the predictions."""

    box: tuple[float, float, float, float]  # x, y, width, height in pixels of the image
    name: str
    matched: bool
    score: float | None = None  # None for ground truth

    @property
    def css_classes(self) -> str:
        """Its CSS classes in the page."""
        side, wrong = ("truth", "missed") if self.score is None else ("found", "false")
        return f"{'right' if self.matched else wrong} {side}"

    def text(self) -> str:
        return self.name if self.score is None else f"{self.name} {self.score:.2f}"


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
    def missed_count(self) -> int:
        return sum(not item.matched for item in self.truth)

    @property
    def false_count(self) -> int:
        return sum(not item.matched for item in self.predictions)

    @property
    def f1(self) -> float:
        total = len(self.truth) + len(self.predictions)
        return 2 * (len(self.truth) - self.missed_count) / total if total else 1.0

    @property
    def font_size(self) -> float:
        """Font size of the labels, pixels."""
        return round(_FONT * max(self.width, self.height), 1)

    @property
    def error_labels(self) -> list[tuple[float, float, str, str]]:
        """Labels of the first wrong boxes: x and y of the text's start, CSS classes, text."""
        wrong = [
            [item for item in side if not item.matched][:_MAX_NAMED_BOXES]
            for side in (self.truth, self.predictions)
        ]
        return [
            (round(box.box[0], 1), round(max(box.box[1], self.font_size), 1), box.css_classes, box.text())
            for box in (*wrong[0], *wrong[1])
        ]


def worst_images(
    truth: Truth,
    predictions: Predictions,
    matches: BoxMatches,
    load_image: Callable[[int], bytes],
    count: int = 12,
) -> list[GalleryImage]:
    """Return images with errors, by ascending F1, then by most errors; ignore detections in crowds."""
    images = len(truth.images)
    shown = np.flatnonzero((matches.scores >= MIN_SHOWN_SCORE) & ~matches.ignored[:, 0])
    right = np.bincount(matches.images[shown[matches.correct[shown, 0]]], minlength=images)
    false = np.bincount(matches.images[shown], minlength=images) - right
    missed = np.bincount(matches.truth_images, minlength=images) - right
    f1 = 2 * right / np.maximum(2 * right + false + missed, 1)
    order = np.lexsort((-(false + missed), f1))
    worst = [place for place in order.tolist() if false[place] + missed[place]][:count]
    by_id = {image["id"]: image for image in truth.images}
    names = dict(zip(truth.category_ids.tolist(), truth.class_names, strict=True))
    gallery = []
    for place in worst:
        image = by_id[int(truth.all_image_ids[place])]
        rows = shown[matches.images[shown] == place]
        rows = rows[np.argsort(-matches.scores[rows], kind="stable")]
        found = _mark_boxes(
            predictions, matches.rows[rows], names, matches.correct[rows, 0], matches.scores[rows].tolist()
        )
        objects = np.flatnonzero((truth.image_ids == image["id"]) & ~truth.crowd)
        marked = _mark_boxes(truth, objects, names, np.isin(objects, matches.partners[rows]))
        with Image.open(io.BytesIO(load_image(image["id"]))) as opened:
            source = thumbnail_uri(opened.convert("RGB"), _SIDE)
        gallery.append(
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
    return gallery


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
