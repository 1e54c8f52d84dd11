"""A page that shows what shards hold: counts, classes, sizes and shapes, and what was left out."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jinja2 import Environment
from matplotlib.ticker import EngFormatter

from trainer.evaluation.drawing import SERIES, Plot, figure, svg, variable
from trainer.evaluation.plots import histograms

_BARS = 25

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Data of {{ source }}</title>
<style>
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #1b2330; --grid: #c9d0d9;
  --series-1: #1f6fd0; --series-2: #d4570a; --series-3: #14805a; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --card: #1a2029; --text: #e6eaf0;
  --grid: #3a4553; --series-1: #6aa8ff; --series-2: #ff9d57; --series-3: #4cc38a; } }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 70rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.4rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 2rem 0 .75rem; }
h3 { font-size: .95rem; margin: 0 0 .5rem; } p { margin: .25rem 0; overflow-wrap: anywhere; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .15rem .9rem .15rem 0; text-align: right; }
td:first-child, th:first-child { text-align: left; }
summary { cursor: pointer; margin-bottom: .5rem; }
.plots { columns: 20rem; column-gap: 1rem; }
figure { background: var(--card); border: 1px solid var(--grid); border-radius: .6rem; padding: 1rem;
  margin: 0 0 1rem; break-inside: avoid; }
figure svg { width: 100%; height: auto; } .key { margin-right: 1rem; white-space: nowrap; }
.key i { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem; border-radius: .2rem; }
</style></head><body><main>
<h1>Data of {{ source }}</h1><p>Shards in {{ uri }}</p>
<h2>Splits</h2>
<div class="table"><table><tr><th>split</th><th>images</th><th>boxes</th><th>without boxes</th><th>crowds</th>
<th>shards</th><th>MB</th></tr>
{% for name, of in splits.items() %}<tr><td>{{ name }}</td><td>{{ "{:,}".format(of.samples) }}</td>
<td>{{ "{:,}".format(of.boxes) }}</td><td>{{ "{:,}".format(statistics[name].images_without_boxes) }}</td>
<td>{{ "{:,}".format(statistics[name].crowds) }}</td><td>{{ "{:,}".format(of.shards | length) }}</td>
<td>{{ "{:,.1f}".format((of.shards | sum(attribute="bytes")) / 1e6) }}</td></tr>
{% endfor %}</table></div>
<h2>Boxes and images</h2>
<div class="plots">{% for plot in plots %}<figure><h3>{{ plot.title }}</h3>{{ plot.svg | safe }}
<div>{% for color, label in plot.legend %}<span class="key"><i style="background: {{ color }}"></i>
{{ label }}</span> {% endfor %}</div></figure>{% endfor %}</div>
<h2>Classes</h2>
<details{% if rows | length <= few %} open{% endif %}><summary>Boxes, and images that have them</summary>
<div class="table"><table><tr><th>class</th>
{% for split in splits %}<th>{{ split }}: boxes</th><th>images</th>{% endfor %}</tr>
{% for name, counts in rows %}<tr><td>{{ name }}</td>
{%- for count in counts %}<td>{{ "{:,}".format(count) }}</td>{% endfor %}</tr>
{% endfor %}</table></div></details>
<h2>Problems</h2>
{% if problems %}<table>{% for reason, count in problems.items() %}<tr><td>{{ reason }}</td>
<td>{{ "{:,}".format(count) }}</td></tr>{% endfor %}</table>{% else %}<p>None.</p>{% endif %}
{% if quarantined %}<h2>Images left out</h2>{% for item in quarantined %}
<p>{{ item.file_name }}: {{ item.reason }}</p>{% endfor %}{% endif %}
</main></body></html>
"""


def page(index: dict[str, Any]) -> str:
    """Return the page of an index of shards, as HTML that needs no other file."""
    names = [category["name"] for category in index["categories"]]
    plots = [*class_plots(names, index["statistics"]), *histograms(index["statistics"])]
    rows = _class_rows(names, list(index["statistics"].values()))
    return Environment(autoescape=True).from_string(_PAGE).render(index, plots=plots, rows=rows, few=_BARS)


def _class_rows(names: list[str], statistics: list[Mapping[str, Any]]) -> list[tuple[str, list[int]]]:
    """Boxes and images of each class in each split; the most frequent first."""
    columns = [of[name] for of in statistics for name in ("boxes_of_class", "images_of_class")]
    rows = [(name, list(counts)) for name, *counts in zip(names, *columns, strict=True)]
    return sorted(rows, key=lambda row: -row[1][0])


def class_plots(names: list[str], statistics: Mapping[str, Mapping[str, Any]]) -> list[Plot]:
    """Boxes of the most frequent classes, and how they fall off over all classes where there are many.

    Args:
        names: of the classes, by label.
        statistics: of each split, as in the shards' index; the first one decides on the order.
    """
    counts = {split: np.array(of["boxes_of_class"], float) for split, of in statistics.items()}
    order = np.argsort(-next(iter(counts.values())), kind="stable")
    legend = tuple((variable(color), split) for color, split in zip(SERIES, counts, strict=False))
    shown = order[:_BARS]
    drawn, axes = figure("boxes", "")
    drawn.set_size_inches(4.6, 1.2 + 0.2 * len(shown))
    places = np.arange(len(shown))[::-1]
    height = 0.8 / len(counts)
    for number, (color, of) in enumerate(zip(SERIES, counts.values(), strict=False)):
        axes.barh(places - number * height, of[shown], color=color, height=height)
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
        for color, of in zip(SERIES, counts.values(), strict=False):
            axes.plot(np.arange(1, len(names) + 1), -np.sort(-of), color=color)
        axes.set_yscale("symlog")
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        plots.append(Plot("Boxes of all classes", svg(drawn), legend))
    return plots
