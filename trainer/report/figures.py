"""Drawings for the report, made by matplotlib as SVG that takes its colours from the page.

Colours are written as placeholders and replaced by CSS variables, so that one drawing
fits a light and a dark page; the page defines --text, --grid and --series-1 to -8.
"""

import io
import re
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

TEXT, GRID = "#010101", "#020202"
"""Placeholders of the page's colours for text and for lines behind the curves."""
SERIES = [f"#0303{number:02x}" for number in range(1, 9)]
"""Placeholders of the page's colours for series."""
_VARIABLES = {TEXT: "var(--text)", GRID: "var(--grid)"} | {
    color: f"var(--series-{number})" for number, color in enumerate(SERIES, start=1)
}
_STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "kubedet", "font.family": "sans-serif", "font.size": 10,
    "text.color": TEXT, "axes.labelcolor": TEXT, "axes.edgecolor": GRID, "xtick.color": GRID,
    "ytick.color": GRID, "xtick.labelcolor": TEXT, "ytick.labelcolor": TEXT, "grid.color": GRID,
    "axes.grid": True, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "grid.linewidth": 0.6, "lines.linewidth": 1.8, "lines.solid_capstyle": "round",
}  # fmt: skip


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


def variable(color: str) -> str:
    """Return the page's variable for a placeholder."""
    return _VARIABLES[color]


def figure(x: str, y: str) -> tuple[Figure, Axes]:
    """Return an empty figure and its axes, with the axes' labels."""
    # A Figure of its own, not pyplot's: nothing global is left behind and no display is needed.
    with rc_context(_STYLE):
        drawn = Figure(figsize=(4.6, 2.9), layout="constrained")
        axes = drawn.add_subplot(xlabel=x, ylabel=y)
        axes.tick_params(length=0, pad=6)
    return drawn, axes


def svg(drawn: Figure) -> str:
    """Return a figure as SVG for the page."""
    buffer = io.StringIO()
    with rc_context(_STYLE):
        drawn.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    for pattern, replacement in _PAGE_RULES:
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    return re.sub("|".join(_VARIABLES), lambda match: _VARIABLES[match[0]], text)
