"""Run the CPU benchmarks one after the other and print a table of their results.

    python -m benchmarks                  # all of them, in under 15 minutes on two cores
    python -m benchmarks step loss        # some of them

`python -m benchmarks.gpu` runs the GPU benchmarks.

The exit code is 1 if a benchmark fails or prints no result. A missed goal is listed, but is not a failure:
goals assume an otherwise idle machine.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TIMEOUT = 1800  # Seconds after which a benchmark is killed.

BENCHMARKS = {
    "loss": "--rounds 3",
    "step": "--cases 91:256@5,601:256@3,601:512@1",
    "detr_step": "--cases 80:320:dfine_s@5",
    "loop": "",
    "postprocess": "--rounds 3",
    "scaling": "--rounds 3",
    "loader": "",
    "download": "--rounds 3",
    "storage": "",
    "conversion": "--rounds 3 --rows 30000",
    "evaluation": "--part metrics",
    "export": "",
}
"""Benchmarks and their options; those that take hours are left out."""


@dataclass(frozen=True)
class FinishedBenchmark:
    """A finished benchmark."""

    name: str
    result: dict[str, Any] | None  # Its last line; None if it failed.
    failure: str
    seconds: float
    cpu: float  # CPU seconds, including child processes.


def main() -> int:
    """Run the benchmarks; return 1 if any failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    options = parser.parse_args()
    unknown = set(options.names) - BENCHMARKS.keys()
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(BENCHMARKS)}")
    load = os.getloadavg()[0]
    runs = [run(name, BENCHMARKS[name].split()) for name in options.names or BENCHMARKS]
    print(_table(runs))
    if load > 0.5:
        print(f"\nthe machine was busy at the start (load {load:.1f}): wall-clock figures are unreliable")
    failed = [finished for finished in runs if not finished.result]
    for finished in failed:
        print(f"failed: {finished.name}: {finished.failure}", file=sys.stderr)
    return 1 if failed else 0


def _table(runs: Sequence[FinishedBenchmark]) -> str:
    """Return ratios, run times and missed goals."""
    lines = [f"\n{'benchmark':<16}{'ratio':>8}{'seconds':>10}{'of a core':>12}"]
    for done in runs:
        shown = f"{done.result['ratio']:>8.2f}" if done.result else f"{'FAILED':>8}"
        lines.append(f"{done.name:<16}{shown}{done.seconds:>10.0f}{done.cpu:>12.0f}")
    lines.append(f"{'all':<24}{sum(x.seconds for x in runs):>10.0f}{sum(x.cpu for x in runs):>12.0f}")
    goals = [(done.result, goal) for done in runs if done.result for goal in done.result.get("goals", [])]
    missed = [(result, goal) for result, goal in goals if not goal["reached"]]
    lines.append(f"\ngoals: {len(goals) - len(missed)} of {len(goals)} reached" + ":" * bool(missed))
    for result, goal in missed:
        figure = goal["figure"]
        lines.append(f"  {result['name']} {figure} {result['figures'][figure]:.4g}, not {goal['goal']}")
    return "\n".join(lines)


def run(name: str, arguments: Sequence[str]) -> FinishedBenchmark:
    """Run one benchmark and print its output."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    print(f"\n$ python {' '.join(command[1:])}", flush=True)
    start, cpu, last = time.monotonic(), _child_cpu_seconds(), ""
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        # Kill the whole process group if the benchmark hangs.
        watch = threading.Timer(TIMEOUT, os.killpg, (process.pid, signal.SIGKILL))
        watch.start()
        try:
            for last in process.stdout:
                print(last, end="", flush=True)
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            watch.cancel()
    seconds = time.monotonic() - start
    result = _parse_result(name, last) if process.returncode == 0 else None
    failure = f"exit code {process.returncode}" if process.returncode else "the last line is not its result"
    if process.returncode == -signal.SIGKILL and seconds >= TIMEOUT:
        failure = f"killed after {TIMEOUT} s"
    return FinishedBenchmark(name, result, "" if result else failure, seconds, _child_cpu_seconds() - cpu)


def _child_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _parse_result(name: str, line: str) -> dict[str, Any] | None:
    """Parse the last line of a benchmark; None if it is not a result named NAME or NAME-PART."""
    try:
        result = json.loads(line)
        return result if result["name"].partition("-")[0] == name and result["ratio"] > 0 else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


if __name__ == "__main__":
    sys.exit(main())
