"""Train object detectors and use them: the commands of `kubedet` as Python functions.

Each function has the parameters of its command; `overrides` is `--set`. Every error that a user can cause is
a `KubedetError`, whose `fix` says what to do.

Examples:
    >>> import kubedet
    >>> model = kubedet.load("runs/first/model")
    >>> detections = model.predict("photo.jpg")
    >>> detections.names, detections.boxes.tolist()
    (['dog'], [[24.0, 12.0, 96.0, 60.0]])
"""

from typing import TYPE_CHECKING, Any

from kubedet.api import (
    cluster_manifests,
    compile,
    data_inspect,
    data_merge,
    data_preview,
    data_prune,
    data_verify,
    doctor,
    evaluate,
    job_exec,
    job_fields,
    job_list,
    job_logs,
    job_render,
    job_status,
    job_stop,
    job_submit,
    job_wait,
    load,
    model_list,
    model_promote,
    model_rollback,
    model_show,
    model_trace,
    model_verify,
    predict,
    recipes_explain,
    recipes_list,
    recipes_show,
    recipes_space,
    run,
    schedule_create,
    schedule_delete,
    schedule_history,
    schedule_list,
    schedule_pause,
    schedule_resume,
    schedule_run,
    serve,
    submit,
    tune,
    weights_fetch,
    weights_list,
)
from kubedet.results import ClusterRun, Evaluation, Run
from pipelines import Access, JobPlace
from pipelines.pipeline_run import PipelineRun
from trainer.base.errors import KubedetError

if TYPE_CHECKING:
    from kubedet.model import Detections, Model

__all__ = [
    "Access", "ClusterRun", "Detections", "Evaluation", "JobPlace", "KubedetError", "Model",
    "PipelineRun", "Run",
    "cluster_manifests", "compile", "data_inspect", "data_merge", "data_preview", "data_prune", "data_verify",
    "doctor", "evaluate", "job_exec", "job_fields", "job_list", "job_logs", "job_render",
    "job_status", "job_stop", "job_submit", "job_wait", "load", "model_list", "model_promote",
    "model_rollback", "model_show", "model_trace", "model_verify", "predict", "recipes_explain",
    "recipes_list", "recipes_show", "recipes_space", "run", "schedule_create", "schedule_delete",
    "schedule_history", "schedule_list", "schedule_pause", "schedule_resume", "schedule_run",
    "serve", "submit", "tune", "weights_fetch", "weights_list",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import the classes that need torch when they are used."""
    if name not in ("Detections", "Model"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kubedet import model

    return getattr(model, name)
