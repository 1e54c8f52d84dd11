"""The model card for people, written from a model's metadata by `model_card.md.jinja`."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2

from trainer.evaluation.coco_metrics import METRICS, number

_MOST_CLASSES = 100


def model_card(metadata: Mapping[str, Any]) -> str:
    """Return Markdown from the content of model_metadata.json."""
    values, scores = metadata["metrics"]["values"], metadata["metrics"].get("per_class", {})
    titles = ["label", "name", "original id"]
    titles += ["boxes scored on", "AP", "AP50", "score of best F1"] if scores else []
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,  # noqa: S701  (Markdown)
    )  # fmt: skip
    return environment.get_template("model_card.md.jinja").render(
        metadata,
        values={name: values[name] for name in METRICS if name in values},
        meanings=METRICS,
        number=number,
        titles=titles,
        class_rows=[_class_cells(item, scores) for item in metadata["classes"][:_MOST_CLASSES]],
        class_row=_row,
    )


def _class_cells(item: Mapping[str, Any], scores: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    cells = [item["id"], item["name"], item.get("original_id", "")]
    if scores:
        row = scores.get(item["name"], {})
        shown = [row.get(key) for key in ("AP", "AP50", "threshold")]
        cells += [row.get("boxes", 0), *("-" if value is None else number(value) for value in shown)]
    return cells


def _row(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
