"""Renders the templates, thumbnails and plots of all pages.

Colors are placeholders for the CSS variables --text, --grid and --series-1 to -8, which each page defines:
so a plot suits light and dark pages.
"""

import base64
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

TEXT_COLOR, GRID_COLOR = "#010101", "#020202"
SERIES_COLORS = [f"#0303{number:02x}" for number in range(1, 9)]
_VARIABLES = {TEXT_COLOR: "var(--text)", GRID_COLOR: "var(--grid)"} | {
    color: f"var(--series-{number})" for number, color in enumerate(SERIES_COLORS, start=1)
}
_STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "kubedet", "font.family": "sans-serif", "font.size": 10,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), TEXT_COLOR),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), GRID_COLOR),
    "axes.grid": True, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "grid.linewidth": 0.6, "lines.linewidth": 1.8, "lines.solid_capstyle": "round",
}  # fmt: skip

# Rules that adapt an SVG to a page: remove the XML head, size, fonts, global style and group ids.
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
    """A plot; the page shows its legend as text."""

    title: str
    svg: str
    legend: tuple[tuple[str, str], ...] = ()  # pairs of a CSS color and a label


def render_template(template: str, **values: Any) -> str:
    """Render a template of this folder as self-contained HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(values)


def thumbnail_uri(image: Image.Image, side: int) -> str:
    """Shrink an RGB image in place to a longer side of at most `side` pixels; return a JPEG as a data URI."""
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def new_figure(x: str, y: str) -> tuple[Figure, Axes]:
    """Return an empty figure and its axes, labeled `x` and `y`."""
    # pyplot's figure would need a display and keep global state.
    with rc_context(_STYLE):
        drawn = Figure(figsize=(4.6, 2.9), layout="constrained")
        axes = drawn.add_subplot(xlabel=x, ylabel=y)
        axes.tick_params(length=0, pad=6)
    return drawn, axes


def figure_to_plot(title: str, drawn: Figure, legend: Iterable[tuple[str, str]] = ()) -> Plot:
    """Return a figure as SVG for the page; the legend has placeholder colors and labels."""
    buffer = io.StringIO()
    with rc_context(_STYLE):
        drawn.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    for pattern, replacement in _PAGE_RULES:
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    svg = re.sub("|".join(_VARIABLES), lambda match: _VARIABLES[match[0]], text)
    return Plot(title, svg, tuple((_VARIABLES[color], label) for color, label in legend))
