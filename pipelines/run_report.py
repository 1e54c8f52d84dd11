"""Prints the result of `kubedet run`: metrics, the gate's decision, the output files, or the error."""

import json
import shlex
import shutil
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from components.costs import Costs
from pipelines.run_progress import RunProgress
from trainer.base.log import clock


def exit_code(record: dict[str, Any]) -> int:
    """Return the exit code of a run from its record."""
    return record["error"]["exit_code"] if "error" in record else 0


def report(
    record: dict[str, Any], run: RunProgress, folder: Path, *, again: str, used: Costs | None = None
) -> None:
    """Print how a run went: results on stdout, what went wrong on stderr.

    Args:
        record: the whole summary.
        run: the state of the run's steps, with their last lines.
        folder: the run's folder.
        again: the command line that goes on with the run.
        used: what its steps used.
    """
    if used:
        print(f"\nwhat it used\n{used.text()}")
    _results(record, folder)
    took = datetime.fromisoformat(record["ended"]) - datetime.fromisoformat(record["started"])
    print(f"\nrun {record['name']}: {record['status']} in {clock(took.total_seconds())}")
    _table({what: _short(path) for what, path in record["paths"].items()})
    if "model" in record["paths"]:
        model = shlex.quote(_short(record["paths"]["model"]))
        print("\ntry the model")
        _table({"on images": f"{program()} predict {model} IMAGES... -o DIR",
                "in a browser": f"{program()} serve {model}"})  # fmt: skip
    sys.stdout.flush()
    if "error" in record:
        print("\n" + _failure(record, run, again), file=sys.stderr)


def program() -> str:
    """Return how a person calls this program: by its name, or by its path where the name is not found."""
    called = Path(sys.argv[0])
    return (
        "kubedet" if called.name != "kubedet" or shutil.which("kubedet") else _short(str(called.absolute()))
    )


def _results(record: dict[str, Any], folder: Path) -> None:
    if "nothing_new_since" in record:
        print(f"\nnothing new since {record['nothing_new_since']}: nothing was trained")
    if "metrics" in record:
        metrics = json.loads((folder / "evaluation" / "metrics.json").read_text())
        table = (folder / "evaluation" / "table.txt").read_text()
        print(f"\n{metrics['images']} images of the {metrics['split']} split\n\n{table.rstrip()}")
    for warning in record.get("data_warnings", []):
        print(f"\nwarning: data: {warning}")
    if "training" in record or "gate" in record:
        print()
    if "training" in record and record["training"]["images_per_second"]:
        print(f"training: {_trained(record['training'])}")
        if record["training"].get("advice"):
            print(f"  warning: {record['training']['advice']}")
    if "gate" in record:
        gate = record["gate"]
        print(f"gate: {'passed' if gate['passed'] else 'failed, no model was exported'}")
        print("".join(f"  {line}\n" for line in gate["reason"].splitlines()), end="")


def _trained(training: dict[str, Any]) -> str:
    """Say what this run's training did, and where it was the rest of one how much there is in all."""
    before = training.get("resumed_from") or 0
    did = (
        f"{training['steps'] - before} steps in {clock(training['seconds'])}, "
        f"{training['images_per_second']:.1f} images/s on {training['processes']} processes"
    )
    return f"{did}; with the {before} before {training['steps']} in all" if before else did


def _table(rows: dict[str, str]) -> None:
    width = max(map(len, rows))
    for what, value in rows.items():
        print(f"  {what:<{width}}  {value}")


def _failure(record: dict[str, Any], run: RunProgress, again: str) -> str:
    error, step = record["error"], run.failed
    if record["status"] == "interrupted":
        at = f" in step {error['step']}" if error["step"] else ""
        return f"interrupted{at}; to go on with it:\n  {again}"
    if step is None:
        return _with_lines(f"error: {error['message']}", list(run.outside))
    head = f"error in step {step.name}: {error['message']}"
    return head if step.known else _with_lines(head, list(step.lines))


def _with_lines(head: str, lines: list[str]) -> str:
    return "\n".join(
        [head, "the last lines of its log:", *(f"  {line}" for line in lines)] if lines else [head]
    )


def _short(path: str) -> str:
    """Return a path relative to the current folder where it lies in it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path
