"""The work of the step `prepare`: fetch the images, write the shards, return manifests and statistics."""

import html
from typing import Any

from components import data_versions, hooks, in_use, sharing, starting_weights, usage
from trainer import storage
from trainer.config.schema import Config, DataConfig
from trainer.config.types import Overrides
from trainer.data import download, shards
from trainer.data.raw_folder import RawManifest
from trainer.model import recipes
from trainer.report.shards_page import page

Published = tuple[dict[str, Any], dict[str, Any]]
"""The manifest of an artifact, which is small, and what is shown with it."""


def prepare(
    source: str, recipe: str, overrides: Overrides, data_root: str, version: str, page_path: str,
    trains: bool = False, min_new_images: int = 0, min_drift: float = 0.0,
    prune: int = 0, partitions: int = 1,
) -> tuple[Published, Published]:  # fmt: skip
    """Fetch a source's images and annotations into the data root, and write them as shards.

    `version` is a name for the present data or a known one, or empty. `page_path` is a local file that
    receives the statistics. If `trains`, the pretrained weights are fetched first. The run ends without
    training if fewer than `min_new_images` differ, or if the annotations moved less than `min_drift` (0 to
    1). `prune` is how many runs are kept at the end; 0 keeps all. `partitions` pods share the work.

    Returns:
        Of the raw images and of the shards; if the run ends here, both say that there is nothing new.
    """
    sharing.check(partitions)
    usage.keep(data_root)
    config = recipes.load_here(recipe, overrides)
    in_use.begin(data_root, config.model.weights)
    try:
        with sharing.lead(data_root, config.data, partitions) as team:
            planned = listed(source, data_root, config.data, version) if min_new_images else None
            listing = planned and hooks.Listing(planned, data_root, config, min_new_images, min_drift)
            if listing and (ended := hooks.before_training(listing)):
                verdict, found = (html.escape(text) for text in ended.shown().values())
                text = f"<!doctype html><meta charset=utf-8><h1>{verdict}</h1><p>{found}</p>\n"
                storage.write_bytes(page_path, text.encode(), sync=False)
                in_use.end(data_root, [])
                of_raw = of_shards = (ended.manifest(), ended.shown())
            else:
                if trains:
                    starting_weights.secure(recipe, overrides, data_root)
                raw = _fetch(team, source, data_root, config.data, version, planned)
                of_raw = raw.to_json(), _raw_shown(raw, source)
                of_shards = _write(team, raw, data_root, config, page_path)
        hooks.at_end(hooks.End("prepare", data_root=data_root, keep_runs=prune))
        return of_raw, of_shards
    except BaseException:
        in_use.end(data_root, [])
        raise


def listed(source: str, data_root: str, config: DataConfig, version: str) -> RawManifest:
    """Return the present content of a source, or the raw manifest of a known version; fetches no image."""
    known = data_versions.known(source, data_root, config, version)
    return known or download.plan(source, data_root, config)


def _fetch(
    team: sharing.Team, source: str, data_root: str, config: DataConfig, version: str,
    planned: RawManifest | None,
) -> RawManifest:  # fmt: skip
    def fetch_raw() -> RawManifest:
        plan = planned if planned and planned.kind == "plan" else download.plan(source, data_root, config)
        manifest = download.finished(plan, config)
        return manifest or download.join(plan, config, team.do(sharing.FETCH, plan))

    return data_versions.fetch(source, data_root, config, version, fetch_raw)


def _raw_shown(raw: RawManifest, source: str) -> dict[str, Any]:
    counts = {f"{split}_{key}": n for split, of in raw.splits.items() for key, n in vars(of).items()}
    place = {"uri": raw.uri, "fingerprint": raw.fingerprint, "source": source}
    return place | counts | data_versions.label(raw.to_json())


def _write(team: sharing.Team, raw: RawManifest, data_root: str, config: Config, page_path: str) -> Published:
    """Write the shards and their page, and record that this run needs them."""
    index = shards.finished(raw, data_root, config.data)
    if index is None:
        team.do(sharing.WRITE, raw)
        index = shards.join(raw, data_root, config.data)
    storage.write_bytes(page_path, page(index).encode(), sync=False)
    in_use.end(data_root, [f"raw/{raw.fingerprint}", f"shards/{index.fingerprint}"], config.model.weights)
    counts = {
        f"{name}_{key}": getattr(split, key)
        for name, split in index.splits.items()
        for key in ("samples", "boxes")
    }
    shown = {"uri": index.uri, "fingerprint": index.fingerprint} | counts
    shown |= data_versions.label(raw.to_json())
    record = index.to_json()
    return {key: record[key] for key in ("kind", "version", "categories")} | shown, shown
