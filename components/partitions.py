"""Download and sharding by several pods: what each of them is told, and does.

A part is {"plan": URI of the plan ("" where there is nothing to fetch), "partition": which, from 0,
"partitions": how many}. Whatever they are, the result is the same: see `trainer.data.download`.
"""

from typing import Any

from components import versions
from trainer import storage
from trainer.config import DataConfig
from trainer.data import download, shards
from trainer.errors import ConfigError

MOST = 256
"""Partitions at most: each fetches into folders of its own, of which there are so many."""

Part = dict[str, Any]


def plan(source: str, data_root: str, config: DataConfig, version: str, partitions: int) -> list[Part]:
    """List a source, write its annotations as tables, and divide the work.

    Args:
        source: see `trainer.data.sources`.
        data_root: URI under which data is kept.
        config: the data section of the configuration.
        version: see `versions.fetch`.
        partitions: how many, 1 to MOST.

    Raises:
        ConfigError: no such number of partitions, or the version cannot be a name.
        DataError: the source cannot be used.
        StorageError: the data root cannot be read or written.
    """
    check(partitions)
    there = versions.known(source, data_root, config, version) is not None
    uri = "" if there else storage.join(download.plan(source, data_root, config)["uri"], "plan.json")
    return [{"plan": uri, "partition": part, "partitions": partitions} for part in range(partitions)]


def check(partitions: int) -> None:
    """Refuse a number of partitions that cannot be.

    Raises:
        ConfigError: saying what it may be.
    """
    if not 1 <= partitions <= MOST:
        raise ConfigError(f"partitions {partitions} is not from 1 to {MOST}", fix="name another number")


def fetch(part: Part, config: DataConfig) -> Part:
    """Fetch the images of a part; return it.

    Raises:
        DataError: far too many cannot be had.
        StorageError: the source or the data root cannot be reached.
    """
    if part["plan"]:
        download.fetch_partition(storage.read_json(part["plan"]), config, *_numbers(part))
    return part


def fetched(
    parts: list[Part], source: str, data_root: str, config: DataConfig, version: str
) -> dict[str, Any]:
    """Put together what all parts fetched, or fetch everything where there are none.

    Args:
        parts: what `fetch` returned of each.
        source: see `versions.fetch`.
        data_root: see `versions.fetch`.
        config: see `versions.fetch`.
        version: see `versions.fetch`.

    Returns:
        The raw manifest, with the version in it if there is one.

    Raises:
        DataError: more cannot be had than `data.max_bad_fraction` allows.
        StorageError: a part has not been fetched, or the data root cannot be reached.
    """

    def put_together() -> dict[str, Any]:
        return download.join(storage.read_json(parts[0]["plan"]), config, len(parts))

    shared = bool(parts and parts[0]["plan"])
    return versions.fetch(source, data_root, config, version, put_together if shared else None)


def write(raw: dict[str, Any], data_root: str, config: DataConfig, part: Part) -> Part:
    """Write the shards of a part of the raw images; return it.

    Raises:
        DataError: a worker was killed, or the raw tables are damaged.
        StorageError: the data root cannot be read or written.
    """
    shards.shard_partition(raw, data_root, config, *_numbers(part))
    return part


def _numbers(part: Part) -> tuple[int, int]:
    # Kubeflow makes floats of the integers in a mapping.
    return int(part["partition"]), int(part["partitions"])
