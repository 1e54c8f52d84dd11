"""Curves for the report, drawn by matplotlib as SVG that takes its colours from the page.

Colours are written as placeholders and replaced by CSS variables, so that one drawing
fits a light and a dark page; the page defines --text, --grid and --series-1 to -8.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainer.evaluation.coco import RECALLS

SERIES = 8
"""Colours for series that the page defines."""
_TEXT, _GRID = "#010101", "#020202"
_SERIES = [f"#0303{number:02x}" for number in range(1, SERIES + 1)]
_VARIABLES = {_TEXT: "var(--text)", _GRID: "var(--grid)"} | {
    color: f"var(--series-{number})" for number, color in enumerate(_SERIES, start=1)
}
_STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "kubedet", "font.family": "sans-serif", "font.size": 10,
    "text.color": _TEXT, "axes.labelcolor": _TEXT, "axes.edgecolor": _GRID, "xtick.color": _GRID,
    "ytick.color": _GRID, "xtick.labelcolor": _TEXT, "ytick.labelcolor": _TEXT, "grid.color": _GRID,
    "axes.grid": True, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "grid.linewidth": 0.6, "lines.linewidth": 1.8, "lines.solid_capstyle": "round",
}  # fmt: skip
_POINTS = 400
_WEAKEST = 5


# Inside a page: no XML head, size and fonts of the page, no style for all of the page, and no
# ids of groups, which would occur once for each drawing.
_PAGE_RULES = (
    (r"^.*?(?=<svg)", ""),
    (r"<metadata>.*?</metadata>", ""),
    (r"<style.*?</style>", ""),
    (
        r'<svg [^>]*?(viewBox="[^"]*")[^>]*>',
        r'<svg xmlns:xlink="http://www.w3.org/1999/xlink" \1 role="img">',
    ),
    (r'<g id="[^"]*"', "<g"),
    (r" font-family: [^;]*;", ""),
    (r"\s*\n\s*", " "),
)


@dataclass(frozen=True)
class Plot:
    """A drawing with its legend, which the page sets as text."""

    title: str
    svg: str
    legend: tuple[tuple[str, str], ...] = ()
    """Pairs of a CSS colour and a label."""


def precision_recall(precision: np.ndarray, per_class: dict[str, dict[str, float]]) -> Plot | None:
    """Precision over recall at IoU 0.5: every class, or the weakest before the range of all.

    Args:
        precision: [T, R, K] as in CocoResult.
        per_class: K rows by name, in the order of `precision`.

    Returns:
        None where no class has boxes.
    """
    known = [(name, place) for place, (name, row) in enumerate(per_class.items()) if row["AP50"] >= 0]
    if not known:
        return None
    few = len(known) <= SERIES - 1
    by_weakness = sorted(known, key=lambda item: per_class[item[0]]["AP50"])
    named = known if few else by_weakness[:_WEAKEST]
    legend = [(f"var(--series-{place + 1})", name) for place, (name, _) in enumerate(named)]
    figure, axes = _figure("recall", "precision")
    if not few:
        curves = precision[0][:, [place for _, place in known]]
        axes.fill_between(RECALLS, *np.percentile(curves, [10, 90], axis=1), color=_GRID, alpha=0.6, lw=0)
        legend.append(("var(--grid)", f"middle 80 % of {len(known)} classes"))
    for color, (_, place) in zip(_SERIES, named, strict=False):
        axes.plot(RECALLS, precision[0, :, place], color=color)
    if len(known) > 1:
        mean = precision[0][:, [place for _, place in known]].mean(axis=1)
        axes.plot(RECALLS, mean, color=_TEXT, linestyle=(0, (4, 2)), linewidth=1.4)
        legend.append(("var(--text)", "mean"))
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    return Plot("Precision and recall at IoU 0.5", _svg(figure), tuple(legend))


_LOSSES = {"loss": "total", "loss_classification": "classes", "loss_boxes": "boxes"}


def training(rows: Sequence[dict[str, Any]]) -> list[Plot]:
    """Loss, learning rate and validation precision over the steps of a training run.

    Args:
        rows: of metrics.jsonl: {"kind": "train", "step", "loss", "loss_classification",
            "loss_boxes", "lr"} and {"kind": "val", "step", "coco/AP", "coco/AP50"}.
    """
    plots = [
        _curves("Loss", "train", rows, _LOSSES),
        _curves("Validation", "val", rows, {"coco/AP50": "AP50", "coco/AP": "AP"}, marker="o"),
        _curves("Learning rate", "train", rows, {"lr": "learning rate"}),
    ]  # fmt: skip
    return [plot for plot in plots if plot]


def sparkline(precision: np.ndarray) -> str:
    """Points of an SVG polyline, 100 wide and 28 high, for one class's precision [R]."""
    places = np.linspace(0, len(precision) - 1, 26).round().astype(int)
    return " ".join(f"{place},{27 - 26 * precision[place]:.1f}" for place in places)


def _curves(
    title: str, kind: str, rows: Sequence[dict[str, Any]], labels: dict[str, str], marker: str = ""
) -> Plot | None:
    figure, axes = _figure("step", "")
    legend = []
    for number, (key, label) in enumerate(labels.items(), start=1):
        points = [(row["step"], row[key]) for row in rows if row.get("kind") == kind and key in row]
        if points:
            steps, values = _thinned(np.array(points, dtype=float))
            axes.plot(steps, values, color=_SERIES[number - 1], marker=marker, markersize=3.5)
            legend.append((f"var(--series-{number})", label))
    if not legend:
        return None
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.locator_params(nbins=5)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4))
    return Plot(title, _svg(figure), tuple(legend) if len(labels) > 1 else ())


def _thinned(points: np.ndarray) -> np.ndarray:
    """Means of neighbouring points [n, 2], so that a long run stays a small drawing: [2, m]."""
    groups = np.array_split(points, min(len(points), _POINTS))
    return np.array([group.mean(axis=0) for group in groups]).T


def _figure(x: str, y: str) -> tuple[Figure, Axes]:
    # A Figure of its own, not pyplot's: nothing global is left behind and no display is needed.
    with rc_context(_STYLE):
        figure = Figure(figsize=(4.6, 2.9), layout="constrained")
        axes = figure.add_subplot(xlabel=x, ylabel=y)
        axes.tick_params(length=0)
    return figure, axes


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    with rc_context(_STYLE):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    for pattern, replacement in _PAGE_RULES:
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    return re.sub("|".join(_VARIABLES), lambda match: _VARIABLES[match[0]], text)
