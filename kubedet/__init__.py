"""Train object detectors and use them: the commands of `kubedet` as Python functions.

Each function has the parameters of its command; `overrides` is `--set`. Every error that a user can cause is
a `KubedetError`, whose `fix` says how to correct it.

Examples:
    >>> import kubedet
    >>> model = kubedet.load("runs/first/model")
    >>> detections = model.predict("photo.jpg")
    >>> detections.class_names, detections.boxes.tolist()
    (['dog'], [[24.0, 12.0, 96.0, 60.0]])
"""

from typing import TYPE_CHECKING, Any

from kubedet import api
from kubedet.api import *  # noqa: F403 - `kubedet.api.__all__` names them
from kubedet.results import ClusterRun, Evaluation, Run
from pipelines import Access, JobTarget
from pipelines.pipeline_run import CompileOptions, PipelineRun
from trainer.base.errors import KubedetError

if TYPE_CHECKING:
    from kubedet.model import Detections, Model

__all__ = [
    "Access",
    "ClusterRun",
    "CompileOptions",
    "Detections",
    "Evaluation",
    "JobTarget",
    "KubedetError",
    "Model",
]
__all__ += ["PipelineRun", "Run"]
__all__ += api.__all__


def __getattr__(name: str) -> Any:
    """Import the classes that need torch when they are used."""
    if name not in ("Detections", "Model"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kubedet import model

    return getattr(model, name)
