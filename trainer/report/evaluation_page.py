"""The evaluation as one self-contained HTML page, as Markdown, and as CSV."""

import base64
import csv
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainer import storage
from trainer.config.parsing import flat
from trainer.data.statistics import SplitStatistics
from trainer.evaluation.coco import number, table
from trainer.evaluation.gate import Verdict
from trainer.evaluation.metrics import METRICS, VERDICTS, Change, Compared, count_verdicts
from trainer.evaluation.scoring import SHOWN_SCORE, Scores
from trainer.report import gallery, plots
from trainer.report.figures import render
from trainer.report.gallery import GalleryImage

FILES = ("table.txt", "report.html", "report.md", "classes.csv", "confusions.csv")

_MAX_MARKDOWN_CLASSES = 50


@dataclass(frozen=True)
class ReportData:
    """Content of the report; only the first four are required."""

    title: str
    split: str
    images: int
    scores: Scores
    verdict: Verdict | None = None
    compared: Compared | None = None
    training: Sequence[Mapping[str, Any]] = ()  # rows of metrics.jsonl
    gallery: Sequence[GalleryImage] | None = None  # from gallery.worst_images; None omits the gallery
    dataset: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Counts of each split, e.g. {"train": {"images": 205, "boxes": 2600}}."""
    warnings: Sequence[str] = ()  # warnings about the data
    statistics: Mapping[str, SplitStatistics] = field(default_factory=dict)
    trained_boxes: Mapping[str, int] = field(default_factory=dict)  # training boxes of each class
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of libraries, code, data and checkpoint, by name."""

    @property
    def subtitle(self) -> str:
        rows = self.scores.coco.per_class
        boxes = sum(int(row["boxes"]) for row in rows.values())
        return (
            f"{self.images:,} images of the {self.split} split, {boxes:,} boxes, "
            f"{len(rows)} {'class' if len(rows) == 1 else 'classes'}"
        )


def write_report(data: ReportData, folder: str | Path) -> None:
    """Write FILES into a folder."""
    per_class = []
    for row in _class_rows(data):
        shown = {key: "" if key.startswith("AP") and n < 0 else n for key, n in row.values.items()}
        change = row.change
        compared = {"low": change.low, "high": change.high, "verdict": change.verdict} if change else {}
        per_class.append({"class": row.name, **shown, **compared})
    confused = []
    if data.scores.confusion:
        names, counts = data.scores.confusion.names, data.scores.confusion.counts
        confused = [
            {"true class": names[row], "predicted class": names[column], "boxes": int(counts[row, column])}
            for row, column in zip(*np.nonzero(counts), strict=True)
        ]
    texts = (
        table(data.scores.coco),
        html(data),
        markdown(data),
        _csv(per_class, ["class"]),
        _csv(confused, ["true class", "predicted class", "boxes"]),
    )
    for name, text in zip(FILES, texts, strict=True):
        storage.write_bytes(storage.join(str(folder), name), text.encode())


def html(data: ReportData) -> str:
    """Return the self-contained page; its content security policy allows only its own script."""
    script = (Path(__file__).parent / "evaluation_page.js.jinja").read_text()
    scores = data.scores
    return render(
        "evaluation_page.html.jinja",
        data=data,
        nothing_found=not len(scores.matches.rows),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        meanings=METRICS,
        others={name: value for name, value in scores.metrics.items() if name not in METRICS},
        number=number,
        classes=_class_rows(data),
        class_verdicts=count_verdicts(data.compared.changes) if data.compared else "",
        verdicts=VERDICTS,
        curves=[plot for plot in (plots.precision_recall(scores.coco), plots.f1(scores)) if plot],
        confusion=scores.confusion.largest() if scores.confusion else None,
        training=plots.training(data.training),
        histograms=plots.histograms(data.statistics) if data.statistics else [],
        gallery_score=SHOWN_SCORE,
        gallery_iou=gallery.IOU,
        dataset_keys=list(dict.fromkeys(key for row in data.dataset.values() for key in row)),
        config={
            key: value if isinstance(value, str) else json.dumps(value, default=str)
            for key, value in flat(data.config).items()
        },
    )


def markdown(data: ReportData) -> str:
    """Return the summary: verdict, comparison, metrics, and the weakest classes."""
    lines = [f"# {_escape(data.title)}", "", _escape(data.subtitle), ""]
    if data.verdict:
        lines += [f"**{'Gate passed' if data.verdict.passed else 'Gate failed'}**", ""]
        lines += [f"- {_escape(line)}" for line in data.verdict.reason.splitlines()] + [""]
    if data.compared and data.compared.obstacle:
        lines += [f"Not compared with a baseline: {_escape(data.compared.obstacle)}", ""]
    elif data.compared:
        change = data.compared.changes["coco/AP"]
        lines += [
            f"Against the baseline {_escape(data.compared.name)}: coco/AP {change.delta:+.4f}, with 95 % "
            f"confidence from {change.low:+.4f} to {change.high:+.4f}: {change.verdict}. "
            f"Classes: {count_verdicts(data.compared.changes)}.",
            "",
        ]
    lines += ["| metric | value | meaning |", "| --- | ---: | --- |"]
    for name, value in data.scores.metrics.items():
        meaning = METRICS.get(name, "Open Images Challenge, IoU 0.50")
        lines.append(f"| {name} | {number(value)} | {meaning} |")
    classes = _class_rows(data)
    lines += ["", "| class, weakest first | boxes | AP | AP50 |", "| --- | ---: | ---: | ---: |"]
    for row in classes[:_MAX_MARKDOWN_CLASSES]:
        boxes, ap, ap50 = (row.values[key] for key in ("boxes", "AP", "AP50"))
        lines.append(f"| {_escape(row.name)} | {boxes:,} | {number(ap)} | {number(ap50)} |")
    if len(classes) > _MAX_MARKDOWN_CLASSES:
        lines += ["", f"{len(classes) - _MAX_MARKDOWN_CLASSES} more classes are in the HTML report."]
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{character}" if character in r"\`*_[]|#" else character for character in text)


@dataclass(frozen=True)
class _ClassRow:
    name: str
    values: dict[str, float]  # by the keys of the page's columns
    change: Change | None

    @property
    def verdict(self) -> str:
        return self.change.verdict if self.change else ""


def _class_rows(data: ReportData) -> list[_ClassRow]:
    rows = []
    for name, row in data.scores.coco.per_class.items():
        values = {"boxes": row["boxes"], **{key: row[key] for key in row if key.startswith("AP")}}
        if data.trained_boxes:
            values["trained"] = data.trained_boxes.get(name, 0)
        if point := data.scores.points.get(name):
            values |= {"threshold": point.threshold, "F1": point.f1}
        change = data.compared.changes.get(f"AP[{name}]") if data.compared else None
        if change:
            values["change"] = change.delta
        rows.append(_ClassRow(name, values, change))
    return sorted(rows, key=lambda row: (row.values["AP"] < 0, row.values["AP"]))


def _csv(table: Sequence[Mapping[str, Any]], first: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys([*first, *(key for row in table for key in row)])))
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()
