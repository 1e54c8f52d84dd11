"""Run the GPU benchmarks on a machine with torch and without network access.

    python -m benchmarks.gpu --pack .gpu                 # with network access: download missing wheels
    python -m benchmarks.gpu --run --packed .gpu         # on the GPU machine: run all stages
    python -m benchmarks.gpu --run --stages step,loop    # some of them
    python -m benchmarks.gpu --run --small --device cpu  # small versions of the stages, on any machine

The GPU machine needs Linux, Python 3.12, torch 2.11 or later with its torchvision, and this checkout. Each
stage has a time limit; if one fails, the run continues. `--out` contains the log of each stage and
`table.md`, a table of the figures that is rewritten after each stage. The exit code is 1 if a stage failed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MISSING_PACKAGES = [
    "annotated-types", "argon2-cffi", "argon2-cffi-bindings", "cffi", "execnet", "hotcoco", "ijson",
    "iniconfig", "minio", "ml-dtypes", "obstore", "onnx", "onnx-ir", "onnxscript", "packaging",
    "pillow-heif", "pluggy", "protobuf", "pycocotools", "pycparser", "pycryptodome", "pydantic",
    "pydantic-core", "pytest", "pytest-timeout", "pytest-xdist", "simplejpeg", "transformers",
    "typing-inspection",
]  # fmt: skip
"""Packages that images with torch usually lack, with their dependencies."""
GLIBC_VERSIONS = ("2014", "1", "_2_17", "_2_24", "_2_26", "_2_27", "_2_28", "_2_31", "_2_34", "_2_35")
SHOWN_FIGURES = ("images_per_second", "ratio", "share", "peak", "waits", "ap", "first_batch")
"""Figures whose name contains one of these, as words between underscores, are shown in the table."""
_GPU_TESTS = (
    "model/retinanet/test_anchor_matching.py",
    "training/test_loop_compile.py",
    "training/test_fake_gpu.py",
)


@dataclass(frozen=True)
class Stage:
    """A command with its time limit."""

    seconds: int  # Time limit; four times as long with --small.
    command: str  # Arguments of Python.
    small: str  # The same for --small.


_STEP = "-m benchmarks.step --images 16 --rounds 10 --network graphs --cases"
_DETR = "-m benchmarks.detr_step --images 16 --rounds 10 --network graphs --cases"
_TESTS = "-m pytest -p no:cacheprovider -q " + " ".join(f"tests/trainer/{name}" for name in _GPU_TESTS)
_SMALL = "--rounds 1 --images 1 --no-compile"
STAGES = {
    "doctor": Stage(60, "-m trainer doctor --gpus 1", "-m trainer doctor"),
    "step": Stage(150, f"{_STEP} 91:800", f"-m benchmarks.step {_SMALL} --cases 5:96"),
    "loop": Stage(
        240,
        "-m benchmarks.loop --size 800 --images 16 --samples 1024 --epochs 12 --network graphs",
        f"-m benchmarks.loop {_SMALL} --recipe debug --size 96 --samples 16 --epochs 2",
    ),
    "step601": Stage(140, f"{_STEP} 601:800", f"-m benchmarks.step {_SMALL} --cases 7:96"),
    "mlperf": Stage(120, f"{_STEP} 264:800:mlperf", f"-m benchmarks.step {_SMALL} --cases 4:96:mlperf"),
    "dfine_s": Stage(
        120, f"{_DETR} 80:640:dfine_s", f"-m benchmarks.detr_step {_SMALL} --cases 4:128:dfine_small"
    ),
    "tests": Stage(130, f"{_TESTS} -n 8 --timeout 120", f"{_TESTS} --collect-only"),
    "loader": Stage(
        90,
        "-m benchmarks.loader --cases 1024x768:800 --images 256 --cold-images 0 --workers 16",
        "-m benchmarks.loader --rounds 1 --cases 128x96:96 --images 16 --cold-images 0 --workers 1",
    ),
    "dfine_l": Stage(
        120, f"{_DETR} 80:640:dfine_l", f"-m benchmarks.detr_step {_SMALL} --cases 5:128:dfine_small"
    ),
}
"""Stages in the order in which they run. Their limits add up to less than 20 minutes."""


@dataclass
class Outcome:
    """Result of a stage."""

    name: str
    failure: str  # Empty if it succeeded.
    seconds: float
    result: dict[str, Any] = field(default_factory=dict)  # The last line of a benchmark.


def main() -> int:
    """Download the wheels, or run the stages and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--pack", type=Path, metavar="DIR", help="download the wheels into this folder")
    mode.add_argument("--run", action="store_true", help="run the stages")
    parser.add_argument("--packed", type=Path, metavar="DIR", help="folder that --pack filled")
    parser.add_argument("--stages", default=",".join(STAGES), help="default: %(default)s")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="small sizes, one round")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build/gpu", metavar="DIR", help="default: build/gpu"
    )
    options = parser.parse_args()
    if options.pack:
        return pack(options.pack)
    unknown = set(options.stages.split(",")) - STAGES.keys()
    if unknown:
        parser.error(f"--stages: unknown {', '.join(sorted(unknown))}; choose from {', '.join(STAGES)}")
    options.out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    if options.packed:
        environment["PYTHONPATH"] = install(options.packed, options.out / "site")
    outcomes = []
    for name in options.stages.split(","):
        outcomes.append(run(name, options, environment))
        table = _table(outcomes, options.device)
        (options.out / "table.md").write_text(table)
    print(table)
    return 1 if any(outcome.failure for outcome in outcomes) else 0


def pack(folder: Path) -> int:
    """Download wheels for Python 3.12 on Linux in the pinned versions; return pip's exit code."""
    pins = dict(
        line.split()[0].split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    for wheel in folder.glob("*.whl"):
        wheel.unlink()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
        "--python-version",
        "3.12",
        "--implementation",
        "cp",
        *(option for glibc in GLIBC_VERSIONS for option in ("--platform", f"manylinux{glibc}_x86_64")),
        *(f"{name}=={pins[name]}" for name in MISSING_PACKAGES),
    ]
    return subprocess.run(command, check=False).returncode


def install(packed: Path, site: Path) -> str:
    """Install the wheels of a folder into `site`; return the PYTHONPATH to use."""
    wheels = [str(path) for path in packed.glob("*.whl")]
    if not wheels:
        sys.exit(
            f"error: {packed} has no wheels\n"
            f"fix: run `python -m benchmarks.gpu --pack {packed}` on a machine with network access"
        )
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
    if subprocess.run([*command, "--target", str(site), *wheels], check=False).returncode:
        sys.exit(f"error: the wheels in {packed} cannot be installed here\nfix: use Python 3.12 on Linux")
    return os.pathsep.join([str(site.absolute()), str(ROOT)])


def run(name: str, options: argparse.Namespace, environment: dict[str, str]) -> Outcome:
    """Run one stage; its output goes to a log file."""
    stage = STAGES[name]
    command = [sys.executable, *(stage.small if options.small else stage.command).split()]
    if "-m benchmarks" in stage.command:
        command += ["--device", options.device]
    print(f"$ python {' '.join(command[1:])}", flush=True)
    limit = stage.seconds * (4 if options.small else 1)
    log, start = options.out / f"{name}.log", time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    seconds = time.monotonic() - start
    lines = log.read_text(errors="replace").splitlines()
    failure = "" if process.returncode == 0 else f"exit code {process.returncode}, see {log.name}"
    if process.returncode == -signal.SIGKILL and seconds >= limit:
        failure = f"killed after {limit} s, see {log.name}"
    outcome = Outcome(name, failure, seconds)
    if not failure and "-m benchmarks" in stage.command:
        outcome.result = json.loads(lines[-1])
    print("\n".join(f"    {line[:200]}" for line in lines[-20 if failure else -1 :]), flush=True)
    return outcome


def _table(outcomes: Sequence[Outcome], device: str) -> str:
    """Return the figures as Markdown."""
    results = [outcome.result for outcome in outcomes if outcome.result]
    if results:
        first = results[0]
        versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
        title = f"{first['device']}; {versions}; {first['date']}, commit {first['commit'] or 'unknown'}"
    else:
        title = device
    lines = [
        f"{title}; `python -m benchmarks.gpu --run`:",
        "",
        "| stage | figure | value | goal |",
        "| --- | --- | --- | --- |",
    ]
    for outcome in outcomes:
        if not outcome.result:
            lines.append(f"| {outcome.name} | | {outcome.failure or 'passed'} ({outcome.seconds:.0f} s) | |")
        goals = {goal["figure"]: goal["goal"] for goal in outcome.result.get("goals", [])}
        for figure, value in outcome.result.get("figures", {}).items():
            if figure in goals or any(f"_{part}_" in f"_{figure}_" for part in SHOWN_FIGURES):
                shown = f"{value:.4g}" if isinstance(value, float) else value
                lines.append(f"| {outcome.name} | {figure} | {shown} | {goals.get(figure, '')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
