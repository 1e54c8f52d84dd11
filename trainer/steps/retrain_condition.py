"""Decides whether a run trains: only if enough images of its source changed since the current model.

The decision is made after listing the source, before any image is fetched. Changed settings do not count: to
train with another recipe on the same images, omit the condition. Images of a model that the gate rejected do
not count either.
"""

import logging

from trainer import storage
from trainer.base.errors import ConfigError
from trainer.config.schema import Config
from trainer.data.raw_manifest import MANIFEST, RawManifest
from trainer.data.source_names import dataset_name
from trainer.export import published_models
from trainer.steps.manifests import NothingNew
from trainer.steps.records import latest_rejected_run

logger = logging.getLogger(__name__)


def check_min_new_images(min_new_images: int) -> None:
    """Raise ConfigError unless `min_new_images` is at least 0."""
    if min_new_images < 0:
        raise ConfigError(
            f"min_new_images {min_new_images} is less than zero", fix="use 1, or omit it to always train"
        )


def reason_to_skip(
    listed: RawManifest, data_root: str, config: Config, min_new_images: int
) -> NothingNew | None:
    """Return the reason to skip training on a listed source; None if the run trains."""
    from trainer.data import dataset_diff  # Imports numpy, which a client that only checks lacks.

    name = config.export.name or dataset_name(listed.source)
    current = published_models.read_current(data_root, name)
    if current is None:
        logger.info("%s has no current version yet: this run trains", name)
        return None
    references = {f"{name} {current.version}": current.fingerprint}
    # Without this, each nightly run would train again on the images of a rejected model.
    if run := latest_rejected_run(data_root, listed.source):
        references[f"{run.run}, whose model was held back"] = run.fingerprint
    for since, fingerprint in references.items():
        before = _raw_manifest_of(data_root, fingerprint)
        if before is None:
            logger.info("the training data of %s (shards/%s) were deleted", since, fingerprint)
            break
        differences = dataset_diff.compare(listed, before)
        is_other = differences.other_classes or differences.other_exclusions
        if not is_other and differences.image_count < min_new_images:
            too_few = f" (fewer than {min_new_images})" if differences.image_count else ""
            logger.info("nothing new since %s: %s%s", since, differences, too_few)
            return NothingNew(
                data_root=data_root,
                since=since,
                found=f"{differences}{too_few}",
                model=name,
                model_version=current.version,
            )
        logger.info("since %s: %s", since, differences)
    logger.info("this run trains")
    return None


def _raw_manifest_of(data_root: str, shards: str) -> RawManifest | None:
    """Return the raw manifest of shards, given by their fingerprint; None if either was deleted."""
    from trainer.data.raw_folder import read_manifest
    from trainer.data.shard_folder import INDEX, read_index

    uri = storage.join(data_root, "shards", shards)
    if not storage.exists(storage.join(uri, INDEX)):
        return None
    raw = storage.join(data_root, "raw", read_index(uri).raw_fingerprint)
    return read_manifest(raw) if storage.exists(storage.join(raw, MANIFEST)) else None
