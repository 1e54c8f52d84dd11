"""The runs of a schedule with their verdicts, as rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from components.hooks import NOTHING_NEW
from trainer import storage
from trainer.base.errors import KubedetError
from trainer.steps.records import NothingNewRecord, VerdictRecord

_NO_VALUE = "-"
_METRIC = "coco/AP"
_HEADER = ("began", "hours", "state", "verdict", "AP", "run")


@dataclass(frozen=True)
class Run:
    """One run of a schedule."""

    run_id: str
    began: datetime
    hours: float | None  # None while it runs.
    state: str
    verdict: str = ""  # "passed", "held back", "nothing new", or empty if unknown.
    ap: float | None = None  # coco/AP of its evaluation, 0 to 1.

    def cells(self) -> tuple[str, ...]:
        """Return the run as a row of `format_rows`."""
        hours = _NO_VALUE if self.hours is None else f"{self.hours:.2f}"
        ap = _NO_VALUE if self.ap is None else f"{self.ap:.4f}"
        began = f"{self.began:%Y-%m-%d %H:%M}"
        return (began, hours, self.state, self.verdict or _NO_VALUE, ap, self.run_id)


def add_verdicts(runs: Sequence[Run], data_root: str) -> tuple[list[Run], str]:
    """Add verdicts from the data root to runs; also return the error if the data root cannot be read."""
    try:
        if storage.is_local(data_root) and not Path(storage.absolute(data_root)).is_dir():
            raise KubedetError(f"{data_root} does not exist on this machine")
        verdicts = {record.run: record for record in VerdictRecord.read_all(data_root)}
        without_news = set(storage.list_files(NothingNewRecord.record_uri(data_root)))
    except KubedetError as error:
        return list(runs), error.message
    completed = []
    for run in runs:
        # A folder's name ends with the run's id.
        record = next((record for name, record in verdicts.items() if name.endswith(run.run_id)), None)
        verdict, ap = NOTHING_NEW if f"{run.run_id}.json" in without_news else "", None
        if record:
            verdict, ap = "passed" if record.passed else "held back", record.metrics.get(_METRIC)
        completed.append(replace(run, verdict=verdict, ap=ap))
    return completed, ""


def format_rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Return a header, and a row for each run."""
    return [_HEADER, *(run.cells() for run in runs)]
