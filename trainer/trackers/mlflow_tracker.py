"""Sends metrics to MLflow.

MLflow's environment variables configure it: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_ID or
MLFLOW_EXPERIMENT_NAME, ... MLFLOW_RUN_ID selects a run that another program starts and ends, such as Kubeflow
Pipelines.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from trainer.trackers.experiment_tracking import Row, State, TrackedRun

EXPERIMENT = "kubedet"  # default name of the experiment
_CLIENT_DEFAULTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""By default, MLflow's client retries for minutes."""
_MAX_METRICS, _MAX_PARAMETERS, _MAX_VALUE_LENGTH = 1000, 100, 500  # MLflow's limits of a request
_STATES: dict[State, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowTracker:
    """A run in MLflow."""

    def __init__(self) -> None:
        for name, value in _CLIENT_DEFAULTS.items():
            os.environ.setdefault(name, value)
        self._client: MlflowClient | None = None
        self._id, self._owns_run = "", True

    def start(self, run: TrackedRun, run_id: str) -> str:
        """Start or resume a run; parameters that are already logged do not change."""
        self._client = client = MlflowClient()
        foreign = os.environ.get("MLFLOW_RUN_ID", "")
        self._owns_run = not foreign
        self._id = foreign or run_id or self._id
        if self._id:
            logged = client.get_run(self._id).data.params
            if self._owns_run:
                client.update_run(self._id, status="RUNNING")
        else:
            experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID")
            if not experiment_id:
                name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
                experiment = client.get_experiment_by_name(name)
                experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
            created = client.create_run(experiment_id, run_name=run.name)
            self._id, logged = created.info.run_id, {}
        parameters = [
            Param(name, str(value)[:_MAX_VALUE_LENGTH])
            for name, value in run.parameters.items()
            if name not in logged
        ]
        for start in range(0, len(parameters), _MAX_PARAMETERS):
            client.log_batch(self._id, params=parameters[start : start + _MAX_PARAMETERS])
        client.log_batch(self._id, tags=[RunTag(f"kubedet.{key}", text) for key, text in run.tags.items()])
        return self._id

    def write(self, rows: Sequence[Row]) -> None:
        """Log rows with their step and time."""
        assert self._client is not None
        metrics = [
            Metric(name, value, round(row.time * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        for start in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + _MAX_METRICS])

    def finish(self, state: State, summary: Mapping[str, Any]) -> None:
        """Log the best weights' metrics, and end the run if kubedet started it."""
        assert self._client is not None
        for name, value in summary.items():
            if isinstance(value, str):
                self._client.set_tag(self._id, f"kubedet.{name}", value)
            else:
                self._client.log_metric(self._id, name, value)
        if self._owns_run:
            self._client.set_terminated(self._id, _STATES[state])
