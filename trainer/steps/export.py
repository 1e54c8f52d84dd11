"""The step `export`: export the model for serving, and publish it as a version."""

from trainer import storage
from trainer.config import parsing
from trainer.export import bundle, published_models
from trainer.export import export as exporting
from trainer.steps.manifests import Bundle, TrainedModel
from trainer.steps.records import PublishedRecord, utc_timestamp


def export(model: TrainedModel, *, signing_key: str = "", registry: str = "") -> Bundle:
    """Export the best checkpoint into the run folder, and make it the current version of its model.

    Versions are stored in `<data root>/models/NAME`. `signing_key` is the path of a PEM file (default:
    $KUBEDET_SIGNING_KEY); `registry` is the URL of the Kubeflow Model Registry to register it in, or empty.
    """
    config = parsing.read(model.config)
    name = published_models.resolve_name(config.export.name, model.shards)
    folder = storage.join(model.output, "model")
    exporting.export(
        model.checkpoint,
        model.shards,
        folder,
        config,
        evaluation_uri=model.evaluation,
        signing_key=signing_key,
    )
    other_classes = config.export.other_classes
    published = published_models.publish(folder, model.data_root, name, other_classes=other_classes)
    PublishedRecord(name, published.version, model.run, registry, utc_timestamp()).write(model.data_root)
    metadata = bundle.load(folder).metadata
    return Bundle(
        data_root=model.data_root,
        model=published.model,
        name=metadata.name,
        model_version=metadata.model_version,
        formats=list(metadata.formats),
        metrics=metadata.metrics.values,
        gate=metadata.metrics.gate,
    )
