"""What training pods are told of the trackers that the step's own pod has: settings, and no secret.

Kubeflow Pipelines (from 2.17) sets MLflow's in the pods of steps where an administrator has set it up.
https://www.kubeflow.org/docs/components/pipelines/operator-guides/mlflow-plugin
"""

import os

SETTINGS = (
    "MLFLOW_TRACKING_URI",
    "MLFLOW_RUN_ID",
    "MLFLOW_EXPERIMENT_ID",
    "MLFLOW_EXPERIMENT_NAME",
    "MLFLOW_WORKSPACE",
    "MLFLOW_TRACKING_AUTH",
    "WANDB_PROJECT",
    "WANDB_ENTITY",
    "WANDB_BASE_URL",
    "WANDB_MODE",
)
"""Variables that are no secret; tokens and keys reach a job by its field `secret_env`."""


def settings() -> dict[str, str]:
    """Return those of this process, for pods whose metrics go to the same place."""
    return {name: os.environ[name] for name in SETTINGS if os.environ.get(name)}
