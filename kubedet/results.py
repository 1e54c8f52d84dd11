"""The classes that the functions of `kubedet` return."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipelines import Access
from trainer.base.errors import EvaluationError

if TYPE_CHECKING:
    from kubedet.model import Model
    from pipelines.submission import Submission
    from trainer.export.metadata import Metadata


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The evaluation of a model."""

    folder: str  # Path or URI of the folder with all results.
    report: str  # Path or URI of the report, an HTML page.
    metrics: dict[str, float]  # Values by name, e.g. coco/AP50; -1 if there was nothing to score.
    passed: bool  # Whether the model passed the gate.
    shards: str = ""  # URI of the data's shards; empty if a file of detections was scored.
    reason: str = ""  # The gate's reasons, one per line.
    rules: tuple[str, ...] = ()  # The gate rules that were passed to the function.
    comparison: Mapping[str, Any] = field(default_factory=dict)  # Comparison with the baseline, if any.


@dataclass(frozen=True, kw_only=True)
class Run(Evaluation):
    """A finished run of the whole pipeline on this machine."""

    name: str
    model_uri: str  # Folder of the exported model; the checkpoint if the gate failed; "" if not trained.

    @cached_property
    def model(self) -> "Model":
        """The trained model, loaded."""
        from kubedet import load

        if not self.model_uri:
            fix = "load the current model by its name, or leave out min_new_images"
            raise EvaluationError(f"the run {self.name} did not train a model: there is no new data", fix=fix)
        return load(self.model_uri)


@dataclass(frozen=True)
class ClusterRun:
    """A run of Kubeflow Pipelines."""

    submission: "Submission"
    access: Access
    run_id: str = ""  # Empty if nothing was sent.
    link: str = ""  # Address of the run in the UI.
    status_command: str = ""  # The command that shows its training job, if it has one.

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.submission.name

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The pipeline's parameters that differ from their defaults."""
        return self.submission.parameters

    @property
    def commands(self) -> list[str]:
        """Equivalent command lines of `kubedet` and `kfp`."""
        return self.submission.commands(self.access)


@dataclass(frozen=True)
class Preview:
    """A contact sheet of a data set."""

    file: str
    split: str  # Name of the split, and a description of what is shown.
    images: int
    boxes: int
    unreadable: list[str]  # Images that cannot be read, with the reasons.


@dataclass(frozen=True)
class PublishedModel:
    """A published model."""

    name: str
    current: str  # The version that NAME without a version refers to.
    versions: "Mapping[str, Metadata]"  # Oldest first.
    damaged: Mapping[str, str]  # Versions that cannot be used, with the reasons.
    problem: str = ""  # Why the current version is unknown.
