"""A page that shows what became of a schedule's runs: plots over time, and each run as a row."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num

from trainer.report.figures import SERIES, Plot, as_plot, figure, render

Points = Sequence[tuple[datetime, float, str]]
"""When, how much, and of which kind the point is."""


def page(
    name: str, header: Sequence[str], rows: Sequence[Sequence[str]], series: Mapping[str, Points], remark: str
) -> str:
    """Return the page, as HTML that needs no other file."""
    plots = [_over_time(title, points) for title, points in series.items() if points]
    return render("history_page.html.jinja", name=name, header=header, rows=rows, plots=plots, remark=remark)


def _over_time(title: str, points: Points) -> Plot:
    drawn, axes = figure("", title)
    kinds = sorted({kind for *_, kind in points})
    days = [date2num(when) for when, *_ in points]
    axes.plot(days, [much for _, much, _ in points], color=SERIES[0], linewidth=0.8)
    for color, kind in zip(SERIES, kinds, strict=False):
        of_kind = [(day, much) for day, (_, much, its) in zip(days, points, strict=True) if its == kind]
        axes.plot([day for day, _ in of_kind], [much for _, much in of_kind], "o", color=color)
    axes.set_ylim(0, 1.1 * max(much for _, much, _ in points) or 1)
    locator = AutoDateLocator(minticks=3, maxticks=7)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    return as_plot(title, drawn, zip(SERIES, kinds, strict=False))
