"""The work of the data steps: fetch the images, write the shards, and return manifests and statistics.

Each function returns what a step publishes: the small manifest, and the metadata shown with it.
"""

from typing import Any

from components import data_versions, occasion, partitions, starting_weights
from trainer import recipes, storage
from trainer.config import DataConfig
from trainer.data import download as downloading
from trainer.data import shards
from trainer.report.shards_page import page

Published = tuple[dict[str, Any], dict[str, Any]]
"""The manifest of an artifact, and what is shown with it."""


def prepare(
    source: str, recipe: str, overrides: dict[str, Any], data_root: str, version: str, page_path: str,
    trains: bool = False, min_new_images: int = 0,
) -> tuple[Published, Published]:  # fmt: skip
    """Bring a source's images and annotations under the data root, and write them as shards.

    Args:
        source: `sample`, `coco:PATH`, `voc:PATH` or a URI.
        recipe: name of a recipe; its `data` section counts here.
        overrides: dotted configuration keys and their values.
        data_root: see `trainer.data.download.download`.
        version: name for the data as they are now, or a known one; empty is none.
        page_path: local file that receives the statistics, as a page.
        trains: whether a training follows: its pretrained weights are then fetched first.
        min_new_images: see `occasion.nothing_new`.

    Returns:
        Of the raw images and of the shards; where the run does not pay, both tell that there is nothing new.
    """
    whole = recipes.load_here(recipe, overrides)
    planned = None
    if min_new_images:
        planned = listed(source, data_root, whole.data, version)
        ended = occasion.nothing_new(planned, data_root, whole, min_new_images)
        if ended:
            storage.write_bytes(page_path, occasion.page(ended), sync=False)
            return (ended, occasion.shown(ended)), (ended, occasion.shown(ended))
    if trains:
        starting_weights.secure(recipe, overrides, data_root)
    raw = download([], source, recipe, overrides, data_root, version, planned)
    return raw, shard([], raw[0], recipe, overrides, data_root, page_path)


def listed(source: str, data_root: str, config: DataConfig, version: str) -> dict[str, Any]:
    """Return what a source holds now, or the raw manifest of a known version; no image is fetched.

    Raises:
        ConfigError: the version cannot be a name.
        DataError: the source cannot be used.
        StorageError: the data root cannot be read or written.
    """
    known = data_versions.known(source, data_root, config, version)
    return known or downloading.plan(source, data_root, config)


def download(
    parts: list[str], source: str, recipe: str, overrides: dict[str, Any], data_root: str, version: str,
    planned: dict[str, Any] | None = None,
) -> Published:  # fmt: skip
    """Put together what other pods have fetched, or fetch everything where there are no parts.

    Args:
        parts: what `partitions.fetch` returned of each.
        source: see `prepare`.
        recipe: see `prepare`.
        overrides: see `prepare`.
        data_root: see `prepare`.
        version: see `prepare`.
        planned: what the source holds, where it has been listed already.

    Returns:
        Of the raw images.
    """
    if ended := partitions.ended(parts):
        return ended, occasion.shown(ended)
    config = recipes.load_here(recipe, overrides).data
    manifest = partitions.fetched(parts, source, data_root, config, version, planned)
    counts = {
        f"{split}_{key}": n
        for split, split_counts in manifest["splits"].items()
        for key, n in split_counts.items()
    }
    return manifest, _place(manifest) | {"source": source} | counts | data_versions.label(manifest)


def shard(
    parts: list[str], raw: dict[str, Any], recipe: str, overrides: dict[str, Any], data_root: str,
    page_path: str,
) -> Published:  # fmt: skip
    """Put together the shards that other pods have written, or write all where there are no parts.

    Args:
        parts: what `partitions.write` returned of each.
        raw: manifest of the raw images.
        recipe: see `prepare`.
        overrides: see `prepare`.
        data_root: see `prepare`.
        page_path: see `prepare`.

    Returns:
        Of the shards.
    """
    if occasion.is_nothing(raw):
        storage.write_bytes(page_path, occasion.page(raw), sync=False)
        return raw, occasion.shown(raw)
    manifest = (shards.join if parts else shards.shard)(raw, data_root, recipes.load(recipe, overrides).data)
    storage.write_bytes(page_path, page(manifest).encode(), sync=False)
    counts = {
        f"{split}_{key}": split_counts[key]
        for split, split_counts in manifest["splits"].items()
        for key in ("samples", "boxes")
    }
    shown = counts | data_versions.label(raw)
    small = {key: manifest[key] for key in ("kind", "version", "uri", "fingerprint", "categories")}
    return small | shown, _place(manifest) | shown


def _place(manifest: dict[str, Any]) -> dict[str, Any]:
    return {"uri": manifest["uri"], "fingerprint": manifest["fingerprint"]}
