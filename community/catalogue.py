"""What the community's catalogue says of each step and its code does not."""

from dataclasses import dataclass

from pipelines.kubeflow import OLDEST

GROUP = "kubedet"
"""The folder below each category that holds our components: a subcategory, with owners of its own."""

IMAGE = f"ghcr.io/kubeflow/pipelines-components-{GROUP}:main"
"""What the community's builder makes of our Containerfile; its checks allow images of that registry alone."""

EXTRAS = "pipeline,signing,registry,mlflow,wandb,detr,lineage,tune"
"""What the steps need of kubedet, as in `images/component.Dockerfile`."""

STABILITY = "alpha"
"""As that repository calls a component without a record of use by others."""

_PIPELINES = ("Pipelines", f">={OLDEST[0]}.{OLDEST[1]}.0")
_TRAINER = ("Trainer", ">=2.3.0")


@dataclass(frozen=True)
class Entry:
    """One component."""

    category: str
    """Folder of the catalogue."""
    tags: tuple[str, ...]
    """Words to find it by."""
    kubeflow: tuple[tuple[str, str], ...] = (_PIPELINES,)
    """Parts of Kubeflow that it needs, with their versions."""


_DATA = "data_processing"

ENTRIES = {
    "prepare": Entry(_DATA, ("object_detection", "dataset_preparation", "coco", "open_images")),
    "assist": Entry(_DATA, ("object_detection", "dataset_preparation", "parallel", "webdataset")),
    "train": Entry("training", ("object_detection", "pytorch", "distributed"), (_PIPELINES, _TRAINER)),
    "cleanup": Entry("training", ("object_detection", "exit_handler"), (_PIPELINES, _TRAINER)),
    "trial": Entry("training", ("object_detection", "pytorch", "hyper_parameters", "optuna")),
    "best": Entry("training", ("object_detection", "hyper_parameters", "optuna", "report")),
    "evaluate": Entry("evaluation", ("object_detection", "coco_metrics", "report", "gate")),
    "export": Entry("deployment", ("object_detection", "onnx", "model_registry", "signing")),
}
"""Each component of the pipeline by its name."""
