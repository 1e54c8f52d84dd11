"""A page about shards: counts, classes, sizes, shapes, and excluded images."""

from collections.abc import Mapping

import numpy as np
from matplotlib.ticker import EngFormatter

from trainer.data.shard_folder import ShardIndex
from trainer.data.statistics import SplitStatistics
from trainer.report.figures import SERIES, Plot, as_plot, bars, figure, render
from trainer.report.plots import histograms

_BARS = 25  # Classes that the bars name; with more the table of classes is collapsed at first.


def page(index: ShardIndex) -> str:
    """Return the page of an index of shards as self-contained HTML."""
    plots = [*class_plots(index.names, index.statistics), *histograms(index.statistics)]
    splits = index.statistics.values()
    columns = [counts for split in splits for counts in (split.boxes_of_class, split.images_of_class)]
    rows = [(name, list(counts)) for name, *counts in zip(index.names, *columns, strict=True)]
    rows.sort(key=lambda row: -row[1][0])
    return render("shards_page.html.jinja", **vars(index), plots=plots, rows=rows, few=_BARS)


def class_plots(names: list[str], statistics: Mapping[str, SplitStatistics]) -> list[Plot]:
    """Plot boxes of the most frequent classes, and with many classes the boxes of all.

    The first split of `statistics` determines the order of `names`, the class names by label.
    """
    counts = {split: np.array(row.boxes_of_class, float) for split, row in statistics.items()}
    order = np.argsort(-next(iter(counts.values())), kind="stable")
    legend = list(zip(SERIES, counts, strict=False))
    shown = order[:_BARS]
    drawn, axes = bars("boxes", [names[label] for label in shown], *(row[shown] for row in counts.values()))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    title = "Classes" if len(shown) == len(names) else f"The {_BARS} most frequent of {len(names)} classes"
    plots = [as_plot(title, drawn, legend)]
    if len(names) > _BARS:
        drawn, axes = figure("classes, by frequency in each split", "boxes")
        for color, boxes in zip(SERIES, counts.values(), strict=False):
            axes.plot(np.arange(1, len(names) + 1), -np.sort(-boxes), color=color)
        axes.set_yscale("symlog")
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        plots.append(as_plot("Boxes of all classes", drawn, legend))
    return plots
