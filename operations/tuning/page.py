"""A page that shows a search for hyper-parameters: its history, what matters, and the best configuration."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from matplotlib.ticker import MaxNLocator

from operations.tuning.study import COMPLETE, PRUNED, Trial
from trainer.report.figures import SERIES, Plot, as_plot, bars, figure, render


def page(
    name: str, metric: str, trials: Sequence[Trial], importances: Mapping[str, float], recipe: str
) -> str:
    """Return the page, as HTML that needs no other file.

    Args:
        name: of the search.
        metric: what is searched for the highest value of.
        trials: by number.
        importances: shares by key, which sum to 1; empty while too few trials tell.
        recipe: text of the file with the best configuration; empty while there is none.
    """
    drawn = [_history(metric, trials), _courses(metric, trials), _importances(importances)]
    keys = list(dict.fromkeys(key for trial in trials for key in trial.params))
    ranked = sorted(trials, key=lambda trial: (trial.state != COMPLETE, -(trial.value or 0.0)))
    rows = [
        [str(trial.number), trial.state, _text(trial.value), *(_text(trial.params.get(key)) for key in keys)]
        for trial in ranked
    ]
    return render(
        "plots_page.html.jinja", title=f"Search {name}", remark="", recipe=recipe,
        header=["trial", "state", metric, *keys], rows=rows, plots=[plot for plot in drawn if plot],
    )  # fmt: skip


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _history(metric: str, trials: Sequence[Trial]) -> Plot | None:
    valued = [(trial.number, trial.value, trial.state) for trial in trials if trial.value is not None]
    if not valued:
        return None
    drawn, axes = figure("trial", metric)
    complete = [(number, value) for number, value, state in valued if state == COMPLETE]
    best = list(accumulate((value for _, value in complete), max))
    axes.step([number for number, _ in complete], best, where="post", color=SERIES[0])
    for color, state in zip(SERIES, (COMPLETE, PRUNED), strict=False):
        points = [(number, value) for number, value, its in valued if its == state]
        axes.plot([x for x, _ in points], [y for _, y in points], "o", color=color)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend = zip(SERIES, (COMPLETE, PRUNED), strict=False)
    return as_plot("History: each trial, and the best so far", drawn, legend)


def _courses(metric: str, trials: Sequence[Trial]) -> Plot | None:
    if not any(trial.validations for trial in trials):
        return None
    drawn, axes = figure("validation", metric)
    for trial in trials:
        color = SERIES[1] if trial.state == PRUNED else SERIES[0]
        counts = range(1, len(trial.validations) + 1)
        axes.plot(counts, trial.validations, "o-", color=color, linewidth=0.9, markersize=3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return as_plot("Validations of each trial", drawn)


def _importances(importances: Mapping[str, float]) -> Plot | None:
    if not importances:
        return None
    drawn, _ = bars("share of what the keys explain", list(importances), list(importances.values()))
    return as_plot("Importance of each key", drawn)
