"""A page that shows how far two sets of data are apart: distances, distributions, classes."""

from typing import Any

import numpy as np

from operations.drift import Drift
from trainer.evaluation.metrics import DRIFT
from trainer.report.figures import GRID, SERIES, TEXT, Plot, as_plot, bars, figure, render

_CLASSES = 20
"""Classes whose shares are drawn: those that changed most."""
_BINS = 24
_AXES = {
    "drift/boxes_per_image": "boxes",
    "drift/box_size": "side, px",
    "drift/image_size": "longer side, px",
    "drift/brightness": "mean luminance, 0 to 1",
    "drift/sharpness": "log of the squared Laplacian",
}


def page(drift: Drift) -> str:
    """Return the page as HTML that needs no other file."""
    plots = [_distances(drift), _classes(drift)]
    plots += [_distribution(drift, name) for name in _AXES if name in drift.shifts]
    return render(
        "drift_page.html.jinja",
        drift=drift, plots=[plot for plot in plots if plot], rows=_rows(drift), meanings=DRIFT,
        missing=[DRIFT[name] for name in DRIFT if name not in drift.shifts], classes=_class_rows(drift),
        sure=[DRIFT[name] for name, shift in drift.shifts.items() if shift.sure], few=_CLASSES,
    )  # fmt: skip


def _rows(drift: Drift) -> list[dict[str, Any]]:
    rows = []
    for name, shift in drift.shifts.items():
        shown = [f"{value:.4g}" for value in drift.medians(name)] or ["-", "-"]
        rows.append({"name": name, "meaning": DRIFT[name], "shift": shift, "medians": shown})
    return rows


def _class_rows(drift: Drift) -> list[tuple[str, float, float, float]]:
    """Each class with its shares and what changed; the largest change first."""
    changes = drift.shares[1] - drift.shares[0]
    order = np.argsort(-np.abs(changes), kind="stable")
    return [
        (drift.classes[place], *drift.shares[:, place].tolist(), float(changes[place])) for place in order
    ]


_LEGEND = ((SERIES[0], "A"), (SERIES[1], "B"))


def _distances(drift: Drift) -> Plot:
    """Each distance with its interval, beside what chance alone gives."""
    drawn, axes = figure("distance, 0 to 1", "")
    shifts = list(drift.shifts.values())
    places = np.arange(len(shifts))[::-1]
    axes.barh(places, [shift.chance for shift in shifts], color=GRID, height=0.7)
    for place, shift in zip(places, shifts, strict=True):
        axes.plot([shift.low, shift.high], [place, place], color=TEXT, linewidth=1.4)
        axes.plot([shift.value], [place], color=SERIES[1 if shift.sure else 0], marker="o", markersize=6)
    axes.set_yticks(places, [name.removeprefix("drift/").replace("_", " ") for name in drift.shifts])
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, max(0.2, *(1.1 * max(shift.high, shift.chance) for shift in shifts)))
    axes.locator_params(axis="x", nbins=5)
    legend = (
        (SERIES[1], "more than chance"),
        (SERIES[0], "may be chance"),
        (TEXT, "95 % interval"),
        (GRID, "95 % of what chance gives"),
    )
    return as_plot("How far apart", drawn, legend)


def _classes(drift: Drift) -> Plot | None:
    rows = _class_rows(drift)[:_CLASSES]
    if not rows:
        return None
    names, one, other, _ = zip(*rows, strict=True)
    drawn, _ = bars("share of the boxes", names, one, other)
    title = "Classes" if len(rows) == len(drift.classes) else f"The {len(rows)} classes that changed most"
    return as_plot(title, drawn, _LEGEND)


def _distribution(drift: Drift, name: str) -> Plot:
    drawn, axes = figure(_AXES[name], "share")
    pair = [part.numbers[name].values for part in (drift.one, drift.other)]
    both = np.concatenate(pair)
    # Without the outermost half per cent: one huge box would make one bar of all others.
    low, high = np.percentile(both, [0.5, 99.5])
    if name == "drift/boxes_per_image":
        edges = np.arange(low, high + 2, max(1, np.ceil((high - low + 1) / _BINS))) - 0.5
    else:
        edges = np.linspace(low, high if high > low else low + 1, _BINS + 1)
    for color, values in zip(SERIES, pair, strict=False):
        counts = np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0]
        axes.stairs(counts / max(counts.sum(), 1), edges, color=color, linewidth=1.8)
    axes.set_ylim(bottom=0)
    axes.locator_params(nbins=5)
    return as_plot(DRIFT[name].capitalize(), drawn, _LEGEND)
