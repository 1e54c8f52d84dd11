"""Metrics to Weights & Biases, by its own client.

Its variables are its own: WANDB_API_KEY, WANDB_PROJECT, WANDB_ENTITY, WANDB_BASE_URL, WANDB_RUN_ID and
WANDB_MODE=offline, with which everything goes to files for `wandb sync`.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from trainer import storage
from trainer.base.temporary_folders import TemporaryFolder
from trainer.trackers.experiment_tracking import Row, State, TrackedRun

PROJECT = "kubedet"
"""Name of the project where the environment names none."""

_START_SECONDS = 30.0


class WandbTracker:
    """One run at Weights & Biases."""

    def __init__(self) -> None:
        self._run: Any = None
        self._temporary: TemporaryFolder | None = None

    def start(self, run: TrackedRun, run_id: str) -> str:
        """Begin a run, or go on with one."""
        run_id = os.environ.get("WANDB_RUN_ID") or run_id or secrets.token_hex(4)
        # Beside the run's other files, from where an offline run can be sent later; a bucket gets none.
        self._temporary = None if storage.is_local(run.output) else TemporaryFolder()
        folder = self._temporary.path if self._temporary else storage.local_path(run.output)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT, id=run_id, name=run.name, resume="allow",
            dir=str(folder), config={**run.parameters, **{f"kubedet.{k}": v for k, v in run.tags.items()}},
            # Quiet, and nothing of the console, the code or the repository.
            settings=wandb.Settings(
                init_timeout=_START_SECONDS, silent=True, console="off", save_code=False, disable_git=True,
                disable_job_creation=True,
            ),
        )  # fmt: skip
        # Validations are scored beside the training, so that rows do not come in the order of steps.
        self._run.define_metric("*", step_metric="step")
        return run_id

    def write(self, rows: Sequence[Row]) -> None:
        """Log rows, by step."""
        for row in rows:
            self._run.log({**row.values, "step": row.step})

    def finish(self, state: State, summary: Mapping[str, Any]) -> None:
        """Log the best weights' figures, and end the run."""
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=0 if state == "finished" else 1)
