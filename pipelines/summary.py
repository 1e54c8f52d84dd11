"""The record of a run: runs/<name>/summary.json."""

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from components import run_plan
from components.costs import Costs
from pipelines.run_progress import RunProgress
from trainer import storage
from trainer.base.errors import EXIT_FAILURE, EXIT_RETRY
from trainer.base.masking import masked

PACKAGES = ("kubedet", "torch", "torchvision", "kfp", "pycocotools", "onnx", "onnxruntime")


def begin(arguments: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the record of a run that begins now."""
    return {
        "kind": "run",
        "version": 1,
        "name": name,
        "status": "running",
        "started": _now(),
        "arguments": arguments,
        "versions": versions(),
        "machine": {"cores": len(os.sched_getaffinity(0)), "system": platform.platform()},
    }


def complete(
    record: dict[str, Any], run: RunProgress, folder: Path, *, stopped: bool = False, broken: str = "",
    used: Costs | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Add to a run's record how it ended and what it made.

    Args:
        record: what `begin` returned.
        run: the state of the run's steps.
        folder: the run's folder.
        stopped: it was asked to stop.
        broken: what ended the process that watched it, where something did.
        used: what its steps used.

    Returns:
        The record with `status` succeeded, failed or interrupted, `error` where it did not
        succeed, and what the steps that are done reported.
    """
    failed = run.failed
    done = {step.name for step in run.steps.values() if step.state == "done"}
    ended = _results(folder, done)
    # Without an export the run is whole where the gate held it back.
    held_back = "gate" in ended and not ended["gate"]["passed"]
    may_be_skipped = {"train", "evaluate", "export"} if run.since else {"export"} if held_back else set()
    whole = failed is None and not broken and set(run.steps) - done <= may_be_skipped
    interrupted = not whole and (stopped or (failed is not None and failed.state == "stopped"))
    status = "succeeded" if whole else "interrupted" if interrupted else "failed"
    steps = [
        {"name": step.name, "status": step.state, "seconds": round(step.seconds, 2), "reused": step.reused}
        for step in run.steps.values()
    ]
    ended |= {"status": status, "ended": _now(), "steps": steps, "paths": paths(folder, done)}
    if used:
        ended["used"] = used.fields()
    if run.since:
        ended["nothing_new_since"] = run.since
    if failed is not None:
        message = failed.message or "its process ended without a message (killed, or out of memory)"
        code = EXIT_RETRY if interrupted else failed.exit_code or EXIT_FAILURE
        ended["error"] = {"step": failed.name, "message": masked(message), "exit_code": code}
    elif status != "succeeded":
        code = EXIT_RETRY if interrupted else EXIT_FAILURE
        message = broken or ("stopped" if interrupted else "the pipeline ended before a step began")
        ended["error"] = {"step": "", "message": masked(message), "exit_code": code}
    return record | ended


def _results(folder: Path, done: set[str]) -> dict[str, Any]:
    """Return what the steps that are done wrote; an earlier run's files are not looked at."""
    results = {}
    if "train" in done:
        results["training"] = storage.read_json(str(folder / "train" / "result.json"))
        plan = str(folder / run_plan.FILE)
        results |= {"plan": storage.read_json(plan)} if storage.exists(plan) else {}
    if "evaluate" in done:
        metrics = storage.read_json(str(folder / "evaluation" / "metrics.json"))
        results |= {
            "metrics": metrics["metrics"],
            "data_warnings": metrics.get("data_warnings", []),
        }
        results["gate"] = storage.read_json(str(folder / "evaluation" / "gate.json"))
    return results


def paths(folder: Path, done: set[str]) -> dict[str, str]:
    """Return what the steps that are done have made, by what it is."""
    outputs = {
        "checkpoint": ("train", folder / "train" / "best.pt"),
        "tensorboard": ("train", folder / "train" / "tensorboard"),
        "metrics": ("evaluate", folder / "evaluation" / "metrics.json"),
        "report": ("evaluate", folder / "evaluation" / "report.html"),
        "model": ("export", folder / "model"),
        "summary": ("", folder / "summary.json"),
        "log": ("", folder / "log.txt"),
    }
    return {what: str(path) for what, (step, path) in outputs.items() if not step or step in done}


def versions() -> dict[str, str]:
    """Return the versions that decide on a result, and the commit where the code is a checkout."""
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue  # An extra that is not installed.
    root, git = Path(__file__).parents[1], shutil.which("git")
    if git and (root / ".git").exists():
        command = [git, "-C", str(root), "rev-parse", "HEAD"]
        commit = subprocess.run(command, check=False, capture_output=True, text=True)
        if commit.returncode == 0:
            installed["commit"] = commit.stdout.strip()
    return installed


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
