"""The work of the data steps: fetch the images, write the shards, and return manifests and statistics.

Each function returns what a step publishes: the small manifest, and the metadata shown with it.
"""

from typing import Any

from components import data_versions, occasion, partitions, starting_weights, usage
from components.retention import pruning, uses
from trainer import recipes, storage
from trainer.config import DataConfig
from trainer.data import download as downloading
from trainer.data import shards
from trainer.report.shards_page import page

Published = tuple[dict[str, Any], dict[str, Any]]
"""The manifest of an artifact, and what is shown with it."""


def prepare(
    source: str, recipe: str, overrides: dict[str, Any], data_root: str, version: str, page_path: str,
    trains: bool = False, min_new_images: int = 0, min_drift: float = 0.0,
    prune: int = 0,
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
        min_new_images: see `occasion.Condition`.
        min_drift: likewise.
        prune: how many runs are kept when the data are ready, see `pruning.plan`; 0 keeps all.

    Returns:
        Of the raw images and of the shards; where the run does not pay, both tell that there is nothing new.
    """
    usage.keep(data_root)
    whole = recipes.load_here(recipe, overrides)
    condition = occasion.Condition(min_new_images, min_drift)
    uses.begin(data_root, whole.model.weights)
    try:
        planned = listed(source, data_root, whole.data, version) if condition else None
        if planned and (ended := occasion.nothing_new(planned, data_root, whole, condition)):
            raw: Published = (ended, occasion.shown(ended))
        else:
            if trains:
                starting_weights.secure(recipe, overrides, data_root)
            raw = download([], source, recipe, overrides, data_root, version, planned)
        return raw, shard([], raw[0], recipe, overrides, data_root, page_path, prune)
    except BaseException:
        uses.end(data_root, [])
        raise


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
    usage.keep(data_root)
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
    page_path: str, prune: int = 0,
) -> Published:  # fmt: skip
    """Put together the shards that other pods have written, or write all where there are no parts.

    Args:
        parts: what `partitions.write` returned of each.
        raw: manifest of the raw images.
        recipe: see `prepare`.
        overrides: see `prepare`.
        data_root: see `prepare`.
        page_path: see `prepare`.
        prune: see `prepare`.

    Returns:
        Of the shards.
    """
    usage.keep(data_root)
    if occasion.is_nothing(raw):
        storage.write_bytes(page_path, occasion.page(raw), sync=False)
        uses.end(data_root, [])
        pruning.prune_after(data_root, prune)
        return raw, occasion.shown(raw)
    manifest = (shards.join if parts else shards.shard)(raw, data_root, recipes.load(recipe, overrides).data)
    storage.write_bytes(page_path, page(manifest).encode(), sync=False)
    names = [f"raw/{raw['fingerprint']}", f"shards/{manifest['fingerprint']}"]
    uses.end(data_root, names, recipes.load(recipe, overrides).model.weights)
    pruning.prune_after(data_root, prune)
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
