"""A loaded model and its detections."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from numbers import Real
from typing import Any, BinaryIO, TypeAlias, overload

import numpy as np
import numpy.typing as npt
from PIL import Image

from trainer.base.errors import ConfigError, DataError, wrap_exceptions
from trainer.export.predict import BATCH_SIZE, Detection, Predictor, draw, read_image

ImageLike: TypeAlias = str | os.PathLike[str] | bytes | BinaryIO | npt.NDArray[np.uint8] | Image.Image
"""A path, the bytes of a file, an open file, an RGB array [height, width, 3], or a PIL image."""

_SINGLE_IMAGE_TYPES = (str, os.PathLike, bytes, bytearray, memoryview, Image.Image)


@dataclass(frozen=True, eq=False, repr=False)
class Detections:
    """The N detections in one image, sorted by descending score.

    Examples:
        >>> kubedet.load("runs/first/model").predict("photo.jpg")
        <kubedet.Detections: 1 dog in 192x96 pixels>
    """

    boxes: npt.NDArray[np.float32]  # [N, 4]: x1, y1, x2, y2 in pixels of the image, upright
    scores: npt.NDArray[np.float32]  # [N], from 0 to 1
    labels: npt.NDArray[np.int64]  # [N]: number of the class, from 0
    class_names: list[str]  # [N]: name of the class
    size: tuple[int, int]  # width and height of the image, pixels
    image_id: int  # position of the image in the call of `predict`
    _detections: list[Detection]
    _category_ids: list[Any]
    _source: object

    def __len__(self) -> int:
        return len(self.class_names)

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in Counter(self.class_names).items())
        return f"<kubedet.Detections: {counts or 'nothing'} in {self.size[0]}x{self.size[1]} pixels>"

    def plot(self) -> Image.Image:
        """Return the image with boxes, names and scores; an image file is read again.

        Examples:
            >>> kubedet.load("runs/first/model").predict("photo.jpg").plot().size
            (192, 96)
        """
        return draw(read_image(self._source, "the image"), self._detections)

    def to_coco(self, image_id: int | None = None) -> list[dict[str, Any]]:
        """Return the detections in COCO's results format, with the category ids of the training data.

        Examples:
            >>> result = kubedet.load("runs/first/model").predict("photo.jpg").to_coco(image_id=7)[0]
            >>> result["category_id"], result["bbox"]
            (18, [24.0, 12.0, 72.0, 48.0])
        """
        number = self.image_id if image_id is None else image_id
        corners = [one.box for one in self._detections]
        boxes = [[x1, y1, round(x2 - x1, 2), round(y2 - y1, 2)] for x1, y1, x2, y2 in corners]
        return [
            {
                "image_id": number,
                "category_id": self._category_ids[one.label],
                "bbox": box,
                "score": one.score,
            }
            for one, box in zip(self._detections, boxes, strict=True)
        ]


class Model:
    """A model that detects objects, as `kubedet.load` returns it."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor, self.uri = predictor, predictor.model.uri
        classes = predictor.model.categories
        self.class_names: list[str] = [each["name"] for each in classes]  # By label.
        # Data formats without category ids leave it empty or out.
        originals = [each.get("original_id", "") for each in classes]
        self._category_ids = [label if each == "" else each for label, each in enumerate(originals)]

    def __repr__(self) -> str:
        model, count = self._predictor.model, len(self.class_names)
        return f"<kubedet.Model {model.title}: {count} classes, {model.kind} in {model.runtime}>"

    @overload
    def predict(self, images: ImageLike, *, score: float = ...) -> Detections: ...  # type: ignore[overload-overlap]
    @overload
    def predict(self, images: Iterable[ImageLike], *, score: float = ...) -> list[Detections]: ...
    def predict(
        self, images: ImageLike | Iterable[ImageLike], *, score: float = 0.3
    ) -> Detections | list[Detections]:
        """Detect objects in one image, or in each image of an iterable, which is read in batches.

        Args:
            images: paths, bytes of files, open files, PIL images, or arrays of uint8 [height, width, 3] in
                RGB.
            score: minimum score of a detection, 0 to 1.

        Raises:
            KubedetError: an image is missing, damaged or not of a supported type (the message says which), or
                `score` is not a number from 0 to 1.

        Examples:
            >>> model = kubedet.load("runs/first/model")
            >>> [len(detections) for detections in model.predict(["photo.jpg", "night.jpg"])]
            [1, 0]
        """
        if not isinstance(score, Real) or not 0 <= score <= 1:
            raise ConfigError(f"score must be a number from 0 to 1, not {score!r}", fix="use score=0.3")
        is_array = isinstance(images, np.ndarray) and images.ndim < 4
        if (
            is_array
            or isinstance(images, _SINGLE_IMAGE_TYPES)
            or hasattr(images, "read")
            or not isinstance(images, Iterable)
        ):
            return next(self._detect([images], score, "the image"))
        return list(self._detect(images, score, "images[{}]"))

    def _detect(self, images: Iterable[object], score: float, name: str) -> Iterator[Detections]:
        numbered = enumerate(map(_read_if_open, images))
        while batch := list(islice(numbered, BATCH_SIZE)):
            opened = [read_image(source, name.format(number)) for number, source in batch]
            everything = self._predictor.detect(opened, score)
            for (number, source), image, found in zip(batch, opened, everything, strict=True):
                yield Detections(
                    np.array([one.box for one in found], np.float32).reshape(-1, 4),
                    np.array([one.score for one in found], np.float32),
                    np.array([one.label for one in found], np.int64),
                    [one.name for one in found],
                    image.size,
                    number,
                    found,
                    self._category_ids,
                    source,
                )


def _read_if_open(source: Any) -> object:
    """Return the content of an open file, which can be read only once; return other images unchanged."""
    if not hasattr(source, "read"):
        return source
    with wrap_exceptions(DataError, f"{source!r} cannot be used", fix="open the file with the mode 'rb'"):
        return bytes(source.read())
