"""The evaluation as one HTML page that needs nothing from outside, and as short Markdown."""

import base64
import csv
import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from PIL import Image

from trainer import storage
from trainer.evaluation.analysis import SHOWN_SCORE, Confusion
from trainer.evaluation.coco_metrics import number
from trainer.evaluation.metrics import METRICS, VERDICTS, Compared, count_verdicts
from trainer.report import gallery, plots
from trainer.report.gallery import GalleryImage, Marked
from trainer.report.report_data import ReportData

FILES = ("report.html", "report.md", "classes.csv", "confusions.csv")

_MARKDOWN_CLASSES = 50
"""Classes that the Markdown summary lists; the page has all."""


def write_report(data: ReportData, folder: str | Path) -> None:
    """Write FILES into a folder: the page, the summary, and the tables for spreadsheets.

    Raises:
        StorageError: one of them cannot be written.
    """
    for name, text in zip(FILES, (html(data), markdown(data), *_tables(data)), strict=True):
        storage.write_bytes(storage.join(str(folder), name), text.encode())


def html(data: ReportData) -> str:
    """The page: self-contained, in the reader's light or dark colours.

    Its one script sorts and filters the class table; the page's own policy lets no other run,
    whatever a name of a class or file holds.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = environment.get_template("evaluation_page.js.jinja").render()
    return environment.get_template("evaluation_page.html.jinja").render(
        data=data,
        style=environment.get_template("evaluation_page.css.jinja").render(),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        subtitle=_subtitle(data),
        meanings=METRICS,
        others={name: value for name, value in data.metrics.items() if name not in METRICS},
        number=number,
        columns=_columns(data),
        classes=_class_rows(data),
        class_verdicts=count_verdicts(data.compared.changes) if data.compared else "",
        verdicts=VERDICTS,
        nothing_found=_nothing_found(data),
        curves=_curves(data),
        errors=_errors(data),
        confusion=_confusion_rows(data.confusion.largest()) if data.confusion else None,
        training=plots.training(data.training),
        histograms=plots.histograms(data.statistics) if data.statistics else [],
        gallery=_pictures(data),
        gallery_score=SHOWN_SCORE,
        gallery_iou=gallery.IOU,
        dataset_keys=list(dict.fromkeys(key for row in data.dataset.values() for key in row)),
        config=_flatten(data.config),
    )  # fmt: skip


def _curves(data: ReportData) -> list[plots.Plot]:
    curves = [
        None if data.precision is None else plots.precision_recall(data.precision, data.per_class),
        plots.f1(data.f1, data.per_class),
    ]
    return [plot for plot in curves if plot]


def _errors(data: ReportData) -> list[plots.Plot]:
    error_plots = [
        plots.tide(data.tide) if data.tide else None,
        plots.calibration(data.calibration) if data.calibration and not _nothing_found(data) else None,
    ]
    return [plot for plot in error_plots if plot]


def _nothing_found(data: ReportData) -> bool:
    return data.calibration is not None and not data.calibration.count.any()


def markdown(data: ReportData) -> str:
    """The summary: verdict, the numbers, the comparison, and the weakest classes."""
    lines = [f"# {_escaped(data.title)}", "", _escaped(_subtitle(data)), ""]
    if data.verdict:
        lines += [f"**{'Gate passed' if data.verdict.passed else 'Gate failed'}**", ""]
        lines += [f"- {_escaped(line)}" for line in data.verdict.reason.splitlines()] + [""]
    lines += _compared_lines(data.compared) if data.compared else []
    lines += ["| metric | value | meaning |", "| --- | ---: | --- |"]
    meanings = {**dict.fromkeys(data.metrics, "Open Images Challenge, IoU 0.50"), **METRICS}
    lines += [f"| {name} | {number(data.metrics[name])} | {meanings[name]} |" for name in data.metrics]
    classes = _class_rows(data)
    lines += ["", "| class, weakest first | boxes | AP | AP50 |", "| --- | ---: | ---: | ---: |"]
    for row in classes[:_MARKDOWN_CLASSES]:
        lines.append(
            f"| {_escaped(row['name'])} | {row['boxes']:,} | {number(row['AP'])} | {number(row['AP50'])} |"
        )
    if len(classes) > _MARKDOWN_CLASSES:
        lines += ["", f"{len(classes) - _MARKDOWN_CLASSES} more classes are in the HTML report."]
    return "\n".join(lines) + "\n"


def _compared_lines(compared: Compared) -> list[str]:
    name = _escaped(compared.name)
    if compared.obstacle:
        return [f"Not compared with a baseline: {_escaped(compared.obstacle)}", ""]
    change = compared.changes["coco/AP"]
    return [
        f"Against the baseline {name}: coco/AP {change.delta:+.4f}, with 95 % confidence from "
        f"{change.low:+.4f} to {change.high:+.4f}: {change.verdict}. "
        f"Classes: {count_verdicts(compared.changes)}.",
        "",
    ]


def _subtitle(data: ReportData) -> str:
    boxes = sum(int(row["boxes"]) for row in data.per_class.values())
    count = len(data.per_class)
    return (
        f"{data.images:,} images of the {data.split} split, {boxes:,} boxes, "
        f"{count} {'class' if count == 1 else 'classes'}"
    )


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted keys and values as text."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat


def _escaped(text: str) -> str:
    """Text that Markdown and the HTML in it take as it stands, in one table cell."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{character}" if character in r"\`*_[]|#" else character for character in text)


_THUMBNAIL = 560
"""Longer side of the gallery's images, pixels."""
_NAMED, _LONGEST = 8, 24
"""Wrong boxes of each side that the gallery names in an image, and letters of a name."""
_LETTERS, _LETTER, _LINE, _LOWER = 0.034, 0.6, 1.25, 3
"""Size of a label's letters as a share of the image's longer side; width of a letter and height of a
line as shares of that; lines that a label may give way to others downwards."""


@dataclass(frozen=True)
class _Column:
    """A column of numbers in the class table."""

    key: str
    title: str
    hint: str
    wide: bool = False
    """Left out on narrow screens."""


def _columns(data: ReportData) -> list[_Column]:
    """The columns of numbers for which there is something to show."""
    shown = [_Column("boxes", "boxes", "boxes that were to be found")]
    if data.trained_boxes:
        shown.append(_Column("trained", "trained on", "boxes of the class in the training split", wide=True))
    shown += [_Column("AP", "AP", "mean over IoU 0.50 to 0.95"), _Column("AP50", "AP50", "at IoU 0.50")]
    sizes = {"APs": "small", "APm": "medium", "APl": "large"}
    if all(key in row for row in data.per_class.values() for key in sizes):
        shown += [
            _Column(key, key[-1].upper(), f"AP of {size} objects", wide=True) for key, size in sizes.items()
        ]
    if data.points:
        shown.append(_Column("threshold", "threshold", "score with the best F1 at IoU 0.5", wide=True))
        shown.append(_Column("F1", "F1", "F1 at that threshold", wide=True))
    if data.compared and data.compared.changes:
        shown.append(_Column("change", "change", "of AP against the baseline, with its 95 % interval"))
    return shown


def _class_rows(data: ReportData) -> list[dict[str, Any]]:
    """Rows of the class table: weakest first, classes without boxes last."""
    rows = []
    for place, (name, row) in enumerate(data.per_class.items()):
        cells = {"boxes": f"{int(row['boxes']):,}", **_shares(row)}
        numbers = {"boxes": row["boxes"], **{key: row[key] for key in row if key.startswith("AP")}}
        if data.trained_boxes:
            numbers["trained"] = data.trained_boxes.get(name, 0)
            cells["trained"] = f"{numbers['trained']:,}"
        if point := data.points.get(name):
            numbers |= {"threshold": point.threshold, "F1": point.f1}
            cells |= {"threshold": number(point.threshold), "F1": number(point.f1)}
        spark = "" if data.precision is None else plots.sparkline(data.precision[0, :, place])
        basics = {"name": name, "boxes": int(row["boxes"]), "AP": row["AP"], "AP50": row["AP50"]}
        rows.append({**basics, "cells": cells, "numbers": numbers, "spark": spark, **_change(data, name)})
        if change := rows[-1]["change"]:
            numbers["change"], cells["change"] = change.delta, f"{change.delta:+.3f}"
    return sorted(rows, key=lambda row: (row["AP"] < 0, row["AP"]))


def _shares(row: Any) -> dict[str, str]:
    return {key: number(value) for key, value in row.items() if key.startswith("AP")}


def _change(data: ReportData, name: str) -> dict[str, Any]:
    change = data.compared.changes.get(f"AP[{name}]") if data.compared else None
    return {"change": change, "verdict": change.verdict if change else ""}


def _tables(data: ReportData) -> tuple[str, str]:
    """Return the classes, and the confusions that occur, as CSV.

    A value that does not exist is empty: AP without boxes of the size, a threshold without detections.
    """
    per_class = []
    for row in _class_rows(data):
        shown = {
            key: "" if key.startswith("AP") and value < 0 else value for key, value in row["numbers"].items()
        }
        change = row["change"]
        compared = {"low": change.low, "high": change.high, "verdict": change.verdict} if change else {}
        per_class.append({"class": row["name"], **shown, **compared})
    confused = []
    if data.confusion:
        names, counts = data.confusion.names, data.confusion.counts
        confused = [
            {"true class": names[row], "predicted class": names[column], "boxes": int(counts[row, column])}
            for row, column in zip(*np.nonzero(counts), strict=True)
        ]
    return _csv(per_class, ["class"]), _csv(confused, ["true class", "predicted class", "boxes"])


def _csv(table: Sequence[dict[str, Any]], first: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys([*first, *(key for row in table for key in row)])))
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def _confusion_rows(matrix: Confusion) -> dict[str, Any]:
    """The confusion matrix as rows of cells: count, and its share of the row."""
    rows = []
    for name, counts in zip(matrix.names, matrix.counts.tolist(), strict=True):
        total = max(sum(counts), 1)
        rows.append({"name": name, "cells": [{"count": n, "share": n / total} for n in counts]})
    return {"names": matrix.names, "rows": rows}


def _pictures(data: ReportData) -> list[dict[str, Any]] | None:
    """The gallery's images with their boxes; None where there is no gallery."""
    if data.gallery is None or data.load_image is None:
        return None
    return [_picture(item, data.load_image) for item in data.gallery]


def _picture(item: GalleryImage, load_image: Callable[[int], bytes]) -> dict[str, Any]:
    truth = _side_cells(item.truth, "truth", "missed")
    detections = _side_cells(item.predictions, "found", "false")
    boxes = truth + detections
    _place_labels(boxes, item.width, item.height)
    return {
        "source": _thumbnail(load_image(item.image_id)),
        "file_name": item.file_name,
        "width": item.width,
        "height": item.height,
        "letters": round(_LETTERS * max(item.width, item.height), 1),
        "f1": item.f1,
        "missed": item.missed,
        "false": item.false,
        "objects": len(item.truth),
        "boxes": boxes,
    }


def _side_cells(boxes: Sequence[Marked], side: str, wrong: str) -> list[dict[str, Any]]:
    """Boxes of one side; the first wrong ones show their names, for more would cover the image."""
    drawn = [_box_cells(box, side, "right" if box.matched else wrong) for box in boxes]
    wrong_ones = [(one, box) for one, box in zip(drawn, boxes, strict=True) if not box.matched]
    for one, box in wrong_ones[:_NAMED]:
        short = box.name if len(box.name) <= _LONGEST else box.name[: _LONGEST - 1] + "…"
        one["shown"] = _label(short, box.score)
    return drawn


def _place_labels(boxes: Sequence[dict[str, Any]], width: int, height: int) -> None:
    """Give each shown label a place in the image that no other one has; without one it is not shown."""
    letters = _LETTERS * max(width, height)
    line = _LINE * letters
    taken: list[tuple[float, float, float]] = []

    def free(left: float, right: float, top: float) -> bool:
        # Touching is no overlap; sums of floats may differ in their last bits.
        inside = top + line <= height + 0.1
        return inside and not any(
            abs(top - y) < line - 0.1 and left < end and start < right for start, end, y in taken
        )

    for box in boxes:
        if not box["shown"]:
            continue
        long = _LETTER * letters * len(box["shown"])
        left = max(min(box["x"], width - long), 0.0)
        first = max(min(box["y"], height - line), 0.0)
        tops = (first + step * line for step in range(_LOWER))
        top = next((top for top in tops if free(left, left + long, top)), None)
        if top is None:
            box["shown"] = ""
            continue
        taken.append((left, left + long, top))
        # Text stands on its base line, a letter's height below the top.
        box["label_x"], box["label_y"] = round(left + 0.15 * letters, 1), round(top + letters, 1)


def _box_cells(box: Marked, side: str, kind: str) -> dict[str, Any]:
    x, y, width, height = (round(value, 1) for value in box.box)
    return {
        "kind": f"{kind} {side}", "label": _label(box.name, box.score), "shown": "",
        "x": x, "y": y, "width": width, "height": height,
    }  # fmt: skip


def _label(name: str, score: float | None) -> str:
    return name if score is None else f"{name} {score:.2f}"


def _thumbnail(encoded: bytes) -> str:
    """A small JPEG of an image, as a data URI."""
    with Image.open(io.BytesIO(encoded)) as image:
        small = image.convert("RGB")
    small.thumbnail((_THUMBNAIL, _THUMBNAIL), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
