"""A page that shows what shards hold: counts, classes, sizes and shapes, and what was left out."""

import base64
import io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader
from matplotlib.ticker import EngFormatter

from trainer.base.errors import KubedetError
from trainer.data.images import read_upright
from trainer.data.shard_index import ShardDataset
from trainer.report.figures import SERIES, Plot, figure, svg, variable
from trainer.report.plots import histograms

_LOG = logging.getLogger("data")
_THUMBNAIL = 240
_BARS = 25
"""Classes that the bars name; where there are more, the table of classes is folded up at first."""


def page(index: dict[str, Any]) -> str:
    """Return the page of an index of shards, as HTML that needs no other file."""
    names = [category["name"] for category in index["categories"]]
    plots = [*class_plots(names, index["statistics"]), *histograms(index["statistics"])]
    rows = _class_rows(names, list(index["statistics"].values()))
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, keep_trailing_newline=True
    )
    template = environment.get_template("shards_page.html.jinja")
    return template.render(index, plots=plots, rows=rows, few=_BARS, pairs=_pairs(index))


def _pairs(index: dict[str, Any]) -> list[list[dict[str, str]]]:
    """Return the near duplicates across splits with pictures; none where a shard cannot be read."""
    pairs = index.get("near_duplicates", [])
    try:
        datasets = {split: ShardDataset(index["uri"], split) for pair in pairs for split in pair["splits"]}
        return [
            [
                {"split": split, "name": name, "source": _thumbnail(datasets[split].read(row)[0])}
                for split, name, row in zip(pair["splits"], pair["file_names"], pair["rows"], strict=True)
            ]
            for pair in pairs
        ]
    except KubedetError as error:
        _LOG.warning("the page has no pictures of near duplicates: %s", error.message)
        return []


def _thumbnail(jpeg: bytes) -> str:
    """Return a small picture as a data URI."""
    image = read_upright(jpeg)
    image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _class_rows(names: list[str], statistics: list[Mapping[str, Any]]) -> list[tuple[str, list[int]]]:
    """Boxes and images of each class in each split; the most frequent first."""
    columns = [split[name] for split in statistics for name in ("boxes_of_class", "images_of_class")]
    rows = [(name, list(counts)) for name, *counts in zip(names, *columns, strict=True)]
    return sorted(rows, key=lambda row: -row[1][0])


def class_plots(names: list[str], statistics: Mapping[str, Mapping[str, Any]]) -> list[Plot]:
    """Boxes of the most frequent classes, and how they fall off over all classes where there are many.

    Args:
        names: of the classes, by label.
        statistics: of each split, as in the shards' index; the first one decides on the order.
    """
    counts = {split: np.array(row["boxes_of_class"], float) for split, row in statistics.items()}
    order = np.argsort(-next(iter(counts.values())), kind="stable")
    legend = tuple((variable(color), split) for color, split in zip(SERIES, counts, strict=False))
    shown = order[:_BARS]
    drawn, axes = figure("boxes", "")
    drawn.set_size_inches(4.6, 1.2 + 0.2 * len(shown))
    places = np.arange(len(shown))[::-1]
    height = 0.8 / len(counts)
    for number, (color, boxes) in enumerate(zip(SERIES, counts.values(), strict=False)):
        axes.barh(places - number * height, boxes[shown], color=color, height=height)
    axes.set_yticks(
        places - height * (len(counts) - 1) / 2, [names[label] for label in shown], parse_math=False
    )
    axes.grid(axis="y", visible=False)
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    title = "Classes" if len(shown) == len(names) else f"The {_BARS} most frequent of {len(names)} classes"
    plots = [Plot(title, svg(drawn), legend)]
    if len(names) > _BARS:
        drawn, axes = figure("classes, by frequency in each split", "boxes")
        for color, boxes in zip(SERIES, counts.values(), strict=False):
            axes.plot(np.arange(1, len(names) + 1), -np.sort(-boxes), color=color)
        axes.set_yscale("symlog")
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        plots.append(Plot("Boxes of all classes", svg(drawn), legend))
    return plots
