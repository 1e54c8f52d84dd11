"""Detects objects in images with a bundle or a checkpoint."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from trainer.base.errors import DataError, ExportError, wrap_exceptions
from trainer.base.os_errors import name_resource_errors
from trainer.config.parsing import with_overrides
from trainer.config.schema import Config
from trainer.data.box_labels import LabeledBox, draw_boxes
from trainer.data.images import MAX_PIXELS, TooManyPixels, UnreadableImage, read_upright
from trainer.data.tiles import tile_settings, tiling
from trainer.evaluation.inference import LoadedModel, join_detections, to_image_boxes
from trainer.export import loading, published_models
from trainer.export.bundle import Bundle
from trainer.export.preprocess import preprocess, to_upright_rgb
from trainer.model.architecture import Detections

BATCH_SIZE = 8  # images or tiles per call of the model


class ImageTooLarge(DataError):
    """The image has more pixels than the limit."""


@dataclass(frozen=True)
class Detection:
    """A detected object in an image."""

    label: int
    name: str
    score: float
    box: tuple[float, float, float, float]  # x1, y1, x2, y2 in pixels of the image, upright


class Predictor:
    """Detects objects in images with a loaded model."""

    def __init__(self, model: LoadedModel, tile: int = -1) -> None:
        """`tile` is the side of the tiles into which images are cut; see `evaluation.tile`."""
        self.model, self.metadata, self.kind = model, model.metadata, model.kind
        self.size: int = model.network_input.size
        self.names = {item["id"]: item["name"] for item in model.categories}
        self.tile = tile_settings(model.config, tile)

    def run(self, squares: np.ndarray) -> Detections:
        """Detect objects in preprocessed images, uint8 [B, 3, size, size]."""
        # The bytes of a request are read-only.
        images = torch.from_numpy(np.require(squares, requirements="W"))
        with torch.inference_mode():
            return Detections(*(part.cpu() for part in self.model.predict(images)))

    def __call__(self, image: Image.Image, min_score: float = 0.0) -> list[Detection]:
        return self.detect([image], min_score)[0]

    def detect(self, images: Sequence[Image.Image], min_score: float = 0.0) -> list[list[Detection]]:
        """Detect objects in upright RGB images, `BATCH_SIZE` images or tiles at a time; best first."""
        sizes = {number: np.array(image.size) for number, image in enumerate(images)}
        parts = [(row, part) for row, image in enumerate(images) for part in tiling(*image.size, *self.tile)]
        shown = []
        for batch in (parts[start : start + BATCH_SIZE] for start in range(0, len(parts), BATCH_SIZE)):
            rows, places = zip(*batch, strict=True)
            crops = (images[row].crop((x, y, x + wide, y + high)) for row, (x, y, wide, high) in batch)
            fitted = [preprocess(crop, *self.model.network_input) for crop in crops]
            squares, scales = zip(*fitted, strict=True)
            outputs = self.run(np.stack(squares))
            factors = [tuple(scale) for scale in scales]
            shown.append(to_image_boxes(outputs, list(rows), factors, sizes, places))
        found = join_detections(shown, sizes, self.tile)
        detections: list[list[Detection]] = [[] for _ in images]
        for row in np.argsort(-found.scores, kind="stable"):
            if found.scores[row] >= min_score:
                x, y, wide, high = found.boxes[row]
                label, score = int(found.labels[row]), float(found.scores[row])
                x1, y1, x2, y2 = (round(float(side), 2) for side in (x, y, x + wide, y + high))
                detection = Detection(label, self.names[label], score, (x1, y1, x2, y2))
                detections[int(found.image_ids[row])].append(detection)
        return detections


def open_model(model: str, data_root: str, kind: str = "", *, tile: int = -1) -> Predictor:
    """Open a checkpoint (.pt), or a bundle by its folder, NAME or NAME@VERSION; see `open_bundle`."""
    tile = with_overrides(Config(), {"evaluation.tile": tile}, where="the tile").evaluation.tile
    if not model.endswith(".pt"):
        source = published_models.load(model, data_root)
        return open_bundle(source, kind, tile=tile)
    if kind:
        raise ExportError(f"the checkpoint {model} has no format {kind}", fix="use the folder RUN/model")
    return Predictor(loading.load_model(model, _default_device()), tile)


def open_bundle(source: Bundle, kind: str = "", *, tile: int = -1) -> Predictor:
    """Open a format of a bundle after verifying its checksum.

    For `kind` see `loading.select_file`, for `tile` see `Predictor`.
    """
    name = loading.select_file(source, kind)
    return Predictor(loading.load_bundle_file(source, name, _default_device()), tile)


def _default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def read_image(source: object, name: str) -> Image.Image:
    """Return an image as training reads it: upright, RGB; errors refer to it as `name`.

    `source` is a path, the bytes of a file, a PIL image, or uint8 [H, W], [H, W, 3] (RGB) or [H, W, 4].
    """
    if isinstance(source, str | os.PathLike):
        return open_image(Path(source))
    if isinstance(source, bytes | bytearray | memoryview):
        return decode_image(bytes(source), name)
    form = type(source).__name__
    if isinstance(source, np.ndarray):
        form = f"an array of {source.dtype} {list(source.shape)}"
        is_image = source.ndim == 2 or (source.ndim == 3 and source.shape[2] in (3, 4))
        if is_image and source.dtype == np.uint8 and source.size:
            source = Image.fromarray(source)
    if not isinstance(source, Image.Image):
        raise DataError(
            f"{name} cannot be used: it is {form}",
            fix="pass a path, the bytes of a file, a PIL image, or an RGB array of uint8 [height, width, 3]",
        )
    with wrap_exceptions(DataError, f"{name} cannot be used", fix="save and reload it, or convert it to RGB"):
        return to_upright_rgb(source)


def open_image(path: Path) -> Image.Image:
    """Open and decode an image as training does: upright, 8 bits, RGB."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", fix="check the path") from None
    return decode_image(data, str(path))


def decode_image(data: bytes, name: str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode a JPEG, PNG, WebP, BMP, GIF or TIFF file of at most `max_pixels`; errors call it `name`."""
    try:
        with name_resource_errors(name):
            return read_upright(data, max_pixels)
    except TooManyPixels as error:
        raise ImageTooLarge(f"{name}: {error}", fix="shrink the image") from None
    except UnreadableImage as error:
        raise DataError(f"{name}: {error}", fix="use JPEG, PNG, WebP, BMP, GIF or TIFF files") from None


def draw(image: Image.Image, detections: list[Detection]) -> Image.Image:
    """Return a copy of an image with boxes, names and scores drawn, the best on top."""
    canvas, longer = image.copy(), max(image.size)
    boxes = [LabeledBox(item.box, item.label, f"{item.name} {item.score:.2f}") for item in detections]
    draw_boxes(canvas, boxes, line=max(2, round(longer / 400)), size=max(12, round(longer / 50)))
    return canvas


def to_dict(detections: list[Detection], image: Image.Image) -> dict[str, Any]:
    """Return detections as a dictionary for JSON: width, height, detections (label, name, score, box)."""
    found = [asdict(item) | {"score": round(item.score, 6)} for item in detections]
    return {"width": image.width, "height": image.height, "detections": found}
