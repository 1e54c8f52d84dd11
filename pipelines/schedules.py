"""Recurring runs of Kubeflow Pipelines, one for each name: their cron expressions, and their history."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import kfp_server_api
from cronsim import CronSim, CronSimError

from components import usage
from components.hooks import NOTHING_NEW
from components.records import VerdictRecord
from operations import costs, lineage
from operations.costs import Costs
from pipelines import parameters
from pipelines.failed_runs import stopped
from pipelines.kubeflow import ENDED, Server
from pipelines.submission import Submission
from trainer import storage
from trainer.base.errors import ConfigError, KubedetError

_MARK = "made by kubedet schedule, "
"""Prefix of the fingerprint in the description of recurring runs that kubedet made."""

_FORMER = ", after "
"""Between the fingerprint and the ids of the recurring runs that it replaced: their runs are its history."""

_MOST_FORMER = 50
"""Ids that a description names: an id has 36 characters."""

_STARTED = "started by kubedet schedule --run-now"
"""Description of a run that was started by hand, as earlier versions wrote it too."""

_UNKNOWN_DAYS = re.compile(r"[Ll#]|(?<![\d/])7(?!\d)")


def parse_cron(text: str) -> str:
    """Return a cron expression as Kubeflow takes it: six fields, seconds first.

    Kubeflow's parser, https://pkg.go.dev/github.com/robfig/cron@v1.2.0, rejects `L`, `#` and 7 for Sunday.

    Args:
        text: five fields (minute, hour, day of the month, month, day of the week), or six with
            the second before them.

    Raises:
        ConfigError: it cannot be read, or is never due.
    """
    fields = text.split()
    if len(fields) not in (5, 6):
        raise ConfigError(
            f"the cron expression {text!r} has {len(fields)} fields, not 5 or 6",
            fix="write minute, hour, day of the month, month and day of the week: '0 2 * * *' is "
            "every night at 2 (UTC, mostly)",
        )
    cron = " ".join(["0", *fields] if len(fields) == 5 else fields)
    try:
        if _UNKNOWN_DAYS.search(fields[-1]) or "L" in fields[-3].upper():
            raise CronSimError("Kubeflow supports neither L, # nor 7 for Sunday")
        next(due_times(cron, datetime(2000, 1, 1)))
    except (CronSimError, ValueError, StopIteration) as error:
        raise ConfigError(
            f"the cron expression {text!r} cannot be used: {error}",
            fix="use numbers, *, lists (1,3), ranges (1-5) and steps (*/10), days from 0 (Sunday) to 6, and "
            "a date that exists",
        ) from None
    return cron


def due_times(cron: str, after: datetime) -> Iterator[datetime]:
    """Return the times after `after` at which a cron expression is due, in the same time zone."""
    return CronSim(cron.replace("?", "*"), after)


def put(server: Server, submission: Submission, cron: str) -> tuple[str, str]:
    """Create or replace the schedule of that name.

    Kubeflow Pipelines cannot change a recurring run. The former one is deleted after the new one was
    created: if the second call fails there are two, and the next call leaves one.

    Args:
        server: where it is kept.
        submission: its name, and what it runs.
        cron: when, as `parse_cron` returns it.

    Returns:
        Its id, and what was done: "created", "replaced", "enabled" or "unchanged".

    Raises:
        ConfigError: a recurring run that kubedet did not create has the name.
    """
    package = submission.package()
    # 16 hex digits that identify what the schedule runs, and when.
    parts = [submission.experiment, dict(submission.parameters), cron, package]
    mark = _MARK + hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    existing = _own(server, submission.name)
    same = [item for item in existing if item.description.partition(_FORMER)[0] == mark]
    if same:
        done = "unchanged"
        if same[0].status != "ENABLED":
            server.enable_schedule(same[0].recurring_run_id)
            done = "enabled"
        kept = same[0].recurring_run_id
    else:
        former = list(dict.fromkeys(each for item in existing for each in _ids(item)))
        text = mark + _FORMER * bool(former) + " ".join(former[-_MOST_FORMER:])
        kept = server.create_schedule(_body(server, submission, cron, package, text))
        done = "replaced" if existing else "created"
    for item in existing:
        if item.recurring_run_id != kept:
            server.delete_schedule(item.recurring_run_id)
    return kept, done


def remove(server: Server, name: str) -> None:
    """Delete the schedules of that name; the runs that they have started stay.

    Raises:
        ConfigError: there is none, or kubedet did not create it.
    """
    for item in named(server, name):
        server.delete_schedule(item.recurring_run_id)


def start(server: Server, name: str) -> str:
    """Start a run of a schedule now, with its parameters; its times stay as they are.

    Returns:
        The run's id.

    Raises:
        ConfigError: there is none of that name, or one of its runs has not ended.
    """
    schedule = named(server, name)[-1]
    if unfinished := [run.run_id for run in runs(server, name) if run.state not in ENDED]:
        raise ConfigError(
            f"a run of the schedule {name!r} has not ended: {', '.join(unfinished)}",
            fix="wait for its end: the runs of a schedule share the data, one at a time",
        )
    if schedule.pipeline_spec is None or schedule.experiment_id is None:
        raise ConfigError(
            f"Kubeflow Pipelines does not report what the schedule {name!r} runs",
            fix="start the same with `kubedet submit`",
        )
    parameters = parameters_of(schedule)
    package = schedule.pipeline_spec
    return server.create_run(f"{name} now", schedule.experiment_id, package, parameters, _STARTED)


def runs(server: Server, name: str) -> list[Any]:
    """Return the runs of a schedule: of the schedules that it replaced too, and those of `start`.

    Raises:
        ConfigError: there is none of that name.
    """
    ids = dict.fromkeys(each for item in named(server, name) for each in _ids(item))
    started = [run for run in server.runs_named(f"{name} now") if run.description == _STARTED]
    return [*(run for each in ids for run in server.runs_of(each)), *started]


def pause(server: Server, name: str) -> None:
    """Disable a schedule until `resume`; a run that it has started continues.

    Raises:
        ConfigError: there is none of that name.
    """
    for item in named(server, name):
        server.disable_schedule(item.recurring_run_id)


def resume(server: Server, name: str) -> None:
    """Enable a schedule that was paused; the runs that it missed are not made up for.

    Raises:
        ConfigError: there is none of that name.
    """
    server.enable_schedule(named(server, name)[-1].recurring_run_id)


def named(server: Server, name: str) -> list[Any]:
    """Return the schedules of a name, the newest last.

    Raises:
        ConfigError: there is none, or kubedet did not create it.
    """
    if not (schedules := _own(server, name)):
        raise ConfigError(f"there is no schedule {name!r}", fix="see `kubedet schedule list`")
    return sorted(schedules, key=lambda item: str(item.created_at))


def made_by_kubedet(server: Server) -> list[Any]:
    """Return the recurring runs that `put` has created."""
    return [item for item in server.schedules() if (item.description or "").startswith(_MARK)]


def parameters_of(schedule: Any) -> dict[str, Any]:
    """Return the parameters that a recurring run gives the pipeline."""
    return (schedule.runtime_config.parameters if schedule.runtime_config else None) or {}


def _own(server: Server, name: str) -> list[Any]:
    schedules = [item for item in server.schedules() if item.display_name == name]
    if any(not (item.description or "").startswith(_MARK) for item in schedules):
        raise ConfigError(
            f"the recurring run {name!r} was not created by `kubedet schedule`",
            fix="choose another --name, or delete that one in the UI",
        )
    return schedules


def _ids(item: Any) -> list[str]:
    """Return the ids of a recurring run and of those that it replaced, the oldest first."""
    return [*(item.description or "").partition(_FORMER)[2].split(), item.recurring_run_id]


def _body(
    server: Server, submission: Submission, cron: str, package: dict[str, Any], description: str
) -> kfp_server_api.V2beta1RecurringRun:
    return kfp_server_api.V2beta1RecurringRun(
        display_name=submission.name,
        description=description,
        experiment_id=server.experiment(submission.experiment),
        pipeline_spec=package,
        runtime_config=kfp_server_api.V2beta1RuntimeConfig(parameters=dict(submission.parameters)),
        trigger=kfp_server_api.V2beta1Trigger(cron_schedule=kfp_server_api.V2beta1CronSchedule(cron=cron)),
        # The next run waits for the end of this one; missed runs are not started later.
        max_concurrency="1",
        no_catchup=True,
        mode=kfp_server_api.RecurringRunMode.ENABLE,
    )


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
    given = parameters_of(named(server, name)[-1])
    root = data_root or given.get("data_root") or parameters.default("data_root")
    of_schedule = runs(server, name)
    used: dict[str, Costs] = {}
    try:
        _check_reached(root)
        verdicts, ended, obstacle = lineage.verdicts(root), lineage.without_news(root), ""
        used = _used(root, [run.run_id for run in of_schedule])
    except ConfigError:
        raise
    except KubedetError as error:
        verdicts, ended, obstacle = {}, frozenset(), error.message
    rows = [_night(run, verdicts, ended, used.get(run.run_id, NOTHING_KNOWN)) for run in of_schedule]
    return sorted(rows, key=lambda night: night.began), obstacle


def _used(root: str, run_ids: list[str]) -> dict[str, Costs]:
    rates = costs.find_prices(root)
    return {run: costs.summed(records, rates) for run, records in usage.of_runs(root, run_ids).items()}


def _check_reached(root: str) -> None:
    if storage.is_local(root) and not Path(storage.absolute(root)).is_dir():
        raise KubedetError(f"this machine has no folder {root}")


def _night(run: Any, verdicts: dict[str, VerdictRecord], without_news: frozenset[str], used: Costs) -> Night:
    # A folder's name is the run's id, after the version of the data.
    record = next((record for name, record in verdicts.items() if name.endswith(run.run_id)), None)
    took = run.finished_at - run.created_at if run.finished_at and run.finished_at.year > 1970 else None
    hours = took.total_seconds() / 3600 if took else None
    state = "stopped" if stopped(run) else (run.state or "unknown").lower()
    if record is None:
        verdict = NOTHING_NEW if run.run_id in without_news else ""
        return Night(run.run_id, run.created_at, hours, state, verdict, used=used)
    verdict = "passed" if record.passed else "held back"
    ap = record.metrics.get(_SHOWN_METRIC)
    return Night(run.run_id, run.created_at, hours, state, verdict, ap, used)


def cells(rows: Sequence[Night]) -> list[tuple[str, ...]]:
    """Return a header, and a row a night; of what they used only what is known of one of them."""
    columns = list(zip(HEADER, *(night.cells() for night in rows), strict=True))
    known = [each for each in columns if each[0] not in _USED or set(each[1:]) != {_NONE}]
    return list(zip(*known, strict=True))
