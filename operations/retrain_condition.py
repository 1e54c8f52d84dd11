"""The condition of a run: whether its source has enough images that the current model was not trained on.

It is checked when the source has been listed and before any image is fetched. Other settings do not count as
new: a run with another recipe on the same images needs a run without a condition. Images of a model that the
gate refused are not new either.
"""

import logging
from typing import TYPE_CHECKING, Any

from components import environment
from components.hooks import NOTHING_NEW, Listing, NothingNew, Outcome
from components.records import NothingNewRecord, now
from operations import lineage, notifications
from trainer import storage
from trainer.base.errors import ConfigError
from trainer.data.source_names import name_of
from trainer.export import published_models

if TYPE_CHECKING:
    from trainer.data.raw_folder import RawManifest

logger = logging.getLogger(__name__)


def check(min_new_images: int) -> None:
    """Raise ConfigError unless `min_new_images` is at least 0."""
    if min_new_images < 0:
        raise ConfigError(
            f"min_new_images {min_new_images} is less than zero", fix="use 1, or omit it to train always"
        )


def skip_reason(listing: Listing) -> NothingNew | None:
    """Return why nothing is new, which is recorded and sent to the webhook once; None if the run trains."""
    from trainer.data import dataset_diff

    check(listing.min_new_images)
    if not listing.min_new_images:
        return None
    planned, data_root = listing.planned, listing.data_root
    name = listing.config.export.name or name_of(planned.source)
    current = published_models.current(data_root, name)
    if current is None:
        logger.info("%s has no current version yet: this run trains", name)
        return None
    references = {f"{name} {current.version}": current.fingerprint}
    # Otherwise every night would train on the images of a model that was refused the night before.
    if run := lineage.held_back(data_root, planned.source):
        references[f"{run.run}, whose model was held back"] = run.fingerprint
    for since, fingerprint in references.items():
        before = _raw_of(data_root, fingerprint)
        if before is None:
            logger.info("the training data of %s (shards/%s) were deleted", since, fingerprint)
            break
        differences = dataset_diff.compare(planned, before)
        is_other = differences.other_classes or differences.other_exclusions
        if not is_other and differences.images < listing.min_new_images:
            too_few = f" (fewer than {listing.min_new_images})" if differences.images else ""
            found = NothingNew(since, f"{differences}{too_few}")
            reason = f"{NOTHING_NEW} since {since}: {found.found}"
            logger.info("%s", reason)
            record = NothingNewRecord(environment.run_id(), since, found.found, now())
            place = NothingNewRecord.place(data_root, record.run_id)
            if not record.run_id or storage.create(place, record.encoded()):
                notifications.tell(Outcome(NOTHING_NEW, record.run_id, reason, name, current.version))
            return found
        logger.info("since %s: %s", since, differences)
    logger.info("this run trains")
    return None


def _raw_of(data_root: str, shards: str) -> "RawManifest | None":
    """Return the raw tables of shards, given by their fingerprint; None if they were deleted."""
    from trainer.data.raw_folder import MANIFEST, read_manifest
    from trainer.data.shard_folder import INDEX, read_index

    uri = storage.join(data_root, "shards", shards)
    if not storage.exists(storage.join(uri, INDEX)):
        return None
    raw = storage.join(data_root, "raw", read_index(uri).raw_fingerprint)
    return read_manifest(raw) if storage.exists(storage.join(raw, MANIFEST)) else None


def drop_empty_condition(values: dict[str, Any]) -> None:
    """Remove an empty condition from a pipeline's parameters: only conditional pipelines have it."""
    if not values["min_new_images"]:
        del values["min_new_images"]
