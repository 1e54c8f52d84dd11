"""The work of the step `prepare`: fetch the images, write the shards, return manifests and statistics."""

import html
from dataclasses import asdict
from typing import Any

from components import data_versions, hooks, starting_weights, steps
from trainer import storage
from trainer.config.schema import Config
from trainer.config.types import Overrides
from trainer.data import download, shards
from trainer.data.raw_folder import RawManifest
from trainer.launching.shared_work import SharedWork
from trainer.model import recipes
from trainer.report.shards_page import page

Published = tuple[dict[str, Any], dict[str, Any]]
"""The manifest of an artifact, which is small, and what is shown with it."""


def prepare(
    source: str,
    recipe: str,
    overrides: Overrides,
    data_root: str,
    version: str,
    page_path: str,
    trains: bool = False,
    min_new_images: int = 0,
    prune: int = 0,
) -> tuple[Published, Published]:
    """Fetch a source's images and annotations into the data root, and write them as shards.

    `version` is a name for the present data or a known one, or empty. `page_path` is a local file that
    receives the statistics. If `trains`, the pretrained weights are fetched first. The run ends without
    training if fewer than `min_new_images` differ: both results then say so. `prune` is how many runs are
    kept at the end; 0 keeps all.
    """
    config = recipes.load_here(recipe, overrides)
    planned = None
    if min_new_images:  # Fetches no image.
        planned = data_versions.known(source, data_root, config.data, version)
        planned = planned or download.plan(source, data_root, config.data)
    listing = planned and hooks.Listing(planned, data_root, config, min_new_images)
    if listing and (ended := hooks.before_training(listing)):
        shown = {"verdict": f"{hooks.NOTHING_NEW} since {ended.since}", "found": ended.found}
        verdict, found = (html.escape(text) for text in shown.values())
        text = f"<!doctype html><meta charset=utf-8><h1>{verdict}</h1><p>{found}</p>\n"
        storage.write_bytes(page_path, text.encode(), sync=False)
        # Instead of the manifests of data.
        empty = {"kind": hooks.NOTHING_NEW, "version": 1, "uri": "", "fingerprint": ""}
        of_raw = of_shards = (empty | asdict(ended), shown)
        steps.record(f"{hooks.NOTHING_NEW}\nsince {ended.since}: {ended.found}")
    else:
        if trains:
            starting_weights.secure(recipe, overrides, data_root)
        of_raw, of_shards = _make(source, data_root, config, version, planned, page_path)
    hooks.at_end(hooks.StepEnd("prepare", data_root=data_root, keep_runs=prune))
    return of_raw, of_shards


def _make(
    source: str,
    data_root: str,
    config: Config,
    version: str,
    planned: RawManifest | None,
    page_path: str,
) -> tuple[Published, Published]:
    """Fetch the images, and write the shards and their page."""

    def fetch() -> RawManifest:
        is_plan = planned and planned.kind == "plan"
        plan = planned if planned and is_plan else download.plan(source, data_root, config.data)
        return download.fetch(plan, config.data, SharedWork())

    raw = data_versions.fetch(source, data_root, config.data, version, fetch)
    index = shards.shard(raw, data_root, config.data)
    storage.write_bytes(page_path, page(index).encode(), sync=False)
    manifest, record = raw.to_json(), index.to_json()
    label = data_versions.label(manifest)
    raw_shown: dict[str, object] = {"uri": raw.uri, "fingerprint": raw.fingerprint, "source": source}
    for split, counts in raw.splits.items():
        raw_shown |= {f"{split}_{key}": number for key, number in vars(counts).items()}
    shown: dict[str, object] = {"uri": index.uri, "fingerprint": index.fingerprint}
    for name, written in index.splits.items():
        shown |= {f"{name}_samples": written.samples, f"{name}_boxes": written.boxes}
    shown |= label
    of_shards = {key: record[key] for key in ("kind", "version", "categories")} | shown
    return (manifest, raw_shown | label), (of_shards, shown)
