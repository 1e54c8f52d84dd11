"""`kubedet schedule`: recurring runs of the pipeline."""

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from cronsim import CronSim, CronSimError

from pipelines import Access, parameters
from pipelines.commands import Commands, columns, option, options, verb
from pipelines.parameters import Values
from trainer.base.errors import ConfigError

if TYPE_CHECKING:
    from pipelines.kubeflow import Server
    from pipelines.submission import Submission

NAME = "kubedet"  # Default name of a schedule.

_MARK = "made by kubedet schedule, "
"""Starts the description of kubedet's recurring runs, before a fingerprint."""

_FORMER = ", after "
"""After the fingerprint, before the ids of replaced recurring runs, whose runs are its history."""

_MAX_FORMER = 50  # Ids in a description.

_STARTED = "started by kubedet schedule --run-now"
"""Description of a run that was started by hand, also by earlier versions."""

_UNKNOWN_DAYS = re.compile(r"[Ll#]|(?<![\d/])7(?!\d)")

_CHANGES = (
    ("pause", "disable", "paused", "pause a schedule; a run that it has started continues"),
    ("resume", "enable", "resumed; missed runs are skipped", "resume a schedule that was paused"),
    ("delete", "delete", "deleted", "delete a schedule; the runs that it has started stay"),
)
"""Verbs with their call of the API, their message and their help."""


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "schedule", description="Create and manage recurring runs of the pipeline in Kubeflow Pipelines."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    create = verb(
        verbs,
        "create",
        _create,
        "create a recurring run, or replace the one of the same name",
        "Create a recurring run of the pipeline, or replace the one of the same name. One run at a time; "
        "missed runs are skipped. Each run uses the current data, with the scheduled time as its version.",
    )
    option(
        create,
        "--cron TEXT",
        "minute, hour, day of the month, month, day of the week (0 is Sunday), "
        "optionally with the second first; '0 2 * * *' is every night at 2, in the cluster's time zone "
        "(usually UTC)",
        required=True,
    )
    option(create, "--dry-run", "print what would be sent, without sending it")
    options.add_run(create, without=("data_version",))
    options.add_compile_options(create)
    listing = verb(verbs, "list", _list, "list the schedules")
    history = verb(verbs, "history", _history, "show the runs of a schedule: times, state, verdict, AP")
    option(history, "--data-root URI", "location of the runs' data for this machine, if it differs")
    named = [create, history, verb(verbs, "run", _run, "start a run of a schedule now")]
    for name, call, done, text in _CHANGES:
        named.append(verb(verbs, name, partial(_change, verb=call, done=done), text))
    for parser in named:
        option(parser, "--name NAME", "name of the schedule", NAME)
    for parser in (*named, listing):
        options.add_access(parser)


def parse_cron(text: str) -> str:
    """Return a cron expression of five fields, or six with the second first, as Kubeflow takes it: six.

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
        if _UNKNOWN_DAYS.search(fields[-1]) or "L" in fields[-3].upper():
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
    """Return the times after `after` at which a cron expression is due, in the same time zone."""
    return CronSim(cron.replace("?", "*"), after)


def _server(arguments: argparse.Namespace) -> "Server":
    from pipelines.kubeflow import Server

    return Server(Access.find(arguments.host, arguments.namespace, arguments.ca))


def _create(arguments: argparse.Namespace) -> int:
    from components.environment import SCHEDULED_TIME
    from pipelines.submission import argument, compile_arguments

    cron = parse_cron(arguments.cron)
    arguments.data_version = SCHEDULED_TIME
    if arguments.output:
        # Every run would find the first run's finished training there.
        raise ConfigError("--output would make all runs of a schedule share one folder", fix="leave it out")
    submission = options.submission(arguments, arguments.name)
    if arguments.dry_run:
        print("nothing is sent; this would be:")
    else:
        from pipelines import preflight

        server = options.connect(arguments)
        preflight.check(submission, server.namespace)
        schedule_id, done = _create_or_replace(server, submission, cron)
        print(f"schedule {arguments.name}: {done}\n{server.link('recurringrun', schedule_id)}")
    times = islice(due_times(cron, datetime.now(UTC).replace(tzinfo=None)), 3)
    shown = ", ".join(f"{time:%Y-%m-%d %H:%M:%S}" for time in times)
    print(f"  cron        {cron}\n  next        {shown} (if the cluster's time is UTC)")
    print(f"  experiment  {submission.experiment}")
    if compiled := compile_arguments(submission.options):
        print(f"  compiled    {' '.join(compiled)}")
    for parameter, value in submission.parameters.items():
        print(f"  {parameter}={argument(value)}")
    return 0


def _create_or_replace(server: "Server", submission: "Submission", cron: str) -> tuple[str, str]:
    """Create or replace the schedule of a submission's name; return its id and what was done.

    Kubeflow Pipelines cannot change a recurring run. The old one is deleted after the new one was created:
    if the deletion fails there are two, and the next call leaves one.
    """
    import kfp_server_api

    package = submission.package()
    parts = [submission.experiment, dict(submission.parameters), cron, package]
    mark = _MARK + hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    existing = _named(server, submission.name, required=False)
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
            description=mark + _FORMER * bool(former) + " ".join(former[-_MAX_FORMER:]),
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


def _list(arguments: argparse.Namespace) -> int:
    found = _server(arguments).schedules()
    schedules = [item for item in found if (item.description or "").startswith(_MARK)]
    for item in sorted(schedules, key=lambda item: item.display_name):
        cron = item.trigger.cron_schedule.cron if item.trigger and item.trigger.cron_schedule else ""
        print(f"{item.display_name}: {cron}, {(item.status or 'unknown').lower()}")
        for parameter, value in _parameters(item).items():
            print(f"  {parameter}={value if isinstance(value, str) else json.dumps(value)}")
    if not schedules:
        print("there are none")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    from pipelines.kubeflow import ENDED

    server, name = options.connect(arguments), arguments.name
    schedule = _named(server, name)[-1]
    if unfinished := [run.run_id for run in _runs(server, name) if run.state not in ENDED]:
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
    run_id = server.create_run(f"{name} now", experiment, package, _parameters(schedule), _STARTED)
    print(f"schedule {name}: started the run {run_id}\n{server.link('runs', run_id)}")
    return 0


def _change(arguments: argparse.Namespace, verb: str, done: str) -> int:
    server = _server(arguments)
    found = _named(server, arguments.name)
    for item in found[-1:] if verb == "enable" else found:
        server.change_schedule(verb, item.recurring_run_id)
    print(f"schedule {arguments.name}: {done}")
    return 0


def _history(arguments: argparse.Namespace) -> int:
    from operations import history
    from pipelines.kubeflow import stopped

    server, name = _server(arguments), arguments.name
    given, runs = _parameters(_named(server, name)[-1]), []
    for run in _runs(server, name):
        took = run.finished_at - run.created_at if run.finished_at and run.finished_at.year > 1970 else None
        hours = took.total_seconds() / 3600 if took else None
        state = "stopped" if stopped(run) else (run.state or "unknown").lower()
        runs.append(history.Run(run.run_id, run.created_at, hours, state))
    root = arguments.data_root or given.get("data_root") or parameters.default("data_root")
    runs, obstacle = history.complete(sorted(runs, key=lambda run: run.began), root)
    print(columns(history.table(runs)) if runs else f"the schedule {name} has no runs")
    if obstacle:
        remark = f"verdicts and APs could not be read: {obstacle}"
        print(f"warning: {remark}\n  fix: give the data's location with --data-root", file=sys.stderr)
    return 0


def _named(server: "Server", name: str, *, required: bool = True) -> list[Any]:
    """Return the schedules of a name, the newest last; refuse one that kubedet did not create."""
    schedules = [item for item in server.schedules() if item.display_name == name]
    if any(not (item.description or "").startswith(_MARK) for item in schedules):
        raise ConfigError(
            f"the recurring run {name!r} was not created by `kubedet schedule`",
            fix="choose another --name, or delete the existing one in the UI",
        )
    if required and not schedules:
        raise ConfigError(f"there is no schedule {name!r}", fix="see `kubedet schedule list`")
    return sorted(schedules, key=lambda item: str(item.created_at))


def _runs(server: "Server", name: str) -> list[Any]:
    """Return the runs of a schedule, of those that it replaced, and of `kubedet schedule run`."""
    ids = dict.fromkeys(each for item in _named(server, name) for each in _ids(item))
    started = [run for run in server.runs_with("display_name", f"{name} now") if run.description == _STARTED]
    return [*(run for each in ids for run in server.runs_with("recurring_run_id", each)), *started]


def _parameters(schedule: Any) -> Values:
    """Return the pipeline's parameters in a recurring run."""
    return (schedule.runtime_config.parameters if schedule.runtime_config else None) or {}


def _ids(item: Any) -> list[str]:
    """Return the ids of a recurring run and of those that it replaced, the oldest first."""
    return [*(item.description or "").partition(_FORMER)[2].split(), item.recurring_run_id]
