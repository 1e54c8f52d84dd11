"""The step `shard`: clean the annotations, and write images and boxes as shards."""

from collections.abc import Callable

from trainer import storage
from trainer.data import shards as sharding
from trainer.model import recipes
from trainer.report.shards_page import render_shards_page
from trainer.steps.manifests import RawData, Shards


def shard(raw: RawData, launch: Callable[[tuple[str, ...]], None] | None = None) -> Shards:
    """Write the shards of raw images, and the page with their statistics; complete shards are kept.

    `launch` runs `python -m trainer` with the given arguments in several processes that share the work. If
    None, this process writes all shards.
    """
    config = recipes.load_with_packages(raw.recipe, raw.overrides)
    if launch:
        settings = recipes.to_arguments(raw.recipe, raw.overrides)
        launch(("shard", "--raw", raw.folder.uri, "--data-root", raw.data_root, *settings))
    index = sharding.shard(raw.folder, raw.data_root, config.data)
    shards = Shards(
        data_root=raw.data_root,
        uri=index.uri,
        fingerprint=index.fingerprint,
        samples=index.samples,
        boxes={name: split.boxes for name, split in index.splits.items()},
        recipe=raw.recipe,
        overrides=raw.overrides,
    )
    storage.write_bytes(shards.statistics, render_shards_page(index).encode(), sync=False)
    return shards
