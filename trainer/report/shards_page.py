"""Renders a page about shards: counts, classes, sizes, shapes, and excluded images."""

from trainer.data.shard_folder import ShardIndex
from trainer.report.figures import render_template
from trainer.report.plots import plot_histograms

_EXPANDED = 25  # the table of more classes is collapsed at first


def render_shards_page(index: ShardIndex) -> str:
    """Return a self-contained HTML page that describes the shards of an index."""
    splits = index.statistics.values()
    columns = [counts for split in splits for counts in (split.boxes_of_class, split.images_of_class)]
    rows = [(name, list(counts)) for name, *counts in zip(index.class_names, *columns, strict=True)]
    rows.sort(key=lambda row: -row[1][0])
    plots = plot_histograms(index.statistics)
    return render_template("shards_page.html.jinja", **vars(index), plots=plots, rows=rows, limit=_EXPANDED)
