"""The benchmarks of a set, one after the other: each prints its result, a table ends it.

    python -m benchmarks                  # those for a CPU, in under 15 minutes on two cores
    python -m benchmarks step loss        # some of them
    python -m benchmarks --set gpu        # those for a GPU, beside torch they need pydantic alone

One that fails, or prints no result, does not keep the others from running; the exit code tells.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIMIT = 600
"""Seconds after which a benchmark is stopped, and has failed."""

SETS: dict[str, dict[str, str]] = {
    "cpu": {
        "loss": "",
        "step": "--rounds 3",
        "postprocess": "",
        "scaling": "--rounds 4",
        "checkpoint": "",
        "loader": "",
        "download": "",
        "storage": "",
        "conversion": "",
        "openimages_csv": "",
        "evaluation": "--part metrics",
        "export": "",
    },
    "gpu": {
        "loss": "--size 800 --images 8 --rounds 20",
        "step": "--cases 91:800,264:800:mlperf,601:800 --images 16 --rounds 20 --network graphs",
        "postprocess": "--images 16 --rounds 20",
    },
}
"""Benchmarks and their options. Left out: what takes hours, and what only others call."""


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
    start = time.monotonic()
    rows = [run(name, chosen[name].split()) for name in options.names or chosen]
    print(f"\n{'benchmark':<14}{'ratio':>8}{'seconds':>10}")
    for name, result, seconds in rows:
        shown = f"{result['ratio']:>8.2f}" if result else f"{'FAILED':>8}"
        print(f"{name:<14}{shown}{seconds:>10.0f}")
    print(f"{'all':<14}{'':>8}{time.monotonic() - start:>10.0f}")
    failed = [name for name, result, _ in rows if not result]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run(name: str, arguments: Sequence[str]) -> tuple[str, dict[str, Any] | None, float]:
    """Run one; what it prints is shown as it comes.

    Returns:
        Its name, the result in its last line (None where it failed), and how many seconds it took.
    """
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    print(f"\n$ python {' '.join(command[1:])}", flush=True)
    start, last = time.monotonic(), ""
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
    result = _result(name, last) if process.returncode == 0 else None
    return name, result, time.monotonic() - start


def _result(name: str, line: str) -> dict[str, Any] | None:
    try:
        result = json.loads(line)
        return result if result["name"] == name and result["ratio"] > 0 else None
    except (ValueError, KeyError, TypeError):
        return None


if __name__ == "__main__":
    sys.exit(main())
