"""`kubedet schedule`: recurring runs of the pipeline, each on the data as they are then."""

import argparse
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING

from pipelines.commands import Commands, cluster_options
from pipelines.commands.options import add_prices, use_prices
from trainer.base.errors import ConfigError

if TYPE_CHECKING:
    from pipelines.schedules import Night

NAME = "kubedet"
"""Default name of a schedule."""


def add(commands: Commands) -> None:
    """Declare the command and its verbs."""
    parser = commands.add_parser(
        "schedule", description="Create and manage recurring runs of the pipeline in Kubeflow Pipelines."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    create = _verb(
        verbs, "create", _create, "create a recurring run, or replace the one of the same name",
        "Create a recurring run of the pipeline, or replace the one of the same name. One run at a time; "
        "missed runs are not made up for. Each run uses the data as they are then, with the scheduled time "
        "as their version.",
    )  # fmt: skip
    create.add_argument(
        "--cron", required=True, metavar="TEXT",
        help="when: minute, hour, day of the month, month, day of the week (0 is Sunday), and before them "
        "the second if you like; '0 2 * * *' is every night at 2, in the cluster's time zone (mostly UTC)",
    )  # fmt: skip
    create.add_argument("--dry-run", action="store_true", help="print what would be sent, and send nothing")
    cluster_options.add_run(create, without=("data_version",))
    cluster_options.add_form(create)
    _verb(verbs, "list", _list, "list the schedules", name=False)
    _verb(verbs, "run", _run, "start a run of a schedule now")
    _verb(verbs, "pause", _pause, "pause a schedule; a run that it has started continues")
    _verb(verbs, "resume", _resume, "resume a schedule that was paused")
    history = _verb(
        verbs, "history", _history, "show the runs of a schedule: times, state, verdict, AP, use and cost"
    )
    history.add_argument("--html", default="", metavar="FILE", help="write a page too, with plots")
    history.add_argument(
        "--data-root", default="", metavar="URI",
        help="where this machine sees the runs' data, to read verdicts and costs (default: as the runs do)",
    )  # fmt: skip
    add_prices(history)
    _verb(verbs, "delete", _delete, "delete a schedule; the runs that it has started stay")


def _verb(
    verbs: Commands, name_of_verb: str, command: Callable[[argparse.Namespace], int], text: str,
    description: str = "", *, name: bool = True,
) -> argparse.ArgumentParser:  # fmt: skip
    parser = verbs.add_parser(
        name_of_verb, help=text, description=description or f"{text[0].upper()}{text[1:]}."
    )
    if name:
        parser.add_argument("--name", default=NAME, help="name of the schedule (default: %(default)s)")
    cluster_options.add_access(parser)
    parser.set_defaults(command=command)
    return parser


def _create(options: argparse.Namespace) -> int:
    from components.data_versions import SCHEDULED_TIME
    from pipelines import schedules
    from pipelines.submission import argument, compile_options

    cron = schedules.parse_cron(options.cron)
    options.data_version = SCHEDULED_TIME
    if options.output:
        # Every run would find the first one's training finished there.
        raise ConfigError("--output would be one folder for all runs of a schedule", fix="leave it out")
    submission = cluster_options.submission(options, options.name)
    if options.dry_run:
        print("nothing is sent; this would be:")
    else:
        server = cluster_options.connect(cluster_options.access(options))
        schedule_id, done = schedules.put(server, submission, cron)
        print(f"schedule {options.name}: {done}\n{server.link('recurringrun', schedule_id)}")
    times = islice(schedules.due_times(cron, datetime.now(UTC).replace(tzinfo=None)), 3)
    shown = ", ".join(f"{time:%Y-%m-%d %H:%M:%S}" for time in times)
    print(f"  cron        {cron}\n  next        {shown} (if the cluster's time is UTC)")
    print(f"  experiment  {submission.experiment}")
    if form := compile_options(submission.form):
        print(f"  form        {' '.join(form)}")
    for parameter, value in submission.parameters.items():
        print(f"  {parameter}={argument(value)}")
    return 0


def _list(options: argparse.Namespace) -> int:
    from pipelines import schedules
    from pipelines.kubeflow import Server

    recurring_runs = schedules.made_by_kubedet(Server(cluster_options.access(options)))
    for item in sorted(recurring_runs, key=lambda item: item.display_name):
        cron = item.trigger.cron_schedule.cron if item.trigger and item.trigger.cron_schedule else ""
        print(f"{item.display_name}: {cron}, {(item.status or 'unknown').lower()}")
        for parameter, value in schedules.parameters_of(item).items():
            print(f"  {parameter}={value if isinstance(value, str) else json.dumps(value)}")
    if not recurring_runs:
        print("there are none")
    return 0


def _run(options: argparse.Namespace) -> int:
    from pipelines import schedules

    server = cluster_options.connect(cluster_options.access(options))
    run_id = schedules.start(server, options.name)
    print(f"schedule {options.name}: started the run {run_id}\n{server.link('runs', run_id)}")
    return 0


def _pause(options: argparse.Namespace) -> int:
    from pipelines import schedules
    from pipelines.kubeflow import Server

    schedules.pause(Server(cluster_options.access(options)), options.name)
    print(f"schedule {options.name}: paused; a run that it has started continues")
    return 0


def _resume(options: argparse.Namespace) -> int:
    from pipelines import schedules
    from pipelines.kubeflow import Server

    schedules.resume(Server(cluster_options.access(options)), options.name)
    print(f"schedule {options.name}: resumed; missed runs are not made up for")
    return 0


def _history(options: argparse.Namespace) -> int:
    from pipelines import schedules
    from pipelines.kubeflow import Server
    from pipelines.tables import columns

    use_prices(options)
    server = Server(cluster_options.access(options))
    nights, obstacle = schedules.nights(server, options.name, options.data_root)
    remark = f"verdicts, APs and costs could not be read: {obstacle}" if obstacle else ""
    print(columns(schedules.cells(nights)) if nights else f"the schedule {options.name} has no runs")
    if remark:
        print(
            f"warning: {remark}\n  fix: name where this machine sees the data with --data-root",
            file=sys.stderr,
        )
    if options.html:
        _write_page(options, nights, remark)
        print(f"wrote {options.html}")
    return 0


def _write_page(options: argparse.Namespace, nights: "list[Night]", remark: str) -> None:
    from pipelines.schedules import cells
    from trainer import storage
    from trainer.report.history_page import page

    series = {
        "AP": [(night.began, night.ap, night.verdict) for night in nights if night.ap is not None],
        "hours": [(night.began, night.hours, night.state) for night in nights if night.hours is not None],
    }
    for night in nights:
        for what, value in night.amounts().items():
            series.setdefault(what, []).append((night.began, value, night.verdict or night.state))
    header, *rows = cells(nights)
    storage.write_bytes(options.html, page(options.name, header, rows, series, remark).encode())


def _delete(options: argparse.Namespace) -> int:
    from pipelines import schedules
    from pipelines.kubeflow import Server

    schedules.remove(Server(cluster_options.access(options)), options.name)
    print(f"deleted the schedule {options.name}; the runs that it has started stay")
    return 0
