"""What the functions of `kubedet` return."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

from trainer.base.errors import EvaluationError

if TYPE_CHECKING:
    from kubedet.model import Model


@dataclass(frozen=True)
class Evaluation:
    """The scores of a model."""

    folder: str  # Path or URI of the folder with all results.
    report: str  # Path or URI of the report, an HTML page.
    metrics: dict[str, float]  # E.g. coco/AP50; -1 if there was nothing to score.
    passed: bool  # Whether the rules of the gate passed.
    shards: str  # URI of the data's shards.

    def _repr_html_(self) -> str:
        """Show the scores in a notebook."""
        scores = [(escape(name), value) for name, value in self.metrics.items() if value >= 0]
        rows = "".join(f"<tr><td>{name}</td><td>{value:.3f}</td></tr>" for name, value in scores)
        return f"<table>{rows}</table>gate passed: {self.passed}, report: {escape(self.report)}"


@dataclass(frozen=True)
class Run(Evaluation):
    """A finished run of the whole pipeline on this machine."""

    name: str
    trained: str  # The exported model's folder; the checkpoint if the gate failed; "" without a training.

    @cached_property
    def model(self) -> "Model":
        """The trained model, loaded."""
        from kubedet import load

        if not self.trained:
            fix = "load the current model by its name, or leave out min_new_images"
            raise EvaluationError(f"the run {self.name} did not train a model: there is no new data", fix=fix)
        return load(self.trained)


@dataclass(frozen=True)
class ClusterRun:
    """A run of Kubeflow Pipelines."""

    name: str
    parameters: Mapping[str, Any]  # The pipeline's parameters that differ from their defaults.
    commands: list[str]  # The same as command lines of `kubedet` and `kfp`.
    run_id: str = ""  # Empty if nothing was sent.
    link: str = ""  # Address of the run in the UI.
