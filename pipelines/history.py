"""What became of a schedule's runs: states from Kubeflow, what they reached and used from the data root."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from components import costs, prices, records, usage
from components.costs import Costs
from components.hooks import NOTHING_NEW
from pipelines import parameters, schedules
from pipelines.failed_runs import stopped
from pipelines.kubeflow import Server
from trainer import storage
from trainer.base.errors import ConfigError, KubedetError

_NONE = "-"
_SHOWN_METRIC = "coco/AP"

NOTHING_KNOWN = costs.summed([])


@dataclass(frozen=True)
class Night:
    """One run of a schedule."""

    run: str
    """Its id."""
    began: datetime
    hours: float | None
    """How long it took; None while it goes on."""
    state: str
    """As Kubeflow has it, in small letters."""
    verdict: str = ""
    """"passed", "held back" or "nothing new"; empty where nothing was evaluated, or nobody could look."""
    ap: float | None = None
    """coco/AP of its evaluation, 0 to 1."""
    used: Costs = NOTHING_KNOWN
    """What it used and cost."""

    def cells(self) -> tuple[str, ...]:
        """Return the run as a row, see HEADER."""
        hours = _NONE if self.hours is None else f"{self.hours:.2f}"
        ap = _NONE if self.ap is None else f"{self.ap:.4f}"
        reached = (f"{self.began:%Y-%m-%d %H:%M}", hours, self.state, self.verdict or _NONE, ap)
        return (*reached, *self._used(), self.run)

    def _used(self) -> tuple[str, ...]:
        if not self.used:
            return (_NONE,) * len(_USED)
        total = self.used.total
        money = _NONE if total.money is None else f"{total.money.shown(2)} {self.used.currency}".strip()
        return f"{total.node_hours:.2f}", total.gpu_hours.shown(2), money

    def amounts(self) -> dict[str, float]:
        """Return what it used and cost, as far as it is known, by what it is."""
        if not self.used:
            return {}
        total, money = self.used.total, f"cost, {self.used.currency}".removesuffix(", ")
        figures = {"GPU hours": total.gpu_hours, money: total.money}
        known = {what: figure.value for what, figure in figures.items() if figure is not None}
        amounts = {"node hours": total.node_hours} | known
        return {what: value for what, value in amounts.items() if value is not None}


_USED = ("node h", "GPU h", "cost")
HEADER = ("began", "hours", "state", "verdict", "AP", *_USED, "run")
"""What the cells of a night are."""


def nights(server: Server, name: str, data_root: str = "") -> tuple[list[Night], str]:
    """Return the runs of a schedule, the oldest first, and why their folders could not be read, if so.

    Args:
        server: where the schedule is.
        name: the schedule's.
        data_root: where this machine sees the runs' data; empty is where they see it themselves.

    Raises:
        ConfigError: there is no schedule of that name, or the prices cannot be used.
        KubedetError: Kubeflow does not answer.
    """
    of_name = schedules.named(server, name)
    given = (of_name[-1].runtime_config.parameters if of_name[-1].runtime_config else None) or {}
    root = data_root or given.get("data_root") or parameters.default("data_root")
    runs = schedules.runs(server, name)
    used: dict[str, Costs] = {}
    try:
        _check_reached(root)
        verdicts, ended, obstacle = records.verdicts(root), records.without_news(root), ""
        used = _used(root, [run.run_id for run in runs])
    except ConfigError:
        raise
    except KubedetError as error:
        verdicts, ended, obstacle = {}, frozenset(), error.message
    rows = [_night(run, verdicts, ended, used.get(run.run_id, NOTHING_KNOWN)) for run in runs]
    return sorted(rows, key=lambda night: night.began), obstacle


def _used(root: str, run_ids: list[str]) -> dict[str, Costs]:
    rates = prices.find(root)
    return {run: costs.summed(records, rates) for run, records in usage.of_runs(root, run_ids).items()}


def _check_reached(root: str) -> None:
    if storage.is_local(root) and not Path(storage.absolute(root)).is_dir():
        raise KubedetError(f"this machine has no folder {root}")


def _night(run: Any, verdicts: dict[str, dict[str, Any]], without_news: frozenset[str], used: Costs) -> Night:
    # A folder's name is the run's id, after the version of the data.
    record = next((record for name, record in verdicts.items() if name.endswith(run.run_id)), None)
    took = run.finished_at - run.created_at if run.finished_at and run.finished_at.year > 1970 else None
    hours = took.total_seconds() / 3600 if took else None
    state = "stopped" if stopped(run) else (run.state or "unknown").lower()
    if record is None:
        verdict = NOTHING_NEW if run.run_id in without_news else ""
        return Night(run.run_id, run.created_at, hours, state, verdict, used=used)
    verdict = "passed" if record["passed"] else "held back"
    ap = record["metrics"].get(_SHOWN_METRIC)
    return Night(run.run_id, run.created_at, hours, state, verdict, ap, used)


def cells(rows: Sequence[Night]) -> list[tuple[str, ...]]:
    """Return a header, and a row a night; of what they used only what is known of one of them."""
    columns = list(zip(HEADER, *(night.cells() for night in rows), strict=True))
    known = [each for each in columns if each[0] not in _USED or set(each[1:]) != {_NONE}]
    return list(zip(*known, strict=True))


def table(rows: Sequence[Night]) -> str:
    """Return nights as a table for a terminal."""
    lines = cells(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in lines]
    return "\n".join("  ".join(row).rstrip() for row in padded)
