"""Compiles the pipeline and executes the file on this machine with Kubeflow's own local runner.

A process of its own, `python -m pipelines.local FILE ROOT ARGUMENTS`, which `kubedet run`
starts and watches: the runner writes its log and the steps' output to stdout. (Importing
kfp takes two seconds; the process that a person looks at does not.)
"""

import json
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from kfp import components, local

from pipelines.compile import compile_pipeline
from pipelines.parameters import CompileOptions
from trainer.base.errors import EXIT_FAILURE, EXIT_RETRY

_stopping = threading.Event()


def execute(file: Path, root: Path, arguments: dict[str, Any]) -> int:
    """Execute a compiled pipeline; the steps' output goes to stdout.

    Args:
        file: YAML as `kubedet cluster compile` writes it.
        root: folder for the steps' artifacts.
        arguments: pipeline parameters.

    Returns:
        Exit code: 0, 1 where a step failed, 143 when it was stopped.
    """
    # Of no use here: resources and display names are ignored, and the image's name is no matter.
    warnings.filterwarnings("ignore", message=".*have no effect in the current local runner")
    warnings.filterwarnings("ignore", message=".*non-Python base image", category=RuntimeWarning)
    local.init(runner=local.SubprocessRunner(use_venv=False), pipeline_root=str(root))
    pipeline = components.load_component_from_text(for_this_machine(file.read_text()))
    try:
        pipeline(**arguments)
    except RuntimeError as error:  # It names the step, whose output told the reason.
        print(error, flush=True)
        return EXIT_RETRY if _stopping.is_set() else EXIT_FAILURE
    return EXIT_RETRY if _stopping.is_set() else 0


def for_this_machine(text: str) -> str:
    """Take out of a compiled pipeline what only a cluster needs.

    Retries answer lost pods; here the local runner would repeat a user's mistake after half a minute,
    and then again. For the clean-up, a guard ends what a step has started.
    """
    spec = next(yaml.safe_load_all(text))
    for graph in [spec["root"], *spec.get("components", {}).values()]:
        tasks = graph.get("dag", {}).get("tasks", {})
        for name, task in list(tasks.items()):
            task.pop("retryPolicy", None)
            if task.get("triggerPolicy", {}).get("strategy") == "ALL_UPSTREAM_TASKS_COMPLETED":
                del tasks[name]
    return yaml.safe_dump(spec, sort_keys=False)


def _stop(number: int, frame: FrameType | None) -> None:
    """Ask the running step, and any the runner still starts, to end; then the runner ends itself.

    The runner must not be interrupted: it would close the pipe that the step still writes to.
    """
    if not _stopping.is_set():
        _stopping.set()
        threading.Thread(target=_ask_again_and_again, daemon=True).start()


def _ask_again_and_again() -> None:
    while True:
        os.killpg(0, signal.SIGTERM)
        time.sleep(1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    given = json.loads(sys.argv[3])
    compile_pipeline(Path(sys.argv[1]), CompileOptions(conditional="min_new_images" in given))
    sys.exit(execute(Path(sys.argv[1]), Path(sys.argv[2]), given))
