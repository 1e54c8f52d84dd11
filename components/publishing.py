"""The work of the export step: export the model, publish it as a version, and register it."""

from contextlib import suppress
from typing import Any

from components import hooks, steps
from components.environment import SIGNING_NAME, signing_key
from components.records import PublishedRecord, name_of, now
from components.scoring import MISSING_METRIC
from trainer import storage
from trainer.base.errors import KubedetError
from trainer.config import parsing
from trainer.data.shard_index import data_root_of
from trainer.evaluation.metrics import SUMMARY
from trainer.export import published_models
from trainer.export.export import export


def export_and_publish(
    trained: dict[str, Any], signing: str = SIGNING_NAME, registry: str = "", run_id: str = ""
) -> dict[str, Any]:
    """Export a trained model into its run's folder, make it the current version of its name, register it.

    Versions are stored in `<data_root>/models/NAME`; the data root is that of the shards. `signing` is the
    name of a Secret, see `environment.signing_key`; `registry` a Kubeflow Model Registry's URL, or empty.
    Returns the manifest of `trainer.export.export`, with the published `model`.
    """
    output, data_root = trained["output"], data_root_of(trained["shards"])
    key = signing_key(signing)
    settings = parsing.read(trained["config"])
    name = published_models.name_for(settings.export.name, trained["shards"])
    folder, evaluation = storage.join(output, "model"), storage.join(output, "evaluation")
    exported = export(
        trained["checkpoint"],
        trained["shards"],
        folder,
        settings,
        evaluation_uri=evaluation,
        signing_key=key,
    )
    published = published_models.publish(folder, data_root, name, other_classes=settings.export.other_classes)
    exported = {"kind": "exported model", "version": 1, **exported, "model": published.model}
    PublishedRecord(name, published.version, name_of(output), registry, now()).write(data_root)
    if registry:
        from components.model_registry import register_model

        register_model(published.model, registry, run_id)
    reason, metrics = "", {}
    with suppress(KubedetError):  # The model is published; these are only for the notice.
        metrics = storage.read_json(storage.join(evaluation, SUMMARY))["metrics"]
        reason = storage.read_json(storage.join(evaluation, "gate.json"))["reason"]
    shown = {metric: value for metric, value in metrics.items() if value != MISSING_METRIC}
    version = exported["model_version"]
    outcome = hooks.Outcome(hooks.PASSED, name_of(output), reason, exported["name"], version, shown)
    hooks.at_end(hooks.StepEnd("export", outcome, output))
    steps.record(f"{outcome.event}\n{reason}")
    return exported
