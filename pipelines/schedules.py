"""Recurring runs: one of each name, made anew only where it would be another."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import kfp_server_api

from pipelines.cron import Cron
from pipelines.kubeflow import Server
from pipelines.submission import Submission
from trainer.base.errors import ConfigError

_MARK = "made by kubedet schedule, "
"""Prefix of the fingerprint in the description of recurring runs that kubedet made."""

_FORMER = ", after "
"""Between the fingerprint and the ids of the recurring runs that it replaced: their runs are its history."""

_MOST_FORMER = 50
"""Ids that a description names: an id has 36 characters."""

_STARTED = "started by kubedet schedule --run-now"
"""Description of a run that did not wait until it was due."""


@dataclass(frozen=True)
class Outcome:
    """What was done about the schedules of a name."""

    id: str
    """Of the one that is there now; empty is none."""
    done: str
    """"created", "replaced", "enabled", "unchanged", "deleted" or "absent"; of `start`, "started"."""
    lingering: tuple[str, ...] = ()
    """Ids of unfinished runs of a former schedule, which is only disabled: deleting it would end them."""


def put(server: Server, submission: Submission, cron: Cron) -> Outcome:
    """Create or replace the schedule of that name.

    Kubeflow Pipelines cannot change a recurring run. Another one of that name is deleted after
    the new one was made: should the second call fail there are two, and the next time one again.

    Args:
        server: where it is kept.
        submission: its name, and what it runs.
        cron: when.

    Raises:
        ConfigError: somebody else's recurring run has the name.
    """
    package = submission.package()
    mark = _MARK + _fingerprint(submission, cron, package)
    existing = _named(server, submission.name)
    same = [item for item in existing if item.description.partition(_FORMER)[0] == mark]
    if same:
        done = "unchanged"
        if same[0].status != "ENABLED":
            server.enable_schedule(same[0].recurring_run_id)
            done = "enabled"
        kept = same[0].recurring_run_id
    else:
        former = list(dict.fromkeys(each for item in existing for each in _recurring_runs(item)))
        text = mark + _FORMER * bool(former) + " ".join(former[-_MOST_FORMER:])
        kept = server.create_schedule(_body(server, submission, cron, package, text))
        done = "replaced" if existing else "created"
    return Outcome(kept, done, _drop(server, [item for item in existing if item.recurring_run_id != kept]))


def remove(server: Server, name: str) -> Outcome:
    """Delete the schedules of that name, or disable them while a run would end with them.

    Raises:
        ConfigError: somebody else's recurring run has the name.
    """
    existing = _named(server, name)
    return Outcome("", "deleted" if existing else "absent", _drop(server, existing))


def start(server: Server, name: str) -> Outcome:
    """Start a run of a schedule now, with the parameters that its runs have; its times stay as they are.

    Returns:
        Its id is that of the run.

    Raises:
        ConfigError: there is none of that name, or a run of it goes on: there is one at a time.
    """
    schedule = _one(server, name)
    if going_on := server.unfinished(runs(server, name)):
        raise ConfigError(
            f"a run of the schedule {name!r} goes on: {', '.join(going_on)}",
            fix="wait for its end: the runs of a schedule share the data, one at a time",
        )
    if schedule.pipeline_spec is None or schedule.experiment_id is None:
        raise ConfigError(
            f"Kubeflow Pipelines does not tell what the schedule {name!r} runs",
            fix="start the same with `kubedet submit`",
        )
    parameters = (schedule.runtime_config.parameters if schedule.runtime_config else None) or {}
    run = server.create_run(
        _name_of_started(name), schedule.experiment_id, schedule.pipeline_spec, parameters, _STARTED
    )
    return Outcome(run, "started")


def _name_of_started(name: str) -> str:
    return f"{name} now"


def runs(server: Server, name: str) -> list[Any]:
    """Return the runs of a schedule: of those of the name before it too, and those of `start`.

    Raises:
        ConfigError: there is none of that name.
    """
    ids = dict.fromkeys(each for item in named(server, name) for each in _recurring_runs(item))
    started = [run for run in server.runs_named(_name_of_started(name)) if run.description == _STARTED]
    return [*(run for each in ids for run in server.runs_of(each)), *started]


def _recurring_runs(item: Any) -> list[str]:
    """Return the ids of a recurring run and of those that it replaced, the oldest first."""
    return [*(item.description or "").partition(_FORMER)[2].split(), item.recurring_run_id]


def pause(server: Server, name: str) -> None:
    """Let a schedule come due no more, until `resume`; a run that it has started goes on.

    Raises:
        ConfigError: there is none of that name.
    """
    for item in named(server, name):
        server.disable_schedule(item.recurring_run_id)


def resume(server: Server, name: str) -> None:
    """Let a schedule that was paused come due again; what it missed is not made up for.

    Raises:
        ConfigError: there is none of that name.
    """
    server.enable_schedule(_one(server, name).recurring_run_id)


def _one(server: Server, name: str) -> Any:
    """Return the schedule of a name; not a former one, which only waits for the end of its run."""
    return named(server, name)[-1]


def named(server: Server, name: str) -> list[Any]:
    """Return the schedules of a name, the newest last.

    Raises:
        ConfigError: there is none.
    """
    if not (schedules := _named(server, name)):
        raise ConfigError(f"there is no schedule {name!r}", fix="see `kubedet schedule --list`")
    return sorted(schedules, key=lambda item: str(item.created_at))


def _drop(server: Server, schedules: list[Any]) -> tuple[str, ...]:
    """Delete recurring runs without harm to the runs they have started; returns those in the way.

    The Workflow of a run belongs to its recurring run, and its training job to the Workflow:
    Kubernetes deletes all of it together, unless it is told to leave orphans, which servers
    before 2.16 cannot tell it (kubeflow/pipelines#7421, #12574).
    """
    if not schedules:
        return ()
    orphans = server.release().orphans
    lingering: list[str] = []
    for item in schedules:
        if not orphans:
            server.disable_schedule(item.recurring_run_id)
            if going_on := server.going_on(item.recurring_run_id):
                lingering += going_on
                continue
        server.delete_schedule(item.recurring_run_id)
    return tuple(lingering)


def made_by_kubedet(server: Server) -> list[Any]:
    """Return the recurring runs that `put` has made."""
    return [item for item in server.schedules() if (item.description or "").startswith(_MARK)]


def _named(server: Server, name: str) -> list[Any]:
    schedules = [item for item in server.schedules() if item.display_name == name]
    if any(not (item.description or "").startswith(_MARK) for item in schedules):
        raise ConfigError(
            f"there is a recurring run {name!r} that `kubedet schedule` has not made",
            fix="choose another --name, or delete that one in the UI",
        )
    return schedules


def _fingerprint(submission: Submission, cron: Cron, package: dict[str, Any]) -> str:
    """Return 16 hex digits that identify what the schedule runs, and when."""
    parts = [submission.experiment, dict(submission.parameters), cron.text, package]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _body(
    server: Server, submission: Submission, cron: Cron, package: dict[str, Any], description: str
) -> kfp_server_api.V2beta1RecurringRun:
    return kfp_server_api.V2beta1RecurringRun(
        display_name=submission.name,
        description=description,
        experiment_id=server.experiment(submission.experiment),
        pipeline_spec=package,
        runtime_config=kfp_server_api.V2beta1RuntimeConfig(parameters=dict(submission.parameters)),
        trigger=kfp_server_api.V2beta1Trigger(
            cron_schedule=kfp_server_api.V2beta1CronSchedule(cron=cron.text)
        ),
        # The next run waits for the end of this one; missed runs are not started later.
        max_concurrency="1",
        no_catchup=True,
        mode=kfp_server_api.RecurringRunMode.ENABLE,
    )
