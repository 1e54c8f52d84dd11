"""The result of a hyper-parameter search, and its report in Kubeflow."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components import steps
from trainer import storage


@dataclass(frozen=True)
class BestTrial:
    """The best trial of a search."""

    trial: int
    description: str  # One line that describes the trial.
    metric: str
    value: float
    table: str  # URI of the table of all trials, as Markdown.
    configuration: str  # URI of the best configuration.


@steps.retry_publishing
def report_best_trial(choice: BestTrial, table: Any, configuration: Any, metrics: Any) -> None:
    """Copy the table and the best configuration into artifacts, and show the metric of the best trial."""
    steps.record_outcome(f"best: {choice.description}")
    for uri, artifact in ((choice.table, table), (choice.configuration, configuration)):
        Path(artifact.path).write_bytes(storage.read_bytes(uri))
    configuration.metadata.update(uri=choice.configuration)
    metrics.metadata.update({choice.metric: choice.value, "trial": choice.trial})
