"""Sends metrics to Weights & Biases.

Its environment variables configure it: WANDB_API_KEY, WANDB_PROJECT, WANDB_ENTITY, WANDB_BASE_URL,
WANDB_RUN_ID, ... WANDB_MODE=offline writes files for `wandb sync`.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from trainer import storage
from trainer.base.temporary_folders import TemporaryFolder
from trainer.trackers.experiment_tracking import Row, State, TrackedRun

PROJECT = "kubedet"  # default name of the project

_START_SECONDS = 30.0


class WandbTracker:
    """A run in Weights & Biases."""

    def __init__(self) -> None:
        self._run: Any = None
        self._temporary: TemporaryFolder | None = None

    def start(self, run: TrackedRun, run_id: str) -> str:
        """Start or resume a run."""
        run_id = os.environ.get("WANDB_RUN_ID") or run_id or secrets.token_hex(4)
        # Files stay in the run folder, so that an offline run can be sent later; not in a bucket.
        self._temporary = None if storage.is_local(run.output) else TemporaryFolder()
        folder = self._temporary.path if self._temporary else storage.local_path(run.output)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=run_id,
            name=run.name,
            resume="allow",
            dir=str(folder),
            config={**run.parameters, **{f"kubedet.{k}": v for k, v in run.tags.items()}},
            settings=wandb.Settings(
                init_timeout=_START_SECONDS,
                silent=True,
                console="off",
                save_code=False,
                disable_git=True,
                disable_job_creation=True,
            ),
        )
        # Rows do not arrive in the order of steps, because validations are scored in a thread.
        self._run.define_metric("*", step_metric="step")
        return run_id

    def write(self, rows: Sequence[Row]) -> None:
        """Log rows with their steps."""
        for row in rows:
            self._run.log({**row.values, "step": row.step})

    def finish(self, state: State, summary: Mapping[str, Any]) -> None:
        """Log the best weights' metrics, and end the run."""
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=0 if state == "finished" else 1)
