"""The work of the export step: export the model, publish it as a version, and register it."""

from contextlib import suppress
from typing import Any

from components import hooks, records, usage
from components.scoring import NOT_THERE
from components.signing_secret import SIGNING, mounted_key
from trainer import storage
from trainer.base.errors import KubedetError
from trainer.config import parsing
from trainer.evaluation.baseline import SUMMARY
from trainer.export import published_models
from trainer.export.export import export


def export_and_publish(
    trained: dict[str, Any], signing: str = SIGNING, registry: str = "", run_id: str = ""
) -> dict[str, Any]:
    """Export a trained model into its run's folder, make it the current version of its name, register it.

    Versions lie in `<data_root>/models/NAME`; the data root is that of the shards.

    Args:
        trained: manifest of the trained model.
        signing: Secret with the key that signs it, see `signing_secret.mounted_key`.
        registry: URL of a Kubeflow Model Registry that is told of it; empty is none. A version that is
            registered stays as it is.
        run_id: the run's id.

    Returns:
        The manifest of the exported model: what `trainer.export.export` returns, `model` being the
        published version, and `used` what the run has used, as it is shown.

    Raises:
        ConfigError: export.name cannot be used, said before any work; or the model of this name has
            other classes.
        KubedetError: as `export`, `published_models.publish` and `register_model` raise them.
    """
    # The shards are <data_root>/shards/<fingerprint>.
    data_root = storage.parent(storage.parent(trained["shards"]))
    usage.keep(data_root, processes=1)
    signing_key = mounted_key(signing)
    settings = parsing.read(trained["config"])
    name = published_models.name_for(settings.export.name, trained["shards"])
    folder = storage.join(trained["output"], "model")
    evaluation = storage.join(trained["output"], "evaluation")
    exported = export(
        trained["checkpoint"], trained["shards"], folder, settings,
        evaluation_uri=evaluation, signing_key=signing_key,
    )  # fmt: skip
    published = published_models.publish(folder, data_root, name, other_classes=settings.export.other_classes)
    exported = {"kind": "exported model", "version": 1, **exported, "model": published["model"]}
    records.published(data_root, name, published["version"], trained["output"], registry)
    if registry:
        from components.model_registry import register_model

        register_model(exported, registry, run_id)
    outcome = _outcome(exported, trained["output"])
    end = hooks.End("export", outcome=outcome, folder=trained["output"], data_root=data_root)
    return exported | {"used": hooks.at_end(end)}


def _outcome(exported: dict[str, Any], output: str) -> hooks.Outcome:
    """Return what has become of a run whose model is published."""
    reason, metrics = "", {}
    with suppress(KubedetError):  # The model counts, not what is told of it.
        folder = storage.join(output, "evaluation")
        metrics = storage.read_json(storage.join(folder, SUMMARY))["metrics"]
        reason = storage.read_json(storage.join(folder, "gate.json"))["reason"]
    shown = {name: value for name, value in metrics.items() if value != NOT_THERE}
    model = (exported["name"], exported["model_version"])
    return hooks.Outcome(hooks.PASSED, records.name_of(output), reason, *model, shown)
