"""The last words of `kubedet run`: the table of metrics, the verdict, what was made, or what went wrong."""

import sys
from pathlib import Path
from typing import Any

from pipelines.follow import Follower
from trainer.log import clock


def exit_code(record: dict[str, Any]) -> int:
    """Return the exit code of a run from its record."""
    return record["error"]["exit_code"] if "error" in record else 0


def tell(record: dict[str, Any], run: Follower, folder: Path) -> None:
    """Print how a run went: results on stdout, what went wrong on stderr.

    Args:
        record: the whole summary.
        run: the state of the run's steps, with their last lines.
        folder: the run's folder.
    """
    if "metrics" in record:
        print("\n" + (folder / "evaluation" / "table.txt").read_text().rstrip())
    if "training" in record and record["training"]["images_per_second"]:
        training = record["training"]
        print(
            f"\ntraining: {training['steps']} steps in {clock(training['seconds'])}, "
            f"{training['images_per_second']:.1f} images/s on {training['processes']} processes"
        )
    if "gate" in record:
        held = record["gate"]
        print(f"gate: {'passed' if held['passed'] else 'failed, no model was exported'}")
        print("".join(f"  {line}\n" for line in held["reason"].splitlines()), end="")
    print()
    width = max(len(what) for what in record["paths"])
    for what, path in record["paths"].items():
        print(f"{what:<{width}}  {_short(path)}")
    sys.stdout.flush()
    if "error" in record:
        print("\n" + _wrong(record, run), file=sys.stderr)


def _wrong(record: dict[str, Any], run: Follower) -> str:
    error, step = record["error"], run.failed
    if record["status"] == "interrupted":
        at = f" in step {error['step']}" if error["step"] else ""
        return f"interrupted{at}; go on with the same command and --name {record['name']}"
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
