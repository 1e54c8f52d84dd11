"""The evaluation as one HTML page that needs nothing from outside, and as short Markdown."""

import base64
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from PIL import Image

from trainer import storage
from trainer.evaluation import gallery, plots
from trainer.evaluation.coco import METRICS, number
from trainer.evaluation.gallery import GalleryImage, Marked
from trainer.evaluation.gate import Verdict

_THUMBNAIL = 560
"""Longer side of the gallery's images, pixels."""
_MARKDOWN_CLASSES = 50
"""Classes that the Markdown summary lists; the page has all."""


@dataclass(frozen=True)
class ReportData:
    """Everything the report shows. Only the first five are needed."""

    title: str
    """Name of the run or model."""
    split: str
    """Split that was scored."""
    images: int
    """Images in it."""
    metrics: Mapping[str, float]
    """The twelve COCO numbers by name, as in CocoResult."""
    per_class: dict[str, dict[str, float]]
    """AP, AP50 and boxes by class, as in CocoResult."""
    precision: np.ndarray | None = None
    """[T, R, K] as in CocoResult, for the curves."""
    verdict: Verdict | None = None
    """The gate's decision."""
    training: Sequence[dict[str, Any]] = ()
    """Rows of metrics.jsonl."""
    gallery: Sequence[GalleryImage] | None = None
    """From gallery.worst_images; None leaves the gallery out."""
    load_image: Callable[[int], bytes] | None = None
    """Bytes of an encoded image by its id; needed where there is a gallery."""
    dataset: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Counts of each split, e.g. {"train": {"images": 205, "boxes": 2600}}."""
    trained_boxes: Mapping[str, int] = field(default_factory=dict)
    """Training boxes of each class."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Configuration, nested or flat."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Libraries, code, data fingerprint and checkpoint, by name."""


def write_report(data: ReportData, html_uri: str | Path, markdown_uri: str | Path) -> None:
    """Write the page and the summary.

    Raises:
        StorageError: one of them cannot be written.
    """
    storage.write_bytes(str(html_uri), html(data).encode())
    storage.write_bytes(str(markdown_uri), markdown(data).encode())


def html(data: ReportData) -> str:
    """The page: self-contained, without scripts, in the reader's light or dark colours."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja").render(
        title=data.title,
        subtitle=_subtitle(data),
        verdict=data.verdict,
        metrics=data.metrics,
        meanings=METRICS,
        number=number,
        classes=_classes(data),
        trained=bool(data.trained_boxes),
        precision_recall=(
            None if data.precision is None else plots.precision_recall(data.precision, data.per_class)
        ),
        training=plots.training(data.training),
        gallery=_pictures(data),
        gallery_score=gallery.SCORE,
        gallery_iou=gallery.IOU,
        dataset=data.dataset,
        dataset_keys=list(dict.fromkeys(key for row in data.dataset.values() for key in row)),
        config=_flat(data.config),
        versions=data.versions,
    )  # fmt: skip


def markdown(data: ReportData) -> str:
    """The summary: verdict, the twelve numbers, and the weakest classes."""
    lines = [f"# {_escaped(data.title)}", "", _escaped(_subtitle(data)), ""]
    if data.verdict:
        lines += [f"**{'Gate passed' if data.verdict.passed else 'Gate failed'}**", ""]
        lines += [f"- {_escaped(line)}" for line in data.verdict.reason.splitlines()] + [""]
    lines += ["| metric | value | meaning |", "| --- | ---: | --- |"]
    lines += [f"| {name} | {number(data.metrics[name])} | {meaning} |" for name, meaning in METRICS.items()]
    classes = _classes(data)
    lines += ["", "| class, weakest first | boxes | AP | AP50 |", "| --- | ---: | ---: | ---: |"]
    for row in classes[:_MARKDOWN_CLASSES]:
        lines.append(
            f"| {_escaped(row['name'])} | {row['boxes']:,} | {number(row['AP'])} | {number(row['AP50'])} |"
        )
    if len(classes) > _MARKDOWN_CLASSES:
        lines += ["", f"{len(classes) - _MARKDOWN_CLASSES} more classes are in the HTML report."]
    return "\n".join(lines) + "\n"


def _subtitle(data: ReportData) -> str:
    boxes = sum(int(row["boxes"]) for row in data.per_class.values())
    count = len(data.per_class)
    return (
        f"{data.images:,} images of the {data.split} split, {boxes:,} boxes, "
        f"{count} {'class' if count == 1 else 'classes'}"
    )


def _classes(data: ReportData) -> list[dict[str, Any]]:
    """Rows of the class table: weakest first, classes without boxes last."""
    rows = [
        {
            "name": name,
            "boxes": int(row["boxes"]),
            "AP": row["AP"],
            "AP50": row["AP50"],
            "trained": data.trained_boxes.get(name, 0),
            "spark": "" if data.precision is None else plots.sparkline(data.precision[0, :, place]),
        }
        for place, (name, row) in enumerate(data.per_class.items())
    ]
    return sorted(rows, key=lambda row: (row["AP"] < 0, row["AP"]))


def _pictures(data: ReportData) -> list[dict[str, Any]] | None:
    if data.gallery is None or data.load_image is None:
        return None
    return [_picture(item, data.load_image) for item in data.gallery]


def _picture(item: GalleryImage, load_image: Callable[[int], bytes]) -> dict[str, Any]:
    truth = [_drawn(box, "truth", "right" if box.matched else "missed") for box in item.truth]
    found = [_drawn(box, "found", "right" if box.matched else "false") for box in item.predictions]
    return {
        "source": _thumbnail(load_image(item.image_id)),
        "file_name": item.file_name,
        "width": item.width,
        "height": item.height,
        "side": max(item.width, item.height),
        "f1": item.f1,
        "missed": item.missed,
        "false": item.false,
        "objects": len(item.truth),
        "boxes": truth + found,
    }


def _drawn(box: Marked, side: str, kind: str) -> dict[str, Any]:
    x, y, width, height = (round(value, 1) for value in box.box)
    label = box.name if box.score is None else f"{box.name} {box.score:.2f}"
    return {
        "kind": f"{kind} {side}", "label": label, "shown": not box.matched,
        "x": x, "y": y, "width": width, "height": height,
    }  # fmt: skip


def _thumbnail(encoded: bytes) -> str:
    """A small JPEG of an image, as a data URI."""
    with Image.open(io.BytesIO(encoded)) as image:
        small = image.convert("RGB")
    small.thumbnail((_THUMBNAIL, _THUMBNAIL), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted keys and values as text."""
    rows: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            rows |= _flat(value, f"{prefix}{key}.")
        else:
            rows[prefix + key] = value if isinstance(value, str) else json.dumps(value, default=str)
    return rows


def _escaped(text: str) -> str:
    """Text that Markdown and the HTML in it take as it stands, in one table cell."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{character}" if character in r"\`*_[]|#" else character for character in text)
