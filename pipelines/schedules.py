"""Recurring runs of Kubeflow Pipelines, one for each name: their cron expressions, and their runs."""

import hashlib
import json
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import kfp_server_api
from cronsim import CronSim, CronSimError

from operations import history
from pipelines import parameters
from pipelines.kubeflow import ENDED, Server, stopped
from pipelines.parameters import Values
from pipelines.submission import Submission
from trainer.base.errors import ConfigError

_MARK = "made by kubedet schedule, "
"""Starts the description of kubedet's recurring runs, before a fingerprint."""

_FORMER = ", after "
"""After the fingerprint, before the ids of replaced recurring runs, whose runs are its history."""

_MOST_FORMER = 50
"""Ids in a description."""

_STARTED = "started by kubedet schedule --run-now"
"""Description of a run that was started by hand, also by earlier versions."""

_UNKNOWN_DAYS = re.compile(r"[Ll#]|(?<![\d/])7(?!\d)")


def parse_cron(text: str) -> str:
    """Return a cron expression of five fields, or six with the second first, as Kubeflow takes it: six.

    Kubeflow's parser, https://pkg.go.dev/github.com/robfig/cron@v1.2.0, rejects `L`, `#` and 7 for Sunday.

    Raises:
        ConfigError: it is invalid, or never due.
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
    """Create or replace the schedule of a submission's name, at the times of `parse_cron`.

    Kubeflow Pipelines cannot change a recurring run. The old one is deleted after the new one was created:
    if the deletion fails there are two, and the next call leaves one.

    Returns:
        Its id, and "created", "replaced", "enabled" or "unchanged".

    Raises:
        ConfigError: a recurring run that kubedet did not create has the name.
    """
    package = submission.package()
    parts = [submission.experiment, dict(submission.parameters), cron, package]
    mark = _MARK + hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    existing = _own(server, submission.name)
    same = [item for item in existing if item.description.partition(_FORMER)[0] == mark]
    if same:
        kept, done = same[0].recurring_run_id, "unchanged"
        if same[0].status != "ENABLED":
            server.change_schedule("enable", kept)
            done = "enabled"
    else:
        former = list(dict.fromkeys(each for item in existing for each in _ids(item)))
        body = kfp_server_api.V2beta1RecurringRun(
            display_name=submission.name,
            description=mark + _FORMER * bool(former) + " ".join(former[-_MOST_FORMER:]),
            experiment_id=server.experiment(submission.experiment),
            pipeline_spec=package,
            runtime_config=kfp_server_api.V2beta1RuntimeConfig(parameters=dict(submission.parameters)),
            trigger=kfp_server_api.V2beta1Trigger(
                cron_schedule=kfp_server_api.V2beta1CronSchedule(cron=cron)
            ),
            # One run at a time; missed runs are not started later.
            max_concurrency="1",
            no_catchup=True,
            mode=kfp_server_api.RecurringRunMode.ENABLE,
        )
        kept = server.create_schedule(body)
        done = "replaced" if existing else "created"
    for item in existing:
        if item.recurring_run_id != kept:
            server.change_schedule("delete", item.recurring_run_id)
    return kept, done


def start(server: Server, name: str) -> str:
    """Start a run of a schedule now, with its parameters, and return its id.

    Raises:
        ConfigError: there is no such schedule, or one of its runs has not ended.
    """
    schedule = named(server, name)[-1]
    if unfinished := [run.run_id for run in runs(server, name) if run.state not in ENDED]:
        raise ConfigError(
            f"a run of the schedule {name!r} has not ended: {', '.join(unfinished)}",
            fix="wait for its end: the runs of a schedule share the data, one at a time",
        )
    package, experiment = schedule.pipeline_spec, schedule.experiment_id
    if package is None or experiment is None:
        raise ConfigError(
            f"Kubeflow Pipelines does not report the pipeline of the schedule {name!r}",
            fix="start the same with `kubedet submit`",
        )
    return server.create_run(f"{name} now", experiment, package, parameters_of(schedule), _STARTED)


def runs(server: Server, name: str) -> list[Any]:
    """Return the runs of a schedule, of those that it replaced, and of `start`; see `named` for errors."""
    ids = dict.fromkeys(each for item in named(server, name) for each in _ids(item))
    started = [run for run in server.runs_with("display_name", f"{name} now") if run.description == _STARTED]
    return [*(run for each in ids for run in server.runs_with("recurring_run_id", each)), *started]


def past(server: Server, name: str, data_root: str = "") -> tuple[list[history.Run], str]:
    """Return the runs of a schedule, the oldest first, and why their records could not be read, if so.

    `data_root` is the location of the runs' data for this machine, if it differs from the runs'.

    Raises:
        ConfigError: there is no schedule of that name, or the prices cannot be used.
        KubedetError: Kubeflow does not answer.
    """
    given = parameters_of(named(server, name)[-1])
    found = []
    for run in runs(server, name):
        took = run.finished_at - run.created_at if run.finished_at and run.finished_at.year > 1970 else None
        hours = took.total_seconds() / 3600 if took else None
        state = "stopped" if stopped(run) else (run.state or "unknown").lower()
        found.append(history.Run(run.run_id, run.created_at, hours, state))
    root = data_root or given.get("data_root") or parameters.default("data_root")
    return history.complete(sorted(found, key=lambda run: run.began), root)


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


def parameters_of(schedule: Any) -> Values:
    """Return the pipeline's parameters in a recurring run."""
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
