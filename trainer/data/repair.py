"""Mends a folder of shards or raw images: what is missing or damaged is made anew, from where it came."""

import logging
from dataclasses import replace
from typing import Any

from trainer import storage
from trainer.base.errors import ConfigError, DamagedError, DataError, FormError
from trainer.config.schema import DataConfig
from trainer.data import download, image_copying, raw_folder
from trainer.data.data_views import RawImages, open_view
from trainer.data.shard_folder import INDEX, note, read_index
from trainer.data.shard_index import data_root_of
from trainer.data.shards import shard
from trainer.data.verification import Verified, verify

_LOG = logging.getLogger("data")
_AGAIN = "run the command again that prepared these data: it writes anew what is missing or damaged"


def repair(text: str, threads: int = 0) -> Verified:
    """Verify a folder, and mend what is wrong: shards from the raw images, these from their source.

    Args:
        text: URI of the folder, see `verify`.
        threads: see `verify`.

    Returns:
        What `verify` finds afterwards.

    Raises:
        ConfigError: it is a source.
        DataError, StorageError: what is needed is not to be had, or has changed since.
    """
    folder = storage.absolute(text)
    if storage.exists(storage.join(folder, INDEX)):
        _repair_shards(folder, threads)
    elif storage.exists(storage.join(folder, raw_folder.PLAN)):
        _repair_raw(folder, threads)
    else:
        raise ConfigError(
            f"{text} is neither shards nor raw images: nothing tells what it should be",
            fix="name a folder <data_root>/shards/<fingerprint> or <data_root>/raw/<fingerprint>",
        )
    return verify(folder, threads)


def _repair_shards(folder: str, threads: int) -> None:
    index = read_index(folder)
    verified = verify(folder, threads)
    if not verified.problems:
        return
    for problem in verified.problems:
        _LOG.warning("mending %s", problem)
    if not {"settings", "content"} <= index.keys():
        raise DataError(
            f"an earlier program wrote {folder}, and did not note with which settings", fix=_AGAIN
        )
    data_root = data_root_of(folder)
    raw = raw_folder.read_manifest(storage.join(data_root, "raw", index["raw_fingerprint"]))
    if raw["content"] != index["content"]:
        raise DataError(f"{folder} is of other images than {raw['uri']} has now", fix=_AGAIN)
    for part in index["splits"].values():
        for item in part["shards"]:
            if any(item["name"].removesuffix(".tar") in problem for problem in verified.problems):
                note(folder, item["name"])
    shard(raw, data_root, replace(DataConfig(), **index["settings"], max_bad_fraction=1.0))


def _repair_raw(folder: str, threads: int) -> None:
    planned = _plan(folder)
    if "settings" not in planned:
        raise DataError(
            f"an earlier program wrote {folder}, and did not note with which settings", fix=_AGAIN
        )
    config = replace(DataConfig(), **planned["settings"], max_bad_fraction=1.0)
    data_root = data_root_of(folder)
    raw = download.download(planned["source"], data_root, config)
    if raw["uri"] != folder:
        raise DataError(f"{planned['source']} has changed since {folder} was made of it", fix=_AGAIN)
    verified = verify(folder, threads)
    if not verified.problems:
        return
    if _fetch_named(verified, tuple(config.allow_hosts)):
        # Other bytes than there were: what is there now is counted and hashed anew.
        for name in storage.list_files(storage.join(folder, "fetched")):
            storage.delete(storage.join(folder, "fetched", name))
        storage.delete(storage.join(folder, raw_folder.MANIFEST))
        download.download(planned["source"], data_root, config)


def _plan(folder: str) -> dict[str, Any]:
    try:
        return raw_folder.read_plan(folder)
    except (DamagedError, FormError):
        return raw_folder.read_manifest(folder)


def _fetch_named(verified: Verified, hosts: tuple[str, ...]) -> bool:
    """Fetch the images that are named as damaged; tell whether the source has other bytes now."""
    view = open_view(verified.uri)
    assert isinstance(view, RawImages)
    named = {problem.partition(": ")[0]: problem for problem in verified.problems}
    sums = raw_folder.read_sums(view.manifest)
    others = False
    for split in view.splits:
        for rows in view.blocks(split):
            for row in rows:
                place = view.place(row)
                if place in named:
                    _LOG.warning("mending %s", named[place])
                    data = image_copying.read_again(view.manifest["source"], row["origin"], hosts)
                    others |= raw_folder.hash_of(data) != raw_folder.known_hash(sums, row["image_id"])
                    storage.write_bytes(place, data, confirm=True)
    return others
