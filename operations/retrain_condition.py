"""Whether a run pays: whether its source holds enough that the current model was not trained on.

It is asked when the source has been listed and before any image is fetched. What the settings are does not
count: who wants another recipe tried on the same images asks for a run without a condition. Images on which
a model was trained that the gate refused are not new either.
"""

import logging
import math
from dataclasses import dataclass
from typing import Any

from components import environment
from components.hooks import NOTHING_NEW, NothingNew, Outcome
from components.records import NothingNewRecord, now
from operations import lineage, notifications
from trainer import storage
from trainer.base.errors import ConfigError
from trainer.config.schema import Config
from trainer.data import exclusions, raw_folder, training_record
from trainer.data.raw_folder import RawManifest
from trainer.data.sources import name_of
from trainer.data.training_record import DatasetDiff
from trainer.export import published_models

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Condition:
    """When a run pays. Other classes, and an image that must be forgotten, always make it pay."""

    min_new_images: int = 0
    """How many images must be new, changed or removed; 0: a run always pays."""
    min_drift: float = 0.0
    """How far the annotations must have moved besides, 0 to 1: the largest distance of classes, boxes in an
    image and sizes. 0: it does not matter."""

    def __bool__(self) -> bool:
        """Whether there is a condition at all."""
        return self.min_new_images != 0

    def check(self) -> None:
        """Refuse numbers that cannot be.

        Raises:
            ConfigError: saying what they may be.
        """
        if self.min_new_images < 0:
            raise ConfigError(
                f"min_new_images {self.min_new_images} is less than zero",
                fix="use 1, or leave it out to train always",
            )
        if not 0 <= self.min_drift <= 1:
            raise ConfigError(
                f"min_drift {self.min_drift:g} is not from 0 to 1", fix="use 0.1, or leave it out"
            )


def nothing_new(
    planned: RawManifest, data_root: str, config: Config, condition: Condition
) -> NothingNew | None:
    """Return why nothing is new, or None if the run pays.

    That there is nothing new is noted in the lineage, and told to the webhook, once for each run.

    Args:
        planned: what `download.plan` returned, or a raw manifest.
        data_root: URI under which data are kept.
        config: export.name is used.
        condition: when it pays.

    Raises:
        ConfigError: the condition cannot be.
        StorageError: the data root cannot be read or written.
    """
    condition.check()
    if not condition:
        return None
    name = config.export.name or name_of(planned.source)
    current = published_models.current(data_root, name)
    if current is None:
        logger.info("no version of %s is current yet: this run trains", name)
        return None
    since = f"{name} {current.version}"
    uri = training_record.place(data_root, current.fingerprint)
    if not storage.exists(uri):
        logger.info("what %s was trained on is not known (%s is not there): this run trains", since, uri)
        return None
    excluded = exclusions.names(data_root, planned.source)
    differences = training_record.diff(planned, uri, excluded)
    too_little = _too_little(planned, uri, differences, condition)
    if too_little is None:
        must_go = f", {differences.excluded} of them to be forgotten" if differences.excluded else ""
        logger.info("since %s: %s%s", since, differences, must_go)
        # Else every night would train on the same images what was refused the night before.
        if run := lineage.held_back(data_root, planned.source):
            uri = training_record.place(data_root, run.fingerprint)
            if storage.exists(uri):
                since, differences = (
                    f"{run.run}, whose model was held back",
                    training_record.diff(planned, uri, excluded),
                )
                too_little = _too_little(planned, uri, differences, condition)
    if too_little is None:
        logger.info("this run trains")
        return None
    found = f"{differences}{too_little}"
    logger.info("%s since %s: %s", NOTHING_NEW, since, found)
    run_id = environment.run_id()
    record = NothingNewRecord(run_id, since, found, now())
    if not run_id or storage.create(NothingNewRecord.place(data_root, run_id), record.encoded()):
        reason = f"{NOTHING_NEW} since {since}: {found}"
        notifications.tell(Outcome(NOTHING_NEW, run_id, reason, name, current.version))
    return NothingNew(since, found)


def _too_little(planned: RawManifest, uri: str, differences: DatasetDiff, condition: Condition) -> str | None:
    """Return why what is new since `uri` was seen is too little, in brackets; None if it is enough."""
    if differences.other_classes or differences.excluded:
        return None
    if differences.images < condition.min_new_images:
        return f" (fewer than {condition.min_new_images})" if differences.images else ""
    drift = _drift(planned, uri) if condition.min_drift else math.inf
    few = f" (moved by {drift:.3f}, less than {condition.min_drift:g})"
    return few if drift < condition.min_drift else None


def _drift(planned: RawManifest, uri: str) -> float:
    """Return how far the annotations of a source have moved since, 0 to 1; infinity if unknown."""
    root = storage.parent(storage.parent(uri))
    before = storage.join(root, "raw", training_record.header(uri).raw)
    if not storage.exists(storage.join(before, raw_folder.PLAN)):
        logger.warning("%s is gone: how far the data have moved since is not known", before)
        return math.inf
    from operations import drift  # Its torch is more than the process of a step that waits needs.

    return max(drift.compare_listings(raw_folder.read_plan(before), planned).values())


def of_form(values: dict[str, Any]) -> None:
    """Take the condition out of a pipeline's parameters where there is none: a form of its own has it."""
    if values["min_drift"]:
        values["min_new_images"] = values["min_new_images"] or 1
    if not values["min_new_images"]:
        del values["min_new_images"], values["min_drift"]
