"""Renders the report of an evaluation as one self-contained HTML page, and as Markdown."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer import storage
from trainer.config.parsing import flatten
from trainer.evaluation.coco import format_metric, format_table
from trainer.evaluation.gate import Verdict
from trainer.evaluation.metrics import METRICS, BaselineComparison, Change, format_verdict_counts
from trainer.evaluation.scoring import MIN_SHOWN_SCORE, Scores
from trainer.report import gallery, plots
from trainer.report.figures import render_template
from trainer.report.gallery import GalleryImage

FILES = ("table.txt", "report.html", "report.md")

_MAX_MARKDOWN_CLASSES = 50


@dataclass(frozen=True)
class ReportData:
    """Content of the report; only the first four are required."""

    title: str
    split: str
    images: int
    scores: Scores
    verdict: Verdict | None = None
    comparison: BaselineComparison | None = None
    training: Sequence[Mapping[str, Any]] = ()  # rows of metrics.jsonl
    gallery: Sequence[GalleryImage] | None = None  # from gallery.worst_images; None omits the gallery
    warnings: Sequence[str] = ()  # warnings about the data
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
    texts = (format_table(data.scores.coco), render_html(data), render_markdown(data))
    for name, text in zip(FILES, texts, strict=True):
        storage.write_bytes(storage.join(str(folder), name), text.encode())


def render_html(data: ReportData) -> str:
    """Return the report as HTML; its content security policy allows only its own script."""
    script = (Path(__file__).parent / "evaluation_page.js.jinja").read_text()
    scores = data.scores
    return render_template(
        "evaluation_page.html.jinja",
        data=data,
        no_detections=not len(scores.matches.rows),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        meanings=METRICS,
        other_metrics={name: value for name, value in scores.metrics.items() if name not in METRICS},
        number=format_metric,
        classes=_class_rows(data),
        class_verdicts=format_verdict_counts(data.comparison.changes) if data.comparison else "",
        curve=plots.plot_precision_recall(scores.coco),
        confusion=scores.confusion.top_classes() if scores.confusion else None,
        training=plots.plot_training(data.training),
        gallery_score=MIN_SHOWN_SCORE,
        gallery_iou=gallery.IOU,
        config={
            key: value if isinstance(value, str) else json.dumps(value, default=str)
            for key, value in flatten(data.config).items()
        },
    )


def render_markdown(data: ReportData) -> str:
    """Return the summary as Markdown: verdict, comparison, metrics, and the weakest classes."""
    lines = [f"# {_escape(data.title)}", "", _escape(data.subtitle), ""]
    if data.verdict:
        lines += [f"**{'Gate passed' if data.verdict.passed else 'Gate failed'}**", ""]
        lines += [f"- {_escape(line)}" for line in data.verdict.reason.splitlines()] + [""]
    if data.comparison and data.comparison.obstacle:
        lines += [f"Not compared with a baseline: {_escape(data.comparison.obstacle)}", ""]
    elif data.comparison:
        change = data.comparison.changes["coco/AP"]
        lines += [
            f"Against the baseline {_escape(data.comparison.name)}: coco/AP {change.delta:+.4f}, with 95 % "
            f"confidence from {change.low:+.4f} to {change.high:+.4f}: {change.verdict}. "
            f"Classes: {format_verdict_counts(data.comparison.changes)}.",
            "",
        ]
    lines += ["| metric | value | meaning |", "| --- | ---: | --- |"]
    for name, value in data.scores.metrics.items():
        meaning = METRICS.get(name, "Open Images Challenge, IoU 0.50")
        lines.append(f"| {name} | {format_metric(value)} | {meaning} |")
    classes = _class_rows(data)
    lines += ["", "| class, weakest first | boxes | AP | AP50 |", "| --- | ---: | ---: | ---: |"]
    for row in classes[:_MAX_MARKDOWN_CLASSES]:
        boxes, ap, ap50 = (row.values[key] for key in ("boxes", "AP", "AP50"))
        lines.append(f"| {_escape(row.name)} | {boxes:,} | {format_metric(ap)} | {format_metric(ap50)} |")
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
        if point := data.scores.operating_points.get(name):
            values |= {"threshold": point.threshold, "F1": point.f1}
        change = data.comparison.changes.get(f"AP[{name}]") if data.comparison else None
        if change:
            values["change"] = change.delta
        rows.append(_ClassRow(name, values, change))
    return sorted(rows, key=lambda row: (row.values["AP"] < 0, row.values["AP"]))
