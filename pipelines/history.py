"""What became of a schedule's runs: their states from Kubeflow, what they reached from their folders."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pipelines import parameters, schedules
from pipelines.kubeflow import Server
from trainer import storage
from trainer.errors import KubedetError

_NONE = "-"
_SHOWN_METRIC = "coco/AP"
_METRICS, _GATE = "/evaluation/metrics.json", "/evaluation/gate.json"


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
    """"passed" or "held back"; empty where nothing was evaluated, or nobody could look."""
    ap: float | None = None
    """coco/AP of its evaluation, 0 to 1."""

    def cells(self) -> tuple[str, ...]:
        """Return the run as a row: began, hours, state, verdict, AP, id."""
        hours = _NONE if self.hours is None else f"{self.hours:.2f}"
        ap = _NONE if self.ap is None else f"{self.ap:.4f}"
        return f"{self.began:%Y-%m-%d %H:%M}", hours, self.state, self.verdict or _NONE, ap, self.run


HEADER = ("began", "hours", "state", "verdict", "AP", "run")
"""What the cells of a night are."""


def nights(server: Server, name: str, data_root: str = "") -> tuple[list[Night], str]:
    """Return the runs of a schedule, the oldest first, and why their folders could not be read, if so.

    Args:
        server: where the schedule is.
        name: the schedule's.
        data_root: where this machine sees the runs' data; empty is where they see it themselves.

    Raises:
        ConfigError: there is no schedule of that name.
        KubedetError: Kubeflow does not answer.
    """
    of_name = schedules.named(server, name)
    given = (of_name[-1].runtime_config.parameters if of_name[-1].runtime_config else None) or {}
    root = data_root or given.get("data_root") or parameters.default("data_root")
    try:
        files, obstacle = _evaluations(root), ""
    except KubedetError as error:
        files, obstacle = {}, error.message
    runs = [run for item in of_name for run in server.runs_of(item.recurring_run_id)]
    return sorted((_night(run, files) for run in runs), key=lambda night: night.began), obstacle


def _evaluations(root: str) -> dict[str, str]:
    """Return the folders of runs under a data root whose evaluation is there, by name."""
    place = storage.join(root, "runs")
    if storage.is_local(place) and not Path(storage.absolute(root)).is_dir():
        raise KubedetError(f"this machine has no folder {root}")
    names = [name for name, _ in storage.scan(place) if f"/{name}".endswith(_METRICS)]
    return {name.removesuffix(_METRICS): storage.join(place, name.removesuffix(_METRICS)) for name in names}


def _night(run: Any, folders: dict[str, str]) -> Night:
    # A folder's name is the run's id, after the version of the data.
    folder = next((uri for name, uri in folders.items() if name.endswith(run.run_id)), "")
    took = run.finished_at - run.created_at if run.finished_at and run.finished_at.year > 1970 else None
    hours = took.total_seconds() / 3600 if took else None
    state = (run.state or "unknown").lower()
    verdict, ap = _reached(folder) if folder else ("", None)
    return Night(run.run_id, run.created_at, hours, state, verdict, ap)


def _reached(folder: str) -> tuple[str, float | None]:
    """Return the verdict and the AP that lie in a run's folder; a file that cannot be read tells none."""
    try:
        metrics = storage.read_json(folder + _METRICS)["metrics"]
        passed = storage.read_json(folder + _GATE)["passed"]
    except (KubedetError, KeyError, TypeError):
        return "", None
    return "passed" if passed else "held back", metrics.get(_SHOWN_METRIC)


def table(rows: Sequence[Night]) -> str:
    """Return nights as a table for a terminal."""
    cells = [HEADER, *(night.cells() for night in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    return "\n".join("  ".join(row).rstrip() for row in padded)
