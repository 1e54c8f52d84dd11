"""The benchmarks of a set, one after the other: each prints its result, a table ends it.

    python -m benchmarks                  # those for a CPU, in under 15 minutes on two cores
    python -m benchmarks step loss        # some of them
    python -m benchmarks --set gpu        # those for a GPU

Those for a GPU need torch, torchvision, NumPy, pydantic and safetensors. The ones that read shards need the
packages of `NEEDS` besides, and are left out where these are missing, as is `scaling` on a single GPU.
One that fails, or prints no result, does not keep the others from running; the exit code tells. A goal
that this machine does not reach is listed, and is no failure: goals are for a machine with nothing else
to do, and most figures are by the wall clock. That goes for the time of all of them, too.
"""

import argparse
import importlib.util
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
LIMIT = 1800
"""Seconds after which a benchmark hangs, and is ended: many times what one takes, for a busy machine."""

SETS: dict[str, dict[str, str]] = {
    "cpu": {
        "loss": "--rounds 3",
        "step": "--cases 91:256@5,601:256@3,601:512@1",
        "detr_step": "--cases 80:320:dfine_s@5",
        "postprocess": "--rounds 3",
        "scaling": "--rounds 3",
        "checkpoint": "",
        "loader": "",
        "download": "--rounds 3",
        "storage": "",
        "conversion": "--rounds 3 --rows 30000",
        "openimages_csv": "",
        "evaluation": "--part metrics",
        "export": "",
    },
    "gpu": {
        "loss": "--size 800 --images 8 --rounds 20",
        "step": "--cases 91:800,264:800:mlperf,601:800 --images 16 --rounds 20 --network graphs",
        "detr_step": "--cases 80:640:dfine_s,80:640:dfine_l --images 16 --rounds 10 --network graphs",
        "postprocess": "--images 16 --rounds 20",
        "scaling": "--processes 0 --size 800 --images 16 --steps 5",
        "loader": "--cases 1024x768:800 --workers 16 --images 256 --cold-images 0",
    },
}
"""Benchmarks and their options. Left out: what takes hours, and what only others call."""
SECONDS = {"cpu": 900}
"""What all of a set may take together."""
_SHARDS = ("simplejpeg", "pyarrow", "ijson", "minio", "obstore", "urllib3", "certifi")
NEEDS = {"detr_step": ("transformers", "scipy"), "loader": _SHARDS}
"""Packages that a benchmark of the GPU's set needs beside those that all do."""


@dataclass(frozen=True)
class Run:
    """A benchmark that has ended."""

    name: str
    result: dict[str, Any] | None
    """What it printed last; None where it failed."""
    failure: str
    """What is wrong where it failed."""
    seconds: float
    cpu: float
    """Seconds of processor time, its processes included."""


def main() -> int:
    """Run them; 1 if any failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks of the set (default: all)")
    parser.add_argument("--set", choices=SETS, default="cpu", dest="kind", help="default: %(default)s")
    options = parser.parse_args()
    chosen = SETS[options.kind]
    unknown = set(options.names) - chosen.keys()
    if unknown:
        parser.error(
            f"not in the set {options.kind}: {', '.join(sorted(unknown))}; it has {', '.join(chosen)}"
        )
    names = options.names or list(chosen)
    if options.kind == "gpu":
        _check_gpu(parser)
        # What is asked for by name says itself what it lacks.
        reasons = {name: reason for name in chosen if not options.names and (reason := left_out(name))}
        for name, reason in reasons.items():
            print(f"left out: {name}: {reason}")
        names = [name for name in names if name not in reasons]
    load = os.getloadavg()[0]
    runs = [run(name, chosen[name].split()) for name in names]
    print(_table(runs))
    if not options.names and options.kind in SECONDS:
        print(_whole(runs, SECONDS[options.kind]))
    if load > 0.5:
        print(
            f"\nother work was there when it began (a load of {load:.1f}): figures by the wall clock suffer"
        )
    failed = [one for one in runs if not one.result]
    for one in failed:
        print(f"failed: {one.name}: {one.failure}", file=sys.stderr)
    return 1 if failed else 0


def _check_gpu(parser: argparse.ArgumentParser) -> None:
    """Refuse what would take hours on a CPU."""
    import torch  # takes seconds, and only these benchmarks need to know

    if not torch.cuda.is_available():
        parser.error(f"--set gpu: torch {torch.__version__} finds no GPU on this machine")


def left_out(name: str) -> str:
    """Why a benchmark of the GPU's set cannot be run on this machine; empty if it can."""
    missing = [package for package in NEEDS.get(name, ()) if importlib.util.find_spec(package) is None]
    if missing:
        return f"it needs {', '.join(missing)}"
    if name == "scaling":
        import torch

        if torch.cuda.device_count() < 2:
            return "it compares several GPUs with one, and this machine has one"
    return ""


def _whole(runs: Sequence[Run], limit: float) -> str:
    """How long all took, and whether that is what they may take."""
    seconds = sum(one.seconds for one in runs)
    return (
        f"\nall {len(runs)} took {seconds:.0f} s, "
        f"{'within the' if seconds < limit else 'more than the'} {limit:.0f} s that they may take"
    )


def _table(runs: Sequence[Run]) -> str:
    """The ratios, how long each took, and the goals that were not reached."""
    lines = [f"\n{'benchmark':<16}{'ratio':>8}{'seconds':>10}{'of a core':>12}"]
    for one in runs:
        shown = f"{one.result['ratio']:>8.2f}" if one.result else f"{'FAILED':>8}"
        lines.append(f"{one.name:<16}{shown}{one.seconds:>10.0f}{one.cpu:>12.0f}")
    lines.append(f"{'all':<24}{sum(x.seconds for x in runs):>10.0f}{sum(x.cpu for x in runs):>12.0f}")
    goals = [(one.result, goal) for one in runs if one.result for goal in one.result.get("goals", [])]
    missed = [(result, goal) for result, goal in goals if not goal["reached"]]
    lines.append(f"\ngoals: {len(goals) - len(missed)} of {len(goals)} reached" + ":" * bool(missed))
    for result, goal in missed:
        figure = goal["figure"]
        lines.append(f"  {result['name']} {figure} {result['figures'][figure]:.4g}, not {goal['goal']}")
    return "\n".join(lines)


def run(name: str, arguments: Sequence[str]) -> Run:
    """Run one; what it prints is shown as it comes."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    print(f"\n$ python {' '.join(command[1:])}", flush=True)
    start, cpu, last = time.monotonic(), _cpu(), ""
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        # It may hang without a word; with it end the processes that it has started.
        watch = threading.Timer(LIMIT, os.killpg, (process.pid, signal.SIGKILL))
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
    result = _result(name, last) if process.returncode == 0 else None
    failure = (
        f"it ended with {process.returncode}" if process.returncode else "its last line is no result of it"
    )
    if process.returncode == -signal.SIGKILL and seconds >= LIMIT:
        failure = f"it hung: it was ended after {LIMIT} s"
    return Run(name, result, "" if result else failure, seconds, _cpu() - cpu)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _result(name: str, line: str) -> dict[str, Any] | None:
    """What a benchmark printed last, if it is a result of it, or of a part of it (NAME-PART)."""
    try:
        result = json.loads(line)
        return result if result["name"].partition("-")[0] == name and result["ratio"] > 0 else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


if __name__ == "__main__":
    sys.exit(main())
