"""The work of the data steps: fetch the images, write the shards, and return manifests and statistics.

Each function returns what a step publishes: the small manifest, and the metadata shown with it.
"""

from typing import Any

from components import data_versions, partitions, starting_weights
from trainer import recipes, storage
from trainer.data import shards
from trainer.report.shards_page import page

Published = tuple[dict[str, Any], dict[str, Any]]
"""The manifest of an artifact, and what is shown with it."""


def prepare(
    source: str, recipe: str, overrides: dict[str, Any], data_root: str, version: str, page_path: str,
    trains: bool = False,
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

    Returns:
        Of the raw images and of the shards.
    """
    if trains:
        starting_weights.secure(recipe, overrides, data_root)
    raw = download([], source, recipe, overrides, data_root, version)
    return raw, shard([], raw[0], recipe, overrides, data_root, page_path)


def download(
    parts: list[str], source: str, recipe: str, overrides: dict[str, Any], data_root: str, version: str
) -> Published:
    """Put together what other pods have fetched, or fetch everything where there are no parts.

    Args:
        parts: what `partitions.fetch` returned of each.
        source: see `prepare`.
        recipe: see `prepare`.
        overrides: see `prepare`.
        data_root: see `prepare`.
        version: see `prepare`.

    Returns:
        Of the raw images.
    """
    manifest = partitions.fetched(
        parts, source, data_root, recipes.load_here(recipe, overrides).data, version
    )
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
