"""The plots of the evaluation page."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainer.data.statistics import BINS, SplitStatistics
from trainer.evaluation.coco import RECALLS, CocoResult
from trainer.report.figures import GRID_COLOR, SERIES_COLORS, TEXT_COLOR, Plot, figure_to_plot, new_figure

_POINTS = 400
_MAX_CURVES = 5


def plot_precision_recall(result: CocoResult) -> Plot | None:
    """Plot precision over recall at IoU 0.5, for all classes, or for the weakest and the range of all."""
    rows = result.per_class
    curves = {
        name: result.precision[0, :, place] for place, name in enumerate(rows) if rows[name]["AP50"] >= 0
    }
    if not curves:
        return None
    few = len(curves) < len(SERIES_COLORS)
    named = list(curves) if few else sorted(curves, key=lambda name: rows[name]["AP50"])[:_MAX_CURVES]
    legend = list(zip(SERIES_COLORS, named, strict=False))
    drawn, axes = new_figure("recall", "precision")
    every = np.stack(list(curves.values()))
    if not few:
        axes.fill_between(RECALLS, *np.percentile(every, [10, 90], axis=0), color=GRID_COLOR, alpha=0.6, lw=0)
        legend.append((GRID_COLOR, f"middle 80 % of {len(curves)} classes"))
    for color, name in zip(SERIES_COLORS, named, strict=False):
        axes.plot(RECALLS, curves[name], color=color)
    if len(curves) > 1:
        axes.plot(RECALLS, every.mean(axis=0), color=TEXT_COLOR, linestyle=(0, (4, 2)), linewidth=1.4)
        legend.append((TEXT_COLOR, "mean"))
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    return figure_to_plot("Precision and recall at IoU 0.5", drawn, legend)


def plot_training(rows: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """Plot loss, learning rate and validation AP over the steps; `rows` are the rows of metrics.jsonl."""
    train = next((row for row in rows if row["kind"] == "train"), {})
    losses = {"loss": "total"}
    losses |= {key: key.removeprefix("loss_") for key in train if key.startswith("loss_")}
    losses |= {"loss_classification": "classes"} if "loss_classification" in train else {}
    plots = [
        _plot_curves("Loss", "train", rows, losses),
        _plot_curves("Validation", "val", rows, {"coco/AP50": "AP50", "coco/AP": "AP"}, marker="o"),
        _plot_curves("Learning rate", "train", rows, {"lr": "learning rate"}),
    ]
    return [plot for plot in plots if plot]


_HISTOGRAMS = {
    "box_side": ("Box sizes", "side, px"),
    "boxes_per_image": ("Boxes per image", "boxes"),
    "box_aspect": ("Box shapes", "height / width"),
    "image_side": ("Image sizes", "longer side, px"),
}


def plot_histograms(statistics: Mapping[str, SplitStatistics]) -> list[Plot]:
    """Plot the sizes and shapes of boxes and images in each split."""
    plots = []
    for key, (title, label) in _HISTOGRAMS.items():
        drawn, axes = new_figure(label, "share")
        legend = []
        edges = BINS[key]
        for color, (split, split_statistics) in zip(SERIES_COLORS, statistics.items(), strict=False):
            counts = np.array(split_statistics.histogram(key), float)
            if counts.sum():
                axes.stairs(counts / counts.sum(), np.arange(len(edges)), color=color, linewidth=1.8)
                legend.append((color, split))
        step = max(1, len(edges) // 6)
        ticks = []
        for edge in edges:
            value = 2.0**edge if key == "box_aspect" else edge
            if 0 < value < 1 and np.isclose(round(1 / value) * value, 1):
                ticks.append(f"1/{round(1 / value)}")
            else:
                ticks.append(f"{value:.3g}" if value < 1 else f"{value:.4g}")
        axes.set_xticks(np.arange(len(edges))[::step], ticks[::step])
        axes.set_ylim(bottom=0)
        if legend:
            plots.append(figure_to_plot(title, drawn, legend))
    return plots


def _plot_curves(
    title: str, kind: str, rows: Sequence[Mapping[str, Any]], labels: dict[str, str], marker: str = ""
) -> Plot | None:
    drawn, axes = new_figure("step", "")
    legend = []
    for color, (key, label) in zip(SERIES_COLORS, labels.items(), strict=False):
        points = [(row["step"], row[key]) for row in rows if row.get("kind") == kind and key in row]
        if points:
            # Average neighboring points, so that a long training run has few points.
            groups = np.array_split(np.array(points, dtype=float), min(len(points), _POINTS))
            steps, values = np.array([group.mean(axis=0) for group in groups]).T
            axes.plot(steps, values, color=color, marker=marker, markersize=3.5)
            legend.append((color, label))
    if not legend:
        return None
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.locator_params(nbins=5)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4))
    return figure_to_plot(title, drawn, legend if len(labels) > 1 else ())
