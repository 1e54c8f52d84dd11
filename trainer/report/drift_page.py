"""A page that shows how far two sets of data are apart: distances, distributions, classes."""

from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from trainer.drift.comparing import Drift, is_number, medians, numbers
from trainer.evaluation.metrics import DRIFT
from trainer.report.figures import GRID, SERIES, TEXT, Plot, figure, svg, variable

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
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        keep_trailing_newline=True,
    )  # fmt: skip
    plots = [_distances(drift), _classes(drift)]
    plots += [_distribution(drift, name) for name in _AXES if name in drift.shifts]
    return environment.get_template("drift_page.html.jinja").render(
        drift=drift, plots=[plot for plot in plots if plot], rows=_rows(drift), meanings=DRIFT,
        missing=[DRIFT[name] for name in DRIFT if name not in drift.shifts], classes=_class_rows(drift),
        sure=[DRIFT[name] for name, shift in drift.shifts.items() if shift.sure], few=_CLASSES,
    )  # fmt: skip


def _rows(drift: Drift) -> list[dict[str, Any]]:
    rows = []
    for name, shift in drift.shifts.items():
        shown = [f"{value:.4g}" for value in medians(drift, name)] if is_number(name) else ["-", "-"]
        rows.append({"name": name, "meaning": DRIFT[name], "shift": shift, "medians": shown})
    return rows


def _class_rows(drift: Drift) -> list[tuple[str, float, float, float]]:
    """Each class with its shares and what changed; the largest change first."""
    changes = drift.shares[1] - drift.shares[0]
    order = np.argsort(-np.abs(changes), kind="stable")
    return [
        (drift.classes[place], *drift.shares[:, place].tolist(), float(changes[place])) for place in order
    ]


_LEGEND = ((variable(SERIES[0]), "A"), (variable(SERIES[1]), "B"))


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
        (variable(SERIES[1]), "more than chance"),
        (variable(SERIES[0]), "may be chance"),
        (variable(TEXT), "95 % interval"),
        (variable(GRID), "95 % of what chance gives"),
    )
    return Plot("How far apart", svg(drawn), legend)


def _classes(drift: Drift) -> Plot | None:
    rows = _class_rows(drift)[:_CLASSES]
    if not rows:
        return None
    drawn, axes = figure("share of the boxes", "")
    drawn.set_size_inches(4.6, 1.2 + 0.22 * len(rows))
    places = np.arange(len(rows))[::-1]
    for number, color in enumerate(SERIES[:2]):
        axes.barh(places - 0.38 * number, [row[1 + number] for row in rows], color=color, height=0.38)
    axes.set_yticks(places - 0.19, [row[0] for row in rows], parse_math=False)
    axes.grid(axis="y", visible=False)
    axes.locator_params(axis="x", nbins=4)
    title = "Classes" if len(rows) == len(drift.classes) else f"The {len(rows)} classes that changed most"
    return Plot(title, svg(drawn), _LEGEND)


def _distribution(drift: Drift, name: str) -> Plot:
    drawn, axes = figure(_AXES[name], "share")
    pair = [values for part in (drift.one, drift.other) if (values := numbers(part, name)) is not None]
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
    return Plot(DRIFT[name].capitalize(), svg(drawn), _LEGEND)
