"""Whether a run pays: whether its source holds enough that the current model was not trained on.

It is asked when the source has been listed and before any image is fetched. What the settings are does not
count: who wants another recipe tried on the same images asks for a run without `min_new_images`. Images on
which a model was trained that the gate refused are not new either.
"""

import logging
from typing import Any

from components import lineage
from trainer import storage
from trainer.config import Config
from trainer.data import forgotten, seen
from trainer.data.sources.set_names import name_of
from trainer.errors import ConfigError
from trainer.export import published_models

logger = logging.getLogger(__name__)

TRAIN = "train"
"""What a step of the data returns where a training follows."""

NOTHING_NEW = "nothing new"
"""What it returns where the run ends; its manifest's kind too."""

SINCE = "since"
"""Key of the version, in the manifest of nothing new."""


def nothing_new(
    planned: dict[str, Any], data_root: str, config: Config, min_new_images: int
) -> dict[str, Any] | None:
    """Return the manifest of nothing new, or None where the run pays.

    Args:
        planned: what `download.plan` returned, or a raw manifest.
        data_root: URI under which data are kept.
        config: export.name is used.
        min_new_images: how many images must be new, changed or removed; 0: a run always pays.

    Raises:
        ConfigError: min_new_images is less than zero.
        StorageError: the data root cannot be read.
    """
    check(min_new_images)
    if not min_new_images:
        return None
    name = config.export.name or name_of(planned["source"])
    current = published_models.current(data_root, name)
    if current is None:
        logger.info("no version of %s is current yet: this run trains", name)
        return None
    since = f"{name} {current['version']}"
    uri = seen.place(data_root, current["fingerprint"])
    if not storage.exists(uri):
        logger.info("what %s was trained on is not known (%s is not there): this run trains", since, uri)
        return None
    differences = seen.news(planned, uri, forgotten.names(data_root, planned["source"]))
    if _pays(differences, min_new_images):
        must_go = f", {differences.forgotten} of them to be forgotten" if differences.forgotten else ""
        logger.info("since %s: %s%s", since, differences, must_go)
        tried = _since_held_back(planned, data_root)
        if tried is None or _pays(tried[1], min_new_images):
            logger.info("this run trains")
            return None
        since, differences = tried
    few = f" (fewer than {min_new_images})" if differences.images else ""
    logger.info("%s since %s%s: %s", NOTHING_NEW, since, few, differences)
    ended = {"kind": NOTHING_NEW, "version": 1, SINCE: since, "found": str(differences)}
    return ended | {"uri": "", "fingerprint": ""}


def _pays(differences: seen.News, min_new_images: int) -> bool:
    return bool(differences.images >= min_new_images or differences.other_classes or differences.forgotten)


def _since_held_back(planned: dict[str, Any], data_root: str) -> tuple[str, seen.News] | None:
    """Return the last run of the source, and what is new since, if the gate held its model back.

    Else every night would train on the same images what was refused the night before.
    """
    run = lineage.held_back(data_root, planned["source"])
    if run is None:
        return None
    uri = seen.place(data_root, run["shards"].rpartition("/")[2])
    if not storage.exists(uri):
        return None
    names = forgotten.names(data_root, planned["source"])
    return f"{run['run']}, whose model was held back", seen.news(planned, uri, names)


def check(min_new_images: int) -> None:
    """Refuse a number of images that cannot be.

    Raises:
        ConfigError: saying what it may be.
    """
    if min_new_images < 0:
        raise ConfigError(
            f"min_new_images {min_new_images} is less than zero", fix="use 1, or leave it out to train always"
        )


def is_nothing(manifest: dict[str, Any]) -> bool:
    """Whether a manifest tells that the run ends."""
    return manifest.get("kind") == NOTHING_NEW


def word(manifest: dict[str, Any]) -> str:
    """Return what a step with this manifest returns, for the pipeline to branch on."""
    return NOTHING_NEW if is_nothing(manifest) else TRAIN


def shown(manifest: dict[str, Any]) -> dict[str, str]:
    """Return what is shown with the manifest of nothing new."""
    return {"verdict": f"{NOTHING_NEW} since {manifest[SINCE]}", "found": manifest["found"]}


def page(manifest: dict[str, Any]) -> bytes:
    """Return it as a page."""
    import html

    texts = [html.escape(text) for text in shown(manifest).values()]
    return f"<!doctype html><meta charset=utf-8><h1>{texts[0]}</h1><p>{texts[1]}</p>\n".encode()
