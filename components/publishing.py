"""What the export step does besides exporting: publish the model as a version of its name."""

from typing import Any

from trainer import configuration, storage
from trainer.export import models
from trainer.export.export import export


def export_and_publish(trained: dict[str, Any], signing_key: str = "") -> dict[str, Any]:
    """Export a trained model into its run's folder, then make it the current version of its name.

    Versions lie in `<data_root>/models/NAME`; the data root is that of the shards.

    Args:
        trained: manifest of the trained model.
        signing_key: path of the PEM file that signs it; see `trainer.export.export`.

    Returns:
        The manifest of the exported model: what `trainer.export.export` returns, `model` being the
        published version.

    Raises:
        ConfigError: export.name cannot be used; said before any work.
        KubedetError: as `export` and `models.publish` raise them.
    """
    settings = configuration.from_json(storage.read_bytes(trained["config"]), where=trained["config"])
    models.check_name(settings.export.name)
    folder = storage.join(trained["output"], "model")
    evaluation = storage.join(trained["output"], "evaluation")
    made = export(
        trained["checkpoint"], trained["shards"], folder, settings,
        evaluation_uri=evaluation, signing_key=signing_key,
    )  # fmt: skip
    # The shards are <data_root>/shards/<fingerprint>.
    data_root = storage.parent(storage.parent(trained["shards"]))
    published = models.publish(folder, data_root, settings.export.name)
    return {"kind": "exported model", "version": 1, **made, "model": published["model"]}
