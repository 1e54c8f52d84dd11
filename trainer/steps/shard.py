"""The step `shard`: clean the annotations, and write images and boxes as shards."""

from trainer import storage
from trainer.data import shards as sharding
from trainer.model import recipes
from trainer.report.shards_page import page
from trainer.steps.manifests import RawData, Shards


def shard(raw: RawData) -> Shards:
    """Write the shards of raw images, and the page with their statistics; complete shards are kept."""
    config = recipes.load_here(raw.recipe, raw.overrides)
    index = sharding.shard(raw.folder, raw.data_root, config.data)
    shards = Shards(
        data_root=raw.data_root,
        uri=index.uri,
        fingerprint=index.fingerprint,
        samples=index.samples,
        boxes={name: split.boxes for name, split in index.splits.items()},
        recipe=raw.recipe,
        overrides=raw.overrides,
        data_version=raw.data_version,
    )
    storage.write_bytes(shards.statistics, page(index).encode(), sync=False)
    return shards
