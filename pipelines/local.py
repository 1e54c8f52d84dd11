"""`python -m pipelines.local FILE ROOT ARGUMENTS` runs the pipeline with Kubeflow's local runner."""

import json
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from types import FrameType

import yaml
from kfp import components, local

from pipelines.compiler import compile_pipeline
from pipelines.parameters import CompileOptions
from pipelines.pipeline import SCHEDULED
from trainer.base.errors import EXIT_FAILURE, EXIT_RETRY

_stopping = threading.Event()


def for_this_machine(text: str) -> str:
    """Remove retries, which are for lost pods, the clean-up, which the process guard does, and schedules."""
    spec = next(yaml.safe_load_all(text.replace(SCHEDULED, "")))
    for graph in [spec["root"], *spec.get("components", {}).values()]:
        tasks = graph.get("dag", {}).get("tasks", {})
        for name, task in list(tasks.items()):
            task.pop("retryPolicy", None)
            if task.get("triggerPolicy", {}).get("strategy") == "ALL_UPSTREAM_TASKS_COMPLETED":
                del tasks[name]
    return yaml.safe_dump(spec, sort_keys=False)


def _stop(number: int, frame: FrameType | None) -> None:
    """Ask the running step, and any that the runner still starts, to end: it writes to the runner's pipe."""
    if not _stopping.is_set():
        _stopping.set()
        threading.Thread(target=_stop_steps, daemon=True).start()


def _stop_steps() -> None:
    while True:
        os.killpg(0, signal.SIGTERM)
        time.sleep(1)


def main() -> int:
    """Compile the pipeline and execute it; return 0, 1 if a step failed, or 143 if it was stopped."""
    signal.signal(signal.SIGTERM, _stop)
    file, root, arguments = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    compile_pipeline(file, CompileOptions(conditional="min_new_images" in arguments))
    # The local runner ignores resources, display names and images.
    warnings.filterwarnings("ignore", message=".*have no effect in the current local runner")
    warnings.filterwarnings("ignore", message=".*non-Python base image", category=RuntimeWarning)
    local.init(runner=local.SubprocessRunner(use_venv=False), pipeline_root=root)
    pipeline = components.load_component_from_text(for_this_machine(file.read_text()))
    code = 0
    try:
        pipeline(**arguments)
    except RuntimeError as error:  # It names the step, which has printed the reason.
        print(error, flush=True)
        code = EXIT_FAILURE
    return EXIT_RETRY if _stopping.is_set() else code


if __name__ == "__main__":
    sys.exit(main())
