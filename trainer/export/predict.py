"""Detects objects in images with a bundle: preprocess, run, scale back."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from trainer.base.errors import DataError, ExportError
from trainer.base.os_errors import name_resource_errors
from trainer.data.box_labels import LabelledBox, draw_boxes
from trainer.data.images import MAX_PIXELS, TooManyPixels, UnreadableImage, read_upright
from trainer.data.tiles import tile_settings, windows
from trainer.evaluation.inference import in_images
from trainer.evaluation.tile_merging import merge_tiles
from trainer.evaluation.truth_and_predictions import Predictions
from trainer.export.bundle import Bundle, Metadata
from trainer.export.formats import FORMATS, Runtime, check_trust
from trainer.export.preprocess import preprocess
from trainer.model.postprocess import Detections

_PREFERRED = ("onnx", "openvino", "onnx-int8", "torch-export")


class ImageTooLarge(DataError):
    """An image has more pixels than the limit."""


@dataclass(frozen=True)
class Detection:
    """One detection."""

    label: int
    name: str
    score: float
    box: tuple[float, float, float, float]  # x1, y1, x2, y2 in pixels of the image, upright


class Predictor:
    """An opened model."""

    def __init__(self, metadata: Metadata, runtime: Runtime, kind: str, tile: int = -1) -> None:
        """`tile` is the side of the tiles that images are detected in, see `evaluation.tile`."""
        self.metadata, self.runtime, self.kind = metadata, runtime, kind
        self.size: int = metadata.square.size
        self.names = {item["id"]: item["name"] for item in metadata.classes}
        self.tile = tile_settings(metadata.config, tile)

    def __call__(self, image: Image.Image, least: float = 0.0) -> list[Detection]:
        sizes, places, parts = {0: np.array(image.size)}, windows(*image.size, *self.tile), []
        shown = [Predictions.from_coco([])]
        for left, top, width, height in places:
            tile = image.crop((left, top, left + width, top + height)) if len(places) > 1 else image
            square, scales = preprocess(tile, *self.metadata.square)
            outputs = (torch.from_numpy(part) for part in self.runtime.run(square.numpy()[None]))
            window = (left, top, width, height)
            shown.append(in_images(Detections(*outputs), [0], [tuple(scales)], sizes, [window]))
            parts += [window] * len(shown[-1])
        found = Predictions.join(shown)
        if len(places) > 1:
            found = merge_tiles(found, np.array(parts).reshape(-1, 4), sizes)
        detections = []
        for row in np.argsort(-found.scores, kind="stable"):
            if found.scores[row] >= least:
                x, y, wide, high = found.boxes[row]
                label, score = int(found.labels[row]), float(found.scores[row])
                x1, y1, x2, y2 = (round(float(side), 2) for side in (x, y, x + wide, y + high))
                detections.append(Detection(label, self.names[label], score, (x1, y1, x2, y2)))
        return detections


@contextmanager
def open_bundle(
    source: Bundle, kind: str = "", *, run_code: bool = False, tile: int = -1
) -> Iterator[Predictor]:
    """Open a format of a bundle after comparing its files with their checksums; for `tile` see `Predictor`.

    `kind` "" means the first available of onnx, openvino, onnx-int8, torch-export; `run_code` allows a format
    that is a program.
    """
    formats = source.metadata.formats
    usable = [name for name in _PREFERRED if name in formats]
    kind = kind or next(iter(usable), "")
    if kind not in usable:
        raise ExportError(
            f"the bundle {source.uri} has no format {kind or 'that gives detections'}",
            fix=f"formats to predict with: {', '.join(usable) or 'none; export onnx'}",
        )
    check_trust(kind, source.uri, run_code, fix="give --run-code")
    with source.files(formats[kind]) as folder:
        runtime = FORMATS[kind].open(folder / formats[kind][0])
        yield Predictor(source.metadata, runtime, kind, tile)


def open_image(path: Path, most_pixels: int = MAX_PIXELS) -> Image.Image:
    """Open and decode an image as training does: upright, 8 bits, RGB."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", fix="check the path") from None
    return decode_image(data, str(path), most_pixels)


def decode_image(data: bytes, name: str, most_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode a JPEG, PNG, WebP, BMP, GIF or TIFF file of at most `most_pixels`, called `name` in errors."""
    try:
        with name_resource_errors(name):
            return read_upright(data, most_pixels)
    except TooManyPixels as error:
        fix = f"use --max-pixels N (at most {MAX_PIXELS}), or shrink the image"
        raise ImageTooLarge(f"{name}: {error}", fix=fix) from None
    except UnreadableImage as error:
        raise DataError(f"{name}: {error}", fix="give JPEG, PNG, WebP, BMP, GIF or TIFF files") from None


def draw(image: Image.Image, detections: list[Detection]) -> Image.Image:
    """Return a copy of an image with boxes, names and scores drawn, the best on top."""
    canvas, longer = image.copy(), max(image.size)
    boxes = [
        LabelledBox(one.box, one.label, f"{one.name} {one.score:.2f}")
        for one in detections
        if one.box[2] > one.box[0] and one.box[3] > one.box[1]  # Not cut to a line at the border.
    ]
    draw_boxes(canvas, boxes, line=max(2, round(longer / 400)), size=max(12, round(longer / 50)))
    return canvas


def as_json(detections: list[Detection], image: Image.Image) -> dict[str, Any]:
    """Return detections as JSON: width, height, detections (label, name, score, box)."""
    found = [asdict(one) | {"score": round(one.score, 6)} for one in detections]
    return {"width": image.width, "height": image.height, "detections": found}
