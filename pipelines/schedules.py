"""Recurring runs of the pipeline, with unique names."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import kfp_server_api
from cronsim import CronSim, CronSimError

from operations import history
from pipelines import Access, preflight
from pipelines.client import connect
from pipelines.kubeflow import ENDED_STATES, Server, is_cancelled
from pipelines.pipeline import default_parameters
from pipelines.pipeline_run import PipelineRun
from pipelines.submission import Submission, compile_arguments
from trainer.base.errors import ConfigError

_DESCRIPTION_PREFIX = "made by kubedet schedule, "
"""The description of kubedet's recurring runs begins with this; a fingerprint follows."""

_PREDECESSORS = ", after "
"""Separates the fingerprint from the ids of replaced recurring runs, which `history` includes."""

_MAX_PREDECESSORS = 50  # Ids in a description.

_STARTED_NOW = "started by kubedet schedule --run-now"
"""Description of a run that `kubedet schedule run` started."""

_UNSUPPORTED_DAYS = re.compile(r"[Ll#]|(?<![\d/])7(?!\d)")


@dataclass(frozen=True)
class Schedule:
    """A recurring run."""

    name: str
    cron: str  # Six fields, starting with seconds.
    parameters: Mapping[str, Any]  # The pipeline's parameters that differ from their defaults.
    status: str = ""  # "enabled" or "disabled"; after a change: "created", ...
    link: str = ""  # Address in the UI.
    experiment: str = ""
    compiled: Sequence[str] = ()  # Options of the compiled pipeline.
    next_times: Sequence[datetime] = ()  # Times of the next runs, if the cluster's time zone is UTC.


@dataclass(frozen=True)
class History:
    """The runs of a schedule."""

    runs: list[history.Run] = field(default_factory=list)
    problem: str = ""  # Why their verdicts could not be read.


def create(run: PipelineRun, cron: str, name: str, access: Access, *, dry_run: bool) -> Schedule:
    """Create a recurring run, or replace the one of the same name."""
    cron = parse_cron(cron)
    if run.output:
        # All runs would reuse the training of the first run.
        raise ConfigError("with output, all runs of a schedule would share one folder", fix="leave it out")
    submission = Submission.make(run, name)
    done, link = "", ""
    if not dry_run:
        server = connect(access)
        preflight.check_submission(submission, server.namespace)
        schedule_id, done = _create_or_replace(server, submission, cron)
        link = server.link("recurringrun", schedule_id)
    return Schedule(
        name,
        cron,
        submission.parameters,
        done,
        link,
        submission.experiment,
        compile_arguments(submission.options),
        list(islice(due_times(cron, datetime.now(UTC).replace(tzinfo=None)), 3)),
    )


def list_schedules(access: Access) -> list[Schedule]:
    """Return the schedules that kubedet created."""
    found = []
    for item in _connect_untested(access).list_schedules():
        if (item.description or "").startswith(_DESCRIPTION_PREFIX):
            cron = item.trigger.cron_schedule.cron if item.trigger and item.trigger.cron_schedule else ""
            status = (item.status or "unknown").lower()
            found.append(Schedule(item.display_name, cron, _read_parameters(item), status))
    return sorted(found, key=lambda schedule: schedule.name)


def start_now(name: str, access: Access) -> tuple[str, str]:
    """Start a run of a schedule; return its id and its address in the UI."""
    server = connect(access)
    schedule = _find_schedules(server, name)[-1]
    if unfinished := [run.run_id for run in _list_runs(server, name) if run.state not in ENDED_STATES]:
        raise ConfigError(
            f"a run of the schedule {name!r} has not ended: {', '.join(unfinished)}",
            fix="wait until it ends: the runs of a schedule share the data, so they run one at a time",
        )
    package, experiment = schedule.pipeline_spec, schedule.experiment_id
    if package is None or experiment is None:
        raise ConfigError(
            f"Kubeflow Pipelines does not report the pipeline of the schedule {name!r}",
            fix="start the run with `kubedet submit`",
        )
    run_id = server.create_run(f"{name} now", experiment, package, _read_parameters(schedule), _STARTED_NOW)
    return run_id, server.link("runs", run_id)


def delete(name: str, access: Access) -> None:
    """Delete a schedule; a run that it has started continues."""
    server = _connect_untested(access)
    for item in _find_schedules(server, name):
        server.change_schedule("delete", item.recurring_run_id)


def read_history(name: str, data_root: str, access: Access) -> History:
    """Return the runs of a schedule, the oldest first, with the verdicts in the data root."""
    server = _connect_untested(access)
    given, runs = _read_parameters(_find_schedules(server, name)[-1]), []
    for run in _list_runs(server, name):
        took = run.finished_at - run.created_at if run.finished_at and run.finished_at.year > 1970 else None
        hours = took.total_seconds() / 3600 if took else None
        state = "stopped" if is_cancelled(run) else (run.state or "unknown").lower()
        runs.append(history.Run(run.run_id, run.created_at, hours, state))
    root = data_root or given.get("data_root") or default_parameters(volume="claim" in given)["data_root"]
    return History(*history.add_verdicts(sorted(runs, key=lambda run: run.began), root))


def parse_cron(text: str) -> str:
    """Convert a cron expression of five fields, or six starting with seconds, to Kubeflow's six fields.

    Kubeflow's parser, https://pkg.go.dev/github.com/robfig/cron@v1.2.0, rejects `L`, `#` and 7 for Sunday.
    """
    fields = text.split()
    if len(fields) not in (5, 6):
        raise ConfigError(
            f"the cron expression {text!r} has {len(fields)} fields, not 5 or 6",
            fix="write minute, hour, day of the month, month and day of the week: '0 2 * * *' is "
            "every night at 2 (usually UTC)",
        )
    cron = " ".join(["0", *fields] if len(fields) == 5 else fields)
    try:
        if _UNSUPPORTED_DAYS.search(fields[-1]) or "L" in fields[-3].upper():
            raise CronSimError("Kubeflow does not support L, # or 7 for Sunday")
        next(due_times(cron, datetime(2000, 1, 1)))
    except (CronSimError, ValueError, StopIteration) as error:
        raise ConfigError(
            f"the cron expression {text!r} cannot be used: {error}",
            fix="use numbers, *, lists (1,3), ranges (1-5) and steps (*/10), days from 0 (Sunday) to 6, and "
            "a date that exists",
        ) from None
    return cron


def due_times(cron: str, after: datetime) -> Iterator[datetime]:
    """Yield the times later than `after`, and in its time zone, at which a cron expression is due."""
    return CronSim(cron.replace("?", "*"), after)


def _create_or_replace(server: Server, submission: Submission, cron: str) -> tuple[str, str]:
    """Create or replace the schedule with a submission's name; return its id and the action.

    Kubeflow Pipelines cannot change a recurring run. So the new one is created before the old one is
    deleted. If the deletion fails, the next call repeats it.
    """
    package = submission.package()
    parts = [submission.experiment, dict(submission.parameters), cron, package]
    mark = _DESCRIPTION_PREFIX + hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    existing = _find_schedules(server, submission.name, required=False)
    same = [item for item in existing if item.description.partition(_PREDECESSORS)[0] == mark]
    if same:
        kept, done = same[0].recurring_run_id, "unchanged"
        if same[0].status != "ENABLED":
            server.change_schedule("enable", kept)
            done = "enabled"
    else:
        former = list(dict.fromkeys(each for item in existing for each in _schedule_ids(item)))
        body = kfp_server_api.V2beta1RecurringRun(
            display_name=submission.name,
            description=mark + _PREDECESSORS * bool(former) + " ".join(former[-_MAX_PREDECESSORS:]),
            experiment_id=server.find_or_create_experiment(submission.experiment),
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


def _connect_untested(access: Access) -> Server:
    return Server(Access.resolve(access.host, access.namespace, access.ca))


def _find_schedules(server: Server, name: str, *, required: bool = True) -> list[Any]:
    """Return the schedules with a name, newest last; raise an error if kubedet did not create one."""
    schedules = [item for item in server.list_schedules() if item.display_name == name]
    if any(not (item.description or "").startswith(_DESCRIPTION_PREFIX) for item in schedules):
        raise ConfigError(
            f"the recurring run {name!r} was not created by `kubedet schedule`",
            fix="choose another --name, or delete the existing one in the UI",
        )
    if required and not schedules:
        raise ConfigError(f"there is no schedule {name!r}", fix="see `kubedet schedule list`")
    return sorted(schedules, key=lambda item: str(item.created_at))


def _list_runs(server: Server, name: str) -> list[Any]:
    """Return the runs of a schedule and its predecessors, including those of `kubedet schedule run`."""
    ids = dict.fromkeys(each for item in _find_schedules(server, name) for each in _schedule_ids(item))
    started = [
        run for run in server.find_runs("display_name", f"{name} now") if run.description == _STARTED_NOW
    ]
    return [*(run for each in ids for run in server.find_runs("recurring_run_id", each)), *started]


def _read_parameters(schedule: Any) -> dict[str, Any]:
    """Return the pipeline's parameters in a recurring run."""
    return (schedule.runtime_config.parameters if schedule.runtime_config else None) or {}


def _schedule_ids(item: Any) -> list[str]:
    """Return the ids of a recurring run and its predecessors, oldest first."""
    return [*(item.description or "").partition(_PREDECESSORS)[2].split(), item.recurring_run_id]
