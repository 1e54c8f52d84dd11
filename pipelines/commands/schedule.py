"""`kubedet schedule`: recurring runs of the pipeline."""

import argparse
import json
import sys
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from pipelines.commands import Commands, columns, option, options, verb
from trainer.base.errors import ConfigError

if TYPE_CHECKING:
    from pipelines.kubeflow import Server

NAME = "kubedet"
"""Default name of a schedule."""

_CHANGES = (
    ("pause", "disable", "paused", "pause a schedule; a run that it has started continues"),
    ("resume", "enable", "resumed; missed runs are skipped", "resume a schedule that was paused"),
    ("delete", "delete", "deleted", "delete a schedule; the runs that it has started stay"),
)
"""Verbs with their call of the API, their message and their help."""


def add(commands: Commands) -> None:
    """Declare the command and its verbs."""
    parser = commands.add_parser(
        "schedule", description="Create and manage recurring runs of the pipeline in Kubeflow Pipelines."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    create = verb(
        verbs, "create", _create, "create a recurring run, or replace the one of the same name",
        "Create a recurring run of the pipeline, or replace the one of the same name. One run at a time; "
        "missed runs are skipped. Each run uses the current data, with the scheduled time as its version.",
    )  # fmt: skip
    option(
        create, "--cron TEXT", "minute, hour, day of the month, month, day of the week (0 is Sunday), "
        "optionally with the second first; '0 2 * * *' is every night at 2, in the cluster's time zone "
        "(mostly UTC)", required=True,
    )  # fmt: skip
    option(create, "--dry-run", "print what would be sent, and send nothing")
    options.add_run(create, without=("data_version",))
    options.add_compile_options(create)
    listing = verb(verbs, "list", _list, "list the schedules")
    history = verb(
        verbs, "history", _history, "show the runs of a schedule: times, state, verdict, AP, use and cost"
    )
    option(history, "--html FILE", "write a page too, with plots")
    option(history, "--data-root URI", "location of the runs' data for this machine, if it differs")
    options.add_prices(history)
    named = [create, history, verb(verbs, "run", _run, "start a run of a schedule now")]
    for name, call, done, text in _CHANGES:
        named.append(verb(verbs, name, partial(_change, verb=call, done=done), text))
    for parser in named:
        option(parser, "--name NAME", "name of the schedule", NAME)
    for parser in (*named, listing):
        options.add_access(parser)


def _server(arguments: argparse.Namespace) -> "Server":
    from pipelines.kubeflow import Server

    return Server(options.access(arguments))


def _create(arguments: argparse.Namespace) -> int:
    from components.data_versions import SCHEDULED_TIME
    from pipelines import schedules
    from pipelines.submission import argument, compile_arguments

    cron = schedules.parse_cron(arguments.cron)
    arguments.data_version = SCHEDULED_TIME
    if arguments.output:
        # Every run would find the first run's finished training there.
        raise ConfigError("--output would be one folder for all runs of a schedule", fix="leave it out")
    submission = options.submission(arguments, arguments.name)
    if arguments.dry_run:
        print("nothing is sent; this would be:")
    else:
        server = options.connect(options.access(arguments))
        schedule_id, done = schedules.put(server, submission, cron)
        print(f"schedule {arguments.name}: {done}\n{server.link('recurringrun', schedule_id)}")
    times = islice(schedules.due_times(cron, datetime.now(UTC).replace(tzinfo=None)), 3)
    shown = ", ".join(f"{time:%Y-%m-%d %H:%M:%S}" for time in times)
    print(f"  cron        {cron}\n  next        {shown} (if the cluster's time is UTC)")
    print(f"  experiment  {submission.experiment}")
    if compiled := compile_arguments(submission.options):
        print(f"  compiled    {' '.join(compiled)}")
    for parameter, value in submission.parameters.items():
        print(f"  {parameter}={argument(value)}")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from pipelines import schedules

    recurring_runs = schedules.made_by_kubedet(_server(arguments))
    for item in sorted(recurring_runs, key=lambda item: item.display_name):
        cron = item.trigger.cron_schedule.cron if item.trigger and item.trigger.cron_schedule else ""
        print(f"{item.display_name}: {cron}, {(item.status or 'unknown').lower()}")
        for parameter, value in schedules.parameters_of(item).items():
            print(f"  {parameter}={value if isinstance(value, str) else json.dumps(value)}")
    if not recurring_runs:
        print("there are none")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    from pipelines import schedules

    server = options.connect(options.access(arguments))
    run_id = schedules.start(server, arguments.name)
    print(f"schedule {arguments.name}: started the run {run_id}\n{server.link('runs', run_id)}")
    return 0


def _change(arguments: argparse.Namespace, verb: str, done: str) -> int:
    from pipelines import schedules

    server = _server(arguments)
    found = schedules.named(server, arguments.name)
    for item in found[-1:] if verb == "enable" else found:
        server.change_schedule(verb, item.recurring_run_id)
    print(f"schedule {arguments.name}: {done}")
    return 0


def _history(arguments: argparse.Namespace) -> int:
    from operations import history
    from pipelines import schedules
    from trainer import storage

    options.use_prices(arguments)
    runs, obstacle = schedules.past(_server(arguments), arguments.name, arguments.data_root)
    print(columns(history.table(runs)) if runs else f"the schedule {arguments.name} has no runs")
    remark = f"verdicts, APs and costs could not be read: {obstacle}" if obstacle else ""
    if remark:
        print(f"warning: {remark}\n  fix: give the data's location with --data-root", file=sys.stderr)
    if arguments.html:
        page = history.page(arguments.name, runs, remark)
        storage.write_bytes(arguments.html, page.encode())
        print(f"wrote {arguments.html}")
    return 0
