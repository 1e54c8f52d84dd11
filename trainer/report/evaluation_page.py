"""The evaluation as one HTML page that needs nothing from outside, and as short Markdown."""

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from trainer import storage
from trainer.evaluation.analysis import SHOWN_SCORE
from trainer.evaluation.coco_metrics import number
from trainer.evaluation.metrics import METRICS, VERDICTS, count_verdicts
from trainer.report import gallery, plots, rows
from trainer.report.report_data import Compared, ReportData

FILES = ("report.html", "report.md", "classes.csv", "confusions.csv")

_MARKDOWN_CLASSES = 50
"""Classes that the Markdown summary lists; the page has all."""


def write_report(data: ReportData, folder: str | Path) -> None:
    """Write FILES into a folder: the page, the summary, and the tables for spreadsheets.

    Raises:
        StorageError: one of them cannot be written.
    """
    for name, text in zip(FILES, (html(data), markdown(data), *rows.tables(data)), strict=True):
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
        columns=rows.columns(data),
        classes=rows.classes(data),
        class_verdicts=count_verdicts(data.compared.changes) if data.compared else "",
        verdicts=VERDICTS,
        nothing_found=_nothing_found(data),
        curves=_curves(data),
        errors=_errors(data),
        confusion=rows.confusion(data.confusion.largest()) if data.confusion else None,
        training=plots.training(data.training),
        histograms=plots.histograms(data.statistics) if data.statistics else [],
        gallery=rows.pictures(data),
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
    classes = rows.classes(data)
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
