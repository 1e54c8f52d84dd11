"""Output of `kubedet submit` and `schedule`."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kubedet.display import format_columns, print_safe
from kubedet.results import ClusterRun

if TYPE_CHECKING:
    from pipelines.schedules import History, Schedule


def show_run(run: ClusterRun, arguments: Mapping[str, Any]) -> None:
    """Print what was or would be submitted, and the next steps."""
    from components.images import COMPONENT_IMAGE
    from pipelines.submission import format_argument

    if arguments["wait"] and run.run_id:
        return
    if not run.run_id:
        print("dry run: nothing was sent. This would be sent:")
    submission, access = run.submission, run.access
    print(f"  host        {access.host or 'the cluster of this pod or kubeconfig'}")
    print(f"  namespace   {access.namespace or '(the default one)'}")
    print(f"  experiment  {submission.experiment}")
    print(f"  run         {run.name}")
    print(f"  image       {COMPONENT_IMAGE}")
    for name, value in run.parameters.items():
        print(f"  {name}={format_argument(value)}")
    if study := run.parameters.get("study"):
        print(f"the search's page and best configuration: {submission.get('data_root')}/tuning/{study}")
    print("the equivalent kfp command:")
    print("".join(f"  {line}\n" for line in run.commands), end="")
    if run.run_id:
        print(f"run {run.run_id}\n{run.link}")
    if run.status_command:
        print(f"to see its training job, once the data is ready: {run.status_command}")


def show_schedule(schedule: "Schedule") -> None:
    """Print a schedule that was or would be created."""
    from pipelines.submission import format_argument

    if schedule.status:
        print(f"schedule {schedule.name}: {schedule.status}\n{schedule.link}")
    else:
        print("dry run: nothing was sent. This would be sent:")
    times = ", ".join(f"{time:%Y-%m-%d %H:%M:%S}" for time in schedule.next_times)
    print(f"  cron        {schedule.cron}\n  next        {times} (if the cluster's time is UTC)")
    print(f"  experiment  {schedule.experiment}")
    if schedule.compiled:
        print(f"  compiled    {' '.join(schedule.compiled)}")
    for name, value in schedule.parameters.items():
        print(f"  {name}={format_argument(value)}")


def show_schedules(schedules: "Sequence[Schedule]") -> None:
    """Print schedules with their parameters."""
    for schedule in schedules:
        print_safe(f"{schedule.name}: {schedule.cron}, {schedule.status}")
        for name, value in schedule.parameters.items():
            print_safe(f"  {name}={value if isinstance(value, str) else json.dumps(value)}")
    if not schedules:
        print("no schedules")


def show_history(history: "History", arguments: Mapping[str, Any]) -> None:
    """Print a row for each run of a schedule."""
    from operations.history import format_rows

    if history.runs:
        print(format_columns(format_rows(history.runs)))
    else:
        print(f"the schedule {arguments['name']} has no runs")
    if history.problem:
        remark = f"verdicts and APs could not be read: {history.problem}"
        print(f"warning: {remark}\n  fix: give the data's location with --data-root", file=sys.stderr)
