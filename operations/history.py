"""The runs of a schedule: their verdicts, usage and cost, as rows and as a page."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from components import usage
from components.hooks import NOTHING_NEW
from operations import costs, lineage
from operations.costs import Costs
from trainer import storage
from trainer.base.errors import ConfigError, KubedetError

_NO_VALUE = "-"
_READERS = 16
NO_COSTS = costs.summed([])
_METRIC = "coco/AP"
_USED = ("node h", "GPU h", "cost")
HEADER = ("began", "hours", "state", "verdict", "AP", *_USED, "run")  # Names of the cells of a run.


@dataclass(frozen=True)
class Run:
    """One run of a schedule."""

    run_id: str
    began: datetime
    hours: float | None  # None while it goes on.
    state: str
    verdict: str = ""  # "passed", "held back", "nothing new", or empty if unknown.
    ap: float | None = None  # coco/AP of its evaluation, 0 to 1.
    used: Costs = NO_COSTS

    def cells(self) -> tuple[str, ...]:
        """Return the run as a row, see HEADER."""
        hours = _NO_VALUE if self.hours is None else f"{self.hours:.2f}"
        ap = _NO_VALUE if self.ap is None else f"{self.ap:.4f}"
        used: tuple[str, ...] = (_NO_VALUE,) * len(_USED)
        if self.used:
            total = self.used.total
            money = f"{total.money.shown(2)} {self.used.currency}".strip() if total.money else _NO_VALUE
            used = f"{total.node_hours:.2f}", total.gpu_hours.shown(2), money
        began = f"{self.began:%Y-%m-%d %H:%M}"
        return (began, hours, self.state, self.verdict or _NO_VALUE, ap, *used, self.run_id)

    def numbers(self) -> dict[str, float]:
        """Return the known numbers by name."""
        total = self.used.total
        known = {"AP": self.ap, "hours": self.hours}
        if self.used:
            known |= {"node hours": total.node_hours, "GPU hours": total.gpu_hours.value}
            cost = f"cost, {self.used.currency}".removesuffix(", ")
            known[cost] = total.money.value if total.money else None
        return {name: value for name, value in known.items() if value is not None}


def complete(runs: Sequence[Run], data_root: str) -> tuple[list[Run], str]:
    """Add verdicts and usage from the data root to runs; also return why it could not be read, if so."""
    try:
        if storage.is_local(data_root) and not Path(storage.absolute(data_root)).is_dir():
            raise KubedetError(f"{data_root} does not exist on this machine")
        verdicts, without_news = lineage.verdicts(data_root), lineage.without_news(data_root)
        prices = costs.find_prices(data_root)
        with ThreadPoolExecutor(_READERS) as readers:
            used = list(readers.map(lambda run: usage.of_run(data_root, run.run_id), runs))
    except ConfigError:
        raise
    except KubedetError as error:
        return list(runs), error.message
    completed = []
    for run, records in zip(runs, used, strict=True):
        # A folder's name is the run's id, after the version of the data.
        record = next((record for name, record in verdicts.items() if name.endswith(run.run_id)), None)
        verdict, ap = NOTHING_NEW if run.run_id in without_news else "", None
        if record:
            verdict, ap = "passed" if record.passed else "held back", record.metrics.get(_METRIC)
        known = costs.summed(records, prices)
        completed.append(replace(run, verdict=verdict, ap=ap, used=known))
    return completed, ""


def table(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Return a header, and a row for each run; without columns of usage that are unknown for all."""
    columns = list(zip(HEADER, *(run.cells() for run in runs), strict=True))
    known = [each for each in columns if each[0] not in _USED or set(each[1:]) != {_NO_VALUE}]
    return list(zip(*known, strict=True))


def page(name: str, runs: Sequence[Run], remark: str) -> str:
    """Return a page with plots over time and a row for each run, as HTML that needs no other file."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num

    from trainer.report.figures import SERIES, as_plot, figure, render

    series: dict[str, list[tuple[float, float, str]]] = {}
    for run in runs:
        for title, value in run.numbers().items():
            kind = run.state if title == "hours" else run.verdict or run.state
            series.setdefault(title, []).append((date2num(run.began), value, kind))
    plots: list[object] = []
    for title, points in series.items():  # Over time, in the color of their kind.
        drawn, axes = figure("", title)
        kinds = sorted({kind for *_, kind in points})
        axes.plot([day for day, *_ in points], [value for _, value, _ in points], color=SERIES[0], lw=0.8)
        for color, kind in zip(SERIES, kinds, strict=False):
            of_kind = [(day, value) for day, value, its in points if its == kind]
            axes.plot([day for day, _ in of_kind], [value for _, value in of_kind], "o", color=color)
        axes.set_ylim(0, 1.1 * max(value for _, value, _ in points) or 1)
        locator = AutoDateLocator(minticks=3, maxticks=7)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
        plots.append(as_plot(title, drawn, zip(SERIES, kinds, strict=False)))
    header, *rows = table(runs)
    return render(
        "plots_page.html.jinja", title=f"Runs of the schedule {name}", remark=remark, recipe="",
        header=header, rows=rows, plots=plots,
    )  # fmt: skip
