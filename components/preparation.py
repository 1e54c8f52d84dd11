"""What the steps of the data do: bring the images, write the shards, and say what came of it.

Each function returns plain values, which a step publishes: the manifest, small, and what people see with it.
"""

from typing import Any

from components import partitions, versions
from trainer import recipes, storage
from trainer.data import shards
from trainer.report.shards_page import page

Published = tuple[dict[str, Any], dict[str, Any]]
"""The manifest of an artifact, and what is shown with it."""


def prepare(
    source: str, recipe: str, overrides: dict[str, Any], data_root: str, version: str, page_path: str
) -> tuple[Published, Published]:
    """Bring a source's images and annotations under the data root, and write them as shards.

    Args:
        source: `sample`, `coco:PATH`, `voc:PATH` or a URI.
        recipe: name of a recipe; its `data` section counts here.
        overrides: dotted configuration keys and their values.
        data_root: see `trainer.data.download.download`.
        version: name for the data as they are now, or a known one; empty is none.
        page_path: local file that receives the statistics, as a page.

    Returns:
        Of the raw images and of the shards.
    """
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
    made = partitions.fetched(parts, source, data_root, recipes.load(recipe, overrides).data, version)
    counts = {f"{split}_{key}": n for split, of in made["splits"].items() for key, n in of.items()}
    return made, _place(made) | {"source": source} | counts | versions.label(made)


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
    made = (shards.join if parts else shards.shard)(raw, data_root, recipes.load(recipe, overrides).data)
    storage.write_bytes(page_path, page(made).encode(), sync=False)
    counts = {f"{s}_{key}": of[key] for s, of in made["splits"].items() for key in ("samples", "boxes")}
    shown = counts | versions.label(raw)
    small = {key: made[key] for key in ("kind", "version", "uri", "fingerprint", "categories")}
    return small | shown, _place(made) | shown


def _place(made: dict[str, Any]) -> dict[str, Any]:
    return {"uri": made["uri"], "fingerprint": made["fingerprint"]}
