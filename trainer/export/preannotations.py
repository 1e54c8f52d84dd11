"""Writes detections as annotations to be corrected in other tools: COCO files or Label Studio tasks.

Images are named relative to the folder that contains all of them. CVAT, Roboflow and FiftyOne read COCO's
format. Label Studio reads its own: https://labelstud.io/guide/predictions (as of version 1.20).
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

from trainer import storage
from trainer.export.predict import Detection

Kind = Literal["coco", "label-studio"]
FILES: dict[Kind, tuple[str, ...]] = {
    "coco": ("coco.json",),
    "label-studio": ("label-studio.json", "label-studio.xml"),
}
"""Names of the written files, by kind; the XML file is Label Studio's labeling configuration."""
_FROM, _TO = "label", "image"  # Names in the labeling configuration.


@dataclass(frozen=True)
class PredictedImage:
    """An image and its detections, in pixels of the upright image."""

    path: str
    width: int
    height: int
    detections: Sequence[Detection]


def write(
    kind: Kind,
    folder: str,
    model: str,
    categories: Sequence[Mapping[str, Any]],
    images: Sequence[PredictedImage],
) -> None:
    """Write detections into a folder; `model` is the model's title, and `categories` are its classes."""
    parents = [os.path.dirname(os.path.abspath(image.path)) for image in images]
    top = os.path.commonpath(parents) if parents else ""
    names = [os.path.relpath(image.path, top).replace(os.sep, "/") for image in images]
    if kind == "coco":
        content: object = _coco_dataset(categories, names, images)
    else:
        content = [_label_studio_task(model, name, image) for name, image in zip(names, images, strict=True)]
        storage.write_bytes(storage.join(folder, FILES[kind][1]), _labeling_config(categories).encode())
    storage.write_bytes(storage.join(folder, FILES[kind][0]), (json.dumps(content, indent=1) + "\n").encode())


def _coco_dataset(
    categories: Sequence[Mapping[str, Any]], names: Sequence[str], images: Sequence[PredictedImage]
) -> dict[str, Any]:
    """Return a dataset in COCO's format with scores; categories have the ids of the training data."""
    originals = [item.get("original_id") for item in categories]
    known = all(isinstance(original, int) for original in originals)
    ids = originals if known else [label + 1 for label in range(len(categories))]
    boxes = [(number, item) for number, image in enumerate(images, 1) for item in image.detections]
    annotations = []
    for number, (image_id, item) in enumerate(boxes, 1):
        x1, y1, x2, y2 = item.box
        width, height = round(x2 - x1, 2), round(y2 - y1, 2)
        annotations.append(
            {
                "id": number,
                "image_id": image_id,
                "category_id": ids[item.label],
                "bbox": [x1, y1, width, height],
                "area": round(width * height, 2),
                "iscrowd": 0,
                "score": round(item.score, 6),
            }
        )
    return {
        "images": [
            {"id": number, "file_name": name, "width": image.width, "height": image.height}
            for number, (name, image) in enumerate(zip(names, images, strict=True), 1)
        ],
        "annotations": annotations,
        "categories": [{"id": i, "name": item["name"]} for i, item in zip(ids, categories, strict=True)],
    }


def _label_studio_task(model: str, name: str, image: PredictedImage) -> dict[str, Any]:
    """Return a Label Studio task; its boxes are in percent of the image size."""
    results = []
    for number, item in enumerate(image.detections, 1):
        x1, y1, x2, y2 = item.box
        results.append(
            {
                "id": str(number),
                "type": "rectanglelabels",
                "from_name": _FROM,
                "to_name": _TO,
                "original_width": image.width,
                "original_height": image.height,
                "image_rotation": 0,
                "value": {
                    "x": 100 * x1 / image.width,
                    "y": 100 * y1 / image.height,
                    "width": 100 * (x2 - x1) / image.width,
                    "height": 100 * (y2 - y1) / image.height,
                    "rotation": 0,
                    "rectanglelabels": [item.name],
                },
                "score": round(item.score, 6),
            }
        )
    mean = sum(item.score for item in image.detections) / max(1, len(image.detections))
    return {
        "data": {"image": f"/data/local-files/?d={quote(name)}"},
        "predictions": [{"model_version": model, "score": round(mean, 6), "result": results}],
    }


def _labeling_config(categories: Sequence[Mapping[str, Any]]) -> str:
    labels = "".join(f"    <Label value={quoteattr(item['name'])}/>\n" for item in categories)
    return (
        f'<View>\n  <Image name="{_TO}" value="$image"/>\n'
        f'  <RectangleLabels name="{_FROM}" toName="{_TO}">\n{labels}  </RectangleLabels>\n</View>\n'
    )
