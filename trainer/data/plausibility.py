"""Checks well-formed annotations for mistakes, and finds near duplicates across splits.

An almost certain mistake is an error; a possible one is a warning, which is stored with the data.

Images are compared by a difference hash of 256 bits: whether each of 16 x 16 cells is brighter than its left
neighbor. Resizing or recompressing an image changes about ten bits; different images differ in 80 or more.
"""

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import simplejpeg
from PIL import Image

from trainer.base.errors import DataError
from trainer.base.os_errors import raise_if_exhausted
from trainer.data import problem_counts as reasons
from trainer.data.images import NormalizedImage, are_inside, find_size_problem
from trainer.data.problem_counts import Problems
from trainer.data.statistics import SplitStatistics

_CELLS = 16
_CONTRAST = 1  # Gray levels by which a cell must be brighter, to ignore noise in flat areas.
_MIN_BITS = 8  # An image with fewer bits set is too flat to be recognized.
_MAX_DISTANCE, _MAX_RELATIVE_DISTANCE = 24, 0.25
"""Limits for near duplicates: different bits, and their ratio to the bits that are set."""
_MAX_BUCKET = 64  # If more images share a part of the hash, they are not compared by it.
_MAX_NAMED = 3

NO_HASH = bytes(32)


def picture_hash(jpeg: bytes) -> bytes:
    """Return the difference hash of a JPEG, 32 bytes; all zero if it is damaged or flat."""
    try:
        gray = simplejpeg.decode_jpeg(
            jpeg,
            "GRAY",
            fastdct=True,
            fastupsample=True,
            min_height=2 * _CELLS,
            min_width=2 * _CELLS,
        )
    except (ValueError, MemoryError) as error:
        raise_if_exhausted(error, "an image")
        return NO_HASH
    cells = Image.fromarray(gray[..., 0]).resize((_CELLS + 1, _CELLS), Image.Resampling.BOX)
    levels = np.asarray(cells).astype(np.int16)
    bits = levels[:, 1:] > levels[:, :-1] + _CONTRAST
    # Transposed, because rows of a sky are alike, so parts of a hash should come from columns.
    return np.packbits(bits.T).tobytes() if bits.sum() >= _MIN_BITS else NO_HASH


def decode_hashes(data: bytes) -> np.ndarray:
    """Return concatenated hashes as an array, uint64 [N, 4]."""
    return np.frombuffer(data, np.uint64).reshape(-1, 4)


def duplicate_warnings(hashes: Mapping[str, np.ndarray], file_name: Callable[[str, int], str]) -> list[str]:
    """Return warnings about near duplicates across splits, which name the most similar ones.

    Each image is paired with the most similar one in earlier splits. Two images are compared if one of 16
    parts of their hashes is equal. This finds all pairs that differ in up to 15 bits, and 97 % of those with
    24. `file_name` returns the name of an image, given split and row.
    """
    pairs: list[tuple[int, str, int, str, int]] = []
    splits = list(hashes)
    for number, split in enumerate(splits):
        best: dict[int, tuple[int, str, int, str, int]] = {}
        for other in splits[:number]:
            for row, other_row, distance in zip(*_similar_rows(hashes[split], hashes[other]), strict=True):
                if row not in best or distance < best[row][0]:
                    best[row] = distance, split, row, other, other_row
        pairs += best.values()
    if not pairs:
        return []
    named = [
        f"{file_name(split, row)} and {file_name(other, other_row)}"
        for _, split, row, other, other_row in sorted(pairs)[:_MAX_NAMED]
    ]
    counts = Counter((split, other) for _, split, _, other, _ in pairs)
    shown = "; ".join(f"{count:,} of {split} in {other}" for (split, other), count in counts.items())
    return [f"near duplicates across splits make scores too good: {shown} (first: {', '.join(named)})"]


def _similar_rows(left: np.ndarray, right: np.ndarray) -> tuple[list[int], list[int], list[int]]:
    """Return the rows of near duplicates in both arrays, and their distances."""
    left_rows, right_rows = (np.flatnonzero(words.any(axis=1)) for words in (left, right))
    if not len(left_rows) or not len(right_rows):
        return [], [], []
    left_parts, right_parts = left[left_rows].view(np.uint16), right[right_rows].view(np.uint16)
    found = [np.zeros((2, 0), np.int64)]
    for part in range(left_parts.shape[1]):
        order = np.argsort(right_parts[:, part], kind="stable")
        values = right_parts[order, part]
        first = np.searchsorted(values, left_parts[:, part], "left")
        count = np.searchsorted(values, left_parts[:, part], "right") - first
        count[count > _MAX_BUCKET] = 0
        row = np.repeat(np.arange(len(count)), count)
        step = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        candidates = np.stack([left_rows[row], right_rows[order[first[row] + step]]])
        pair = left[candidates[0]], right[candidates[1]]
        distance = np.bitwise_count(pair[0] ^ pair[1]).sum(axis=1)
        fewest = np.minimum(*(np.bitwise_count(words).sum(axis=1) for words in pair))
        found.append(candidates[:, distance <= np.minimum(_MAX_DISTANCE, _MAX_RELATIVE_DISTANCE * fewest)])
    rows, matches = np.unique(np.concatenate(found, axis=1), axis=1)
    distances = np.bitwise_count(left[rows] ^ right[matches]).sum(axis=1)
    return rows.tolist(), matches.tolist(), distances.tolist()


_MARGIN = 0.01  # Fraction of the side, in addition to one pixel, by which a box may leave its image.
_SUSPICIOUS_SHARE = 0.05  # With a larger share of boxes outside their images, the format is suspicious.
_CERTAIN_SHARE = 0.98
_MIN_BOXES_FOR_ERROR = 20  # With fewer boxes, a wrong box format is only a warning.
_MAX_SMALL_SHARE, _MAX_CLIPPED_SHARE = 0.1, 0.2  # Shares of boxes under 4 pixels, and of clipped boxes.


@dataclass
class Findings:
    """Errors and warnings about data."""

    errors: list[tuple[str, str]] = field(default_factory=list)  # Problems and remedies.
    warnings: list[str] = field(default_factory=list)

    def raise_errors(self, where: str) -> None:
        """Raise a DataError that names all errors, if there are any."""
        if self.errors:
            messages, fixes = zip(*self.errors, strict=True)
            raise DataError(f"{where}: {'; '.join(messages)}", fix="; ".join(dict.fromkeys(fixes)))


class AnnotationChecker:
    """Checks the annotations of all splits, batch by batch."""

    def __init__(self, classes: Sequence[str], box_format: str, *, check_names: bool) -> None:
        """Set the class names; with `check_names`, those that differ only by case are errors."""
        self._check_names = check_names
        self._classes, self._box_format = classes, box_format
        self._boxes_of_class: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(len(classes), np.int64))
        self._scored: Counter[str] = Counter()
        self._crowds: Counter[str] = Counter()
        self._count = 0
        self._fits: Counter[str] = Counter()
        self._example = ""

    def add(self, split: str, rows: pa.RecordBatch) -> None:
        """Add rows with the columns of `trainer.data.sources.source.SOURCE_ROW`."""
        boxes = rows.column("boxes")
        values = boxes.flatten()
        label = values.field("category").to_numpy()
        crowd = values.field("iscrowd").to_numpy() != 0
        known = (label >= 0) & (label < len(self._classes))
        self._boxes_of_class[split] += np.bincount(label[known], minlength=len(self._classes))
        self._scored[split] += int((known & ~crowd).sum())
        self._crowds[split] += int((known & crowd).sum())
        # Count the boxes that are inside their image in each box format.
        box_row = np.repeat(np.arange(len(boxes)), np.diff(boxes.offsets.to_numpy()))
        size = np.stack([rows.column(name).to_numpy() for name in ("width", "height")])[:, box_row].astype(
            float
        )
        shares = (size < -1).all(axis=0)  # images.STORED_SHARES or DISPLAYED_SHARES
        xywh = np.stack([values.field(name).to_numpy() for name in "xywh"])
        start, extent = xywh[:2], xywh[2:]
        active = "xyxy" if self._box_format == "xyxy" else "xywh"
        if active == "xyxy":  # As in the file.
            extent = start + extent
        side = np.where(shares, 1.0, np.where((size > 1).all(axis=0), size, np.inf))
        slack = np.where(np.isfinite(side), _MARGIN * side, 0) + ~shares
        corners = (start + 1, start + extent) if self._box_format == "corners" else (start, extent)
        with np.errstate(invalid="ignore"):
            begins = (start >= -slack).all(axis=0)
            fits = {
                "xywh": begins & (extent > 0).all(axis=0) & (start + extent <= side + slack).all(axis=0),
                "xyxy": begins & (extent > start).all(axis=0) & (extent <= side + slack).all(axis=0),
                "normalised": ~shares
                & (extent > 0).all(axis=0)
                & (corners[0] >= -_MARGIN).all(axis=0)
                & (np.maximum(*corners) <= 1 + _MARGIN).all(axis=0),
                "pixels": shares & (np.maximum(start, extent) > 2).any(axis=0),
            }
            counted = (extent != 0).all(axis=0) & np.isfinite(xywh).all(axis=0)
        self._count += int(counted.sum())
        for reading, fit in fits.items():
            self._fits[reading] += int((fit & counted).sum())
        misfits = np.flatnonzero(counted & ~fits[active])
        if len(misfits) and not self._example:
            numbers = np.round(np.concatenate([start, extent])[:, misfits[0]], 2).tolist()
            self._example = f" (first: {rows.column('file_name')[int(box_row[misfits[0]])]} {numbers})"

    def findings(self, splits: Sequence[str] = ()) -> Findings:
        """Return the findings; `splits` are those of the source. All others were held out of train."""
        found = Findings()
        if self._count:
            self._check_box_format(found)
        groups, untrained = defaultdict(list), []
        boxes_of_class = sum(self._boxes_of_class.values(), start=np.zeros(len(self._classes), np.int64))
        for name, boxes, trained in zip(
            self._classes, boxes_of_class, self._boxes_of_class["train"], strict=True
        ):
            if boxes and self._check_names:
                groups[fold_name(name)].append(name)
            if boxes and not trained:
                untrained.append(name)
        if untrained:
            shown = f"{', '.join(untrained[:10])}{', ...' if len(untrained) > 10 else ''}"
            problem = f"{len(untrained)} classes have boxes in val or test, and none in train: {shown}"
            found.warnings.append(f"{problem}; they are scored and cannot be learned")
        # Single letters that differ by case may be two classes.
        alike = [names for key, names in groups.items() if len(names) > 1 and len(key) > 1]
        if alike:
            shown = "; ".join(" and ".join(map(repr, names)) for names in alike[:10])
            problem = f"classes whose names differ only by case, spaces or Unicode form: {shown}"
            remedy = "make the names equal or clearly different, or list all of them in data.classes"
            found.errors.append((problem, remedy))
        for split in self._scored:
            held_out = bool(splits) and split not in splits
            _check_boxes(split, self._scored[split], self._crowds[split], found, held_out=held_out)
        return found

    def _check_box_format(self, found: Findings) -> None:
        inside = {reading: count / self._count for reading, count in self._fits.items()}
        read_as = self._box_format if self._box_format in _FORMAT_TEXTS else "xywh"
        if inside["pixels"] > 1 / 2 and read_as == "normalised":
            found.errors.append(
                (f"boxes are in pixels{self._example}", "leave out data.box_format=normalised")
            )
            return
        if inside["normalised"] > _SUSPICIOUS_SHARE:
            other = "normalised"
            shown = f"{inside[other]:.0%} of {self._count:,} boxes have only values from 0 to 1"
        elif inside["xyxy" if read_as == "xyxy" else "xywh"] < 1 - _SUSPICIOUS_SHARE:
            other = "xywh" if read_as == "xyxy" else "xyxy"
            pixels = self._box_format in ("auto", "xywh", "xyxy")
            readings = ("xywh", "xyxy", "normalised") if pixels else ("xywh",)
            outside = ", ".join(f"{1 - inside[reading]:.0%} read as {reading}" for reading in readings)
            shown = f"of {self._count:,} boxes these leave the image: {outside}{self._example}"
        else:
            return
        sure = inside[other] >= _CERTAIN_SHARE and self._count >= _MIN_BOXES_FOR_ERROR
        message = f"boxes are almost certainly {_FORMAT_TEXTS[other]}, not {_FORMAT_TEXTS[read_as]}: {shown}"
        if sure and self._box_format in ("auto", "xyxy"):
            option = "--set data.box_format="
            remedy = f"leave out {option}xyxy" if other == "xywh" else f"add {option}{other}"
            keep = f"; to read them as they are: {option}xywh" if self._box_format == "auto" else ""
            found.errors.append((message, f"{remedy}{keep}"))
        elif sure and self._box_format == "corners" and other == "normalised":
            remedy = "multiply xmin and xmax by the width of the image, ymin and ymax by the height"
            found.errors.append((message, remedy))
        else:
            found.warnings.append(f"suspicious boxes: {shown}; look at some with `kubedet data preview`")


def _check_boxes(split: str, scored: int, crowds: int, found: Findings, *, held_out: bool = False) -> None:
    """Add an error if a split has no box to train on or to score."""
    if scored or (split == "train" and not crowds):  # A train split without boxes is refused elsewhere.
        return
    problem = f"all {crowds:,} boxes of {split} are crowd regions" if crowds else f"{split} has no boxes"
    remedy = (
        "set iscrowd (in VOC: difficult) to 0 for boxes of single objects"
        if crowds
        else f"hold out more images with a larger data.{split}_fraction"
        if held_out
        else f"annotate {split}, or remove it from the source"
    )
    done = "is trained" if split == "train" else "can be scored"
    found.errors.append((f"{problem}: nothing {done}", remedy))


_FORMAT_TEXTS = {
    "xywh": "[x, y, width, height]",
    "xyxy": "[x1, y1, x2, y2]",
    "normalised": "normalised to the image's sides",
    "corners": "[xmin, ymin, xmax, ymax] in pixels",
}


def count_size_problem(
    name: str,
    image: NormalizedImage,
    annotated: tuple[int, int],
    boxes: list[list[float]],
    problems: Problems,
) -> None:
    """Add the problem of an image's annotated size, if any, to `problems`; see `find_size_problem`."""
    if fault := find_size_problem(image, *annotated, boxes):
        stored = (image.stored_width, image.stored_height)
        case = f"{name}: {annotated[0]}x{annotated[1]} annotated, {stored[0]}x{stored[1]} stored"
        if fault == reasons.IMAGE_RESIZED:
            width, height = stored[::-1] if image.swaps_sides else stored
            case += f": boxes are scaled by {width / annotated[0]:.4g}"
            # Boxes refer to the normalized image, which may be smaller than the stored one.
            if are_inside(boxes, width * image.width / annotated[0], height * image.height / annotated[1]):
                problems.add(reasons.FITS_UNSCALED, case)
        problems.add(fault, case)


def unlabeled_copies(images: Iterable[tuple[bytes, str, bool]]) -> Iterator[str]:
    """Yield "NAME is NAME" for each image without boxes whose bytes equal those of one with boxes.

    `images` are tuples of the hash of the bytes, the name, and whether the image has boxes.
    """
    groups: dict[bytes, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for digest, name, is_labeled in images:
        groups[digest][is_labeled].append(name)
    for unlabeled, labeled in groups.values():
        if labeled:
            yield from (f"{name} is {labeled[0]}" for name in unlabeled)


_ADVICE = {
    reasons.ANNOTATION_ID_TWICE: "all boxes are used, but pycocotools would use only one per id",
    reasons.IMAGE_COPY_WITHOUT_BOXES: "the same picture counts with and without objects: annotate or remove "
    "the copy",
    reasons.LABELS_SHARED: "both images get its boxes: remove one image, or rename it and its labels",
    reasons.SIZE_DIFFERS: "boxes are not scaled",
    reasons.SIZE_EXCHANGED: "boxes are not turned: look at some with `kubedet data preview`",
    reasons.SPLIT_EMPTY: "images of train may be held out in its place: add the images, or remove the entry",
    reasons.MAY_BE_KEY_POINTS: "each is read as the box around all its numbers: if these are key points, add "
    "kpt_shape: [POINTS, 2 or 3] to data.yaml",
}


def check_statistics(problems: Problems, statistics: dict[str, SplitStatistics], images: int) -> Findings:
    """Return findings from the problems of `images` images, and from the statistics of splits."""
    found, counts = Findings(), problems.counts
    for name, split in statistics.items():
        _check_boxes(name, split.boxes - split.crowds, split.crowds, found)
    sides = np.sum([split.box_side for split in statistics.values()], axis=0)
    sized = int(np.sum(sides))  # Boxes in images of known size.
    if sized and sides[0] > _MAX_SMALL_SHARE * sized:
        share = f"{sides[0] / sized:.0%} of {sized:,} boxes"
        found.warnings.append(f"{share} are smaller than 4 x 4 pixels: check that they are in pixels")
    clipped = counts.get(reasons.BOX_CLIPPED, 0) + counts.get(reasons.BOX_OUTSIDE, 0)
    listed = sum(split.boxes for split in statistics.values()) + counts.get(reasons.BOX_OUTSIDE, 0)
    if clipped > _MAX_CLIPPED_SHARE * listed:
        found.warnings.append(f"{clipped / listed:.0%} of {listed:,} boxes leave their image")
    rotated, exchanged = counts.get(reasons.IMAGE_ROTATED, 0), counts.get(reasons.SIZE_EXCHANGED, 0)
    if rotated:
        leaves = "width and height are exchanged in their annotations, and boxes leave the image"
        if 2 * (rotated + exchanged) > images and 5 * rotated > rotated + exchanged:
            remedy = "annotate the images as they are now, or restore the annotated ones with their Exif data"
            problem = f"{rotated + exchanged:,} of {images:,} images are rotated: {leaves}"
            found.errors.append((problem, remedy))
        else:
            found.warnings.append(f"{rotated:,} of {images:,} images are rotated: {leaves}")
    if resized := counts.get(reasons.IMAGE_RESIZED, 0):
        shown = f"{reasons.IMAGE_RESIZED}: {resized:,} (first: {problems.examples[reasons.IMAGE_RESIZED][0]})"
        doubt = "; all boxes also fit without scaling: look at some with `kubedet data preview`"
        found.warnings.append(shown + (doubt if counts.get(reasons.FITS_UNSCALED) == resized else ""))
    for reason, advice in _ADVICE.items():
        if count := counts.get(reason, 0):
            found.warnings.append(f"{reason}: {count:,} (first: {problems.examples[reason][0]}); {advice}")
    return found


def fold_name(name: str) -> str:
    """Normalize a class name: ignore case, spaces, invisible characters and Unicode form."""
    text = unicodedata.normalize("NFKC", name).casefold()
    return "".join(char for char in text if not char.isspace() and unicodedata.category(char)[0] != "C")
