"""`kubedet schedule`: runs of the pipeline again and again, on the data as they are then."""

import argparse
import json
import sys
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING

from pipelines.commands import Commands, cluster_options
from pipelines.commands.options import add_prices, use_prices
from trainer.base.errors import ConfigError

if TYPE_CHECKING:
    from pipelines.cron import Cron
    from pipelines.schedules import Outcome

NAME = "kubedet"
"""Name of a schedule where nobody gives another."""


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "schedule",
        help="run the pipeline again and again in a cluster",
        description="Make a recurring run of the pipeline in Kubeflow Pipelines, or replace the one of the "
        "same name: one run at a time, none made up for that were missed, each on the data as they are "
        "then, under the scheduled time as their version.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--cron", default="", metavar="TEXT",
        help="when: minute, hour, day of the month, month, day of the week (0 is Sunday), and before them "
        "the second if you like; '0 2 * * *' is every night at 2, in the cluster's time zone (mostly UTC)",
    )  # fmt: skip
    what.add_argument("--list", action="store_true", help="list the schedules")
    what.add_argument("--run-now", action="store_true", help="start a run of the schedule of that --name now")
    what.add_argument(
        "--pause", action="store_true", help="start no more runs of the schedule of that --name; one goes on"
    )
    what.add_argument("--resume", action="store_true", help="let a schedule that was paused come due again")
    what.add_argument(
        "--history", action="store_true",
        help="show the runs of the schedule of that --name: when, how long, state, verdict, AP, and what "
        "they used and cost, which is read under the --data-root where this machine sees it",
    )  # fmt: skip
    what.add_argument("--delete", action="store_true", help="delete the schedule of that --name")
    parser.add_argument(
        "--name", default=NAME, help="the schedule that is meant, of every option (default: %(default)s)"
    )
    parser.add_argument(
        "--html", default="", metavar="FILE", help="write the --history as a page, with plots"
    )
    add_prices(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what would be sent, and send nothing")
    cluster_options.add_run(parser, without=("data_version",))
    cluster_options.add_form(parser)
    cluster_options.add_access(parser)
    parser.set_defaults(command=_schedule)


def _schedule(options: argparse.Namespace) -> int:
    if options.html and not options.history:
        raise ConfigError("--html is the page of a --history", fix="give --history too")
    if options.prices and not options.history:
        raise ConfigError("--prices are those of a --history", fix="give --history too")
    if options.list:
        return _list(options)
    if options.history:
        return _history(options)
    if options.run_now:
        return _run_now(options)
    if options.pause or options.resume:
        return _pause_or_resume(options)
    return _delete(options) if options.delete else _put(options)


def _put(options: argparse.Namespace) -> int:
    from components.data_versions import SCHEDULED_TIME
    from pipelines import cron
    from pipelines.submission import argument, compile_options

    due = cron.parse(options.cron)
    options.data_version = SCHEDULED_TIME
    if options.output:
        # Every run would find the first one's training finished there.
        raise ConfigError("--output would be one folder for all runs of a schedule", fix="leave it out")
    submission = cluster_options.submission(options, options.name)
    if options.dry_run:
        print("nothing is sent; this would be:")
    else:
        from pipelines import schedules

        server = cluster_options.connect(cluster_options.access(options))
        outcome = schedules.put(server, submission, due)
        print(f"schedule {options.name}: {outcome.done}\n{server.link('recurringrun', outcome.id)}")
        _explain_lingering(outcome, "the former one")
    print(f"  cron        {due.text}\n  next        {_next(due)}")
    print(f"  experiment  {submission.experiment}")
    if form := compile_options(submission.form):
        print(f"  form        {' '.join(form)}")
    for parameter, value in submission.parameters.items():
        print(f"  {parameter}={argument(value)}")
    return 0


def _next(due: "Cron") -> str:
    times = islice(due.times(datetime.now(UTC).replace(tzinfo=None)), 3)
    return ", ".join(f"{time:%Y-%m-%d %H:%M:%S}" for time in times) + " (if the cluster's time is UTC)"


def _list(options: argparse.Namespace) -> int:
    from pipelines import schedules
    from pipelines.kubeflow import Server

    recurring_runs = schedules.made_by_kubedet(Server(cluster_options.access(options)))
    for item in sorted(recurring_runs, key=lambda item: item.display_name):
        cron = item.trigger.cron_schedule.cron if item.trigger and item.trigger.cron_schedule else ""
        print(f"{item.display_name}: {cron}, {(item.status or 'unknown').lower()}")
        parameters = (item.runtime_config.parameters if item.runtime_config else None) or {}
        for parameter, value in parameters.items():
            print(f"  {parameter}={value if isinstance(value, str) else json.dumps(value)}")
    if not recurring_runs:
        print("there are none")
    return 0


def _run_now(options: argparse.Namespace) -> int:
    from pipelines import schedules

    server = cluster_options.connect(cluster_options.access(options))
    outcome = schedules.start(server, options.name)
    print(f"schedule {options.name}: started the run {outcome.id}\n{server.link('runs', outcome.id)}")
    return 0


def _pause_or_resume(options: argparse.Namespace) -> int:
    from pipelines import schedules
    from pipelines.kubeflow import Server

    server = Server(cluster_options.access(options))
    if options.pause:
        schedules.pause(server, options.name)
        print(f"schedule {options.name}: paused; a run that it has started goes on")
    else:
        schedules.resume(server, options.name)
        print(f"schedule {options.name}: resumed; what it missed is not made up for")
    return 0


def _history(options: argparse.Namespace) -> int:
    from pipelines import history
    from pipelines.kubeflow import Server

    use_prices(options)
    server = Server(cluster_options.access(options))
    nights, obstacle = history.nights(server, options.name, options.data_root or "")
    remark = f"verdicts, APs and costs could not be read: {obstacle}" if obstacle else ""
    print(history.table(nights) if nights else f"the schedule {options.name} has no runs")
    if remark:
        print(
            f"warning: {remark}\n  fix: name where this machine sees the data with --data-root",
            file=sys.stderr,
        )
    if options.html:
        from trainer import storage
        from trainer.report.history_page import page

        series = {
            "AP": [(night.began, night.ap, night.verdict) for night in nights if night.ap is not None],
            "hours": [(night.began, night.hours, night.state) for night in nights if night.hours is not None],
        }
        for night in nights:
            for what, value in night.amounts().items():
                series.setdefault(what, []).append((night.began, value, night.verdict or night.state))
        header, *rows = history.cells(nights)
        text = page(options.name, header, rows, series, remark)
        storage.write_bytes(options.html, text.encode())
        print(f"wrote {options.html}")
    return 0


def _delete(options: argparse.Namespace) -> int:
    from pipelines import schedules
    from pipelines.kubeflow import Server

    outcome = schedules.remove(Server(cluster_options.access(options)), options.name)
    if outcome.done == "absent":
        raise ConfigError(f"there is no schedule {options.name!r}", fix="see `kubedet schedule --list`")
    if not outcome.lingering:
        print(f"deleted the schedule {options.name}; the runs it has started stay")
    _explain_lingering(outcome, f"the schedule {options.name}")
    return 0


def _explain_lingering(outcome: "Outcome", name: str) -> None:
    """Tell why a schedule is not deleted yet."""
    if outcome.lingering:
        runs = ", ".join(outcome.lingering)
        print(
            f"{name} is disabled, and not deleted yet: on this Kubeflow Pipelines (older than 2.16, or of a "
            f"version not known) that would end the run {runs}, which goes on\n"
            "  fix: when that run has ended, give the same command again: it deletes it"
        )
