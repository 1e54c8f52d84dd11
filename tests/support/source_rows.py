"""The images of a source's split, as tests look at them, and its shards."""

import json
from typing import Any

from trainer.config.schema import DataConfig
from trainer.data.download import download
from trainer.data.raw_folder import RawTable
from trainer.data.raw_manifest import RawManifest
from trainer.data.shard_folder import ShardIndex
from trainer.data.shards import shard
from trainer.data.sources.source import Box, Entry, Rows


def shards_of(source: object, root: object, config: DataConfig) -> ShardIndex:
    """Prepare a source in a data root."""
    return shard(download(str(source), str(root), config), str(root), config)


def rows_of(rows: Rows) -> list[dict[str, Any]]:
    return [row for batch in rows.batches() for row in batch.to_pylist()]


def kept_rows(manifest: RawManifest, split: str) -> list[dict[str, Any]]:
    table = RawTable(f"{manifest.uri}/{split}.parquet")
    return [row for block in range(table.block_count) for row in table.read_block(block).to_pylist()]


def entries_of(rows: Rows) -> list[Entry]:
    return [
        Entry(
            row["file_name"],
            row["origin"],
            row["width"],
            row["height"],
            [
                Box(box["category"], tuple(box[axis] for axis in "xywh"), box["area"], box["iscrowd"])
                for box in row["boxes"]
            ],
            json.loads(row["original_id"]),
            (row["fault_reason"], row["fault_detail"]) if row["fault_reason"] else None,
            row["version"],
        )
        for row in rows_of(rows)
    ]
