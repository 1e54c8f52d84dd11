"""Verifies that stored data is unchanged, by all hashes and every image, and repairs what is not."""

import hashlib
import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import IO, Any, NamedTuple

import numpy as np
from PIL import Image

from trainer import storage
from trainer.base import log, worker_pool
from trainer.base.errors import (
    ConfigError,
    DamagedError,
    DataError,
    FormError,
    MissingError,
    ResourceError,
    StorageError,
)
from trainer.base.os_errors import check_resources
from trainer.config.schema import DataConfig
from trainer.data import download, fetch, raw_folder
from trainer.data.data_views import RawImages, Shards, open_view
from trainer.data.decoding import decode
from trainer.data.shard_folder import INDEX, note, read_index, read_known, read_sidecar
from trainer.data.shard_index import ShardDataset, data_root_of, parse_sample
from trainer.data.shards import shard
from trainer.storage import records

_BLOCK = 1024 * 1024
_SHOWN = 20
_UNDECODABLE = "cannot be decoded"


@dataclass
class Verified:
    """What was read, and the problems."""

    kind: str
    uri: str
    files: int = 0
    """Shards, or raw images."""
    images: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)


class _Part(NamedTuple):
    """The result of one task."""

    name: str
    """Of the file."""
    files: int
    images: int
    bytes: int
    problems: list[str]


def verify(text: str, threads: int = 0) -> Verified:
    """Read all of the shards, or of the raw images, of a folder.

    Of a shard its size and sha256 are compared with the index, the CRC-32, record and size of every
    sample, and every image is decoded; its sidecar and the ground truth are compared with their hashes. Of
    raw images bytes and sha256 are compared, and each is decoded.

    Args:
        text: URI of the folder.
        threads: 0 is one for each core.

    Raises:
        ConfigError: it is a source, of which nothing is recorded.
        DataError: the index is damaged.
        StorageError: the folder cannot be reached.
    """
    view = open_view(text)
    if isinstance(view, Shards):
        parts = _shards(view, threads)
        total = sum(view.index.samples.values())
    elif isinstance(view, RawImages):
        parts = _raw(view, threads)
        total = view.manifest.listed_images
    else:
        raise ConfigError(
            f"{text} is a source: there is nothing to compare it with",
            fix="name a folder <data_root>/shards/<fingerprint> or <data_root>/raw/<fingerprint>; "
            "`kubedet data inspect` counts a source's problems",
        )
    result = Verified(view.kind, view.uri)
    wrong: list[_Part] = []
    with log.progress("verify", total, "images") as bar:
        for part in parts:
            result.files += part.files
            result.images += part.images
            result.bytes += part.bytes
            wrong += [part] if part.problems else []
            bar.update(part.images, note=f"problems in {len(wrong)} files" if wrong else "")
    result.problems = [problem for part in sorted(wrong) for problem in part.problems]
    return result


def check(result: Verified) -> None:
    """Raise DataError with the problems, if there are any."""
    if not result.problems:
        return
    shown = "".join(f"\n  {problem}" for problem in result.problems[:_SHOWN])
    more = f"\n  and {len(result.problems) - _SHOWN} more" if len(result.problems) > _SHOWN else ""
    fix = f"run `kubedet data verify --repair {result.uri}`, or the command that made it again: both mend it"
    if result.kind == "shards" and any(_UNDECODABLE in problem for problem in result.problems):
        fix += "; with data.decode_check=true, which leaves out the images that cannot be decoded"
    count = f"{len(result.problems):,} problem{'s' * (len(result.problems) != 1)}"
    raise DataError(f"{result.uri}: {count}:{shown}{more}", fix=fix)


def _shards(view: Shards, threads: int) -> Iterator[_Part]:
    datasets, unread = [], []
    for split in view.splits:
        try:
            datasets.append(ShardDataset(view.uri, split))
        except (DamagedError, MissingError, DataError) as error:
            unread.append(_Part(f"{split}.samples.npy", 0, 0, 0, [error.message]))
    tasks = [(dataset, shard) for dataset in datasets for shard in range(len(dataset.shards))]
    shard_parts = worker_pool.run(
        _verify_shard, tasks, threads or worker_pool.available_cores(), processes=False
    )
    return chain(
        unread, shard_parts, (_verify_truth(view, split) for split in view.splits if split != "train")
    )


def _verify_truth(view: Shards, split: str) -> _Part:
    """Compare the ground truth of an evaluated split with the index."""
    name = f"annotations/{split}.json"
    try:
        truth = records.decode(name, read_known(view.uri, name, view.index.files.get(name)))
        counts = (len(truth["images"]), len(truth["annotations"]))
    except ResourceError:
        raise
    except StorageError as error:
        return _Part(name, 0, 0, 0, [error.message])
    except (KeyError, TypeError):
        return _Part(name, 0, 0, 0, [f"{name}: no lists of images and annotations"])
    listed = (view.index.splits[split].samples, view.index.splits[split].boxes)
    if counts == listed:
        return _Part(name, 0, 0, 0, [])
    texts = [f"{images:,} images with {boxes:,} boxes" for images, boxes in (counts, listed)]
    return _Part(name, 0, 0, 0, [f"{name}: {texts[0]}, not {texts[1]}"])


def _verify_shard(task: tuple[ShardDataset, int]) -> _Part:
    """Read a shard from start to end once."""
    dataset, number = task
    shard = dataset.shards[number]
    rows = dataset.samples[dataset.samples["shard"] == number]
    problems: list[str] = []
    try:
        read_sidecar(dataset.uri, shard.name.removesuffix(".tar"))
    except (StorageError, DataError) as error:
        problems.append(error.message)
    digest = hashlib.sha256()
    size = images = lost = 0

    def take(file: IO[bytes], count: int) -> bytes:
        nonlocal size
        data = file.read(count)
        digest.update(data)
        size += len(data)
        return data

    try:
        with storage.open_reader(storage.join(dataset.uri, shard.name)) as file:
            for row in rows:
                take(file, int(row["offset"]) - size)
                stop = int(row["json_offset"]) + int(row["json_length"])
                data = take(file, stop - size)
                images += 1
                if size < stop:
                    lost += 1
                    continue
                wrong = _judge(row, data)
                if wrong:
                    problems.append(f"{shard.name}, image id {row['image_id']}: {wrong}")
            while take(file, _BLOCK):
                pass
    except ResourceError:  # nothing is wrong with the shard
        raise
    except StorageError as error:
        return _Part(shard.name, 1, images, size, [error.message, *problems])
    if size != shard.bytes:
        without = f"; {lost} of its {len(rows)} images are not in it" if lost else ""
        problems.insert(0, f"{shard.name}: {size:,} bytes, not {shard.bytes:,}{without}")
    elif digest.hexdigest() != shard.sha256:
        note(dataset.uri, shard.name)
        problems.insert(0, f"{shard.name}: its sha256 is {digest.hexdigest()}, not {shard.sha256}")
    return _Part(shard.name, 1, images, size, problems)


def _judge(row: np.void, data: bytes) -> str:
    """Say what is wrong with a sample; "" is nothing."""
    start = int(row["json_offset"]) - int(row["offset"])
    sample = parse_sample(row, data[: int(row["length"])], data[start:])
    if sample is None:
        return "its bytes differ from what the index says"
    jpeg, record = sample
    if (record["width"], record["height"]) != (row["width"], row["height"]):
        return (
            f"its record says {record['width']}x{record['height']}, the index {row['width']}x{row['height']}"
        )
    try:
        decode(jpeg, record["width"], record["height"])
    except ValueError as error:
        return f"{_UNDECODABLE}: {error}"
    return ""


def _raw(view: RawImages, threads: int) -> Iterator[_Part]:
    sizes, sums = view.sizes(), raw_folder.read_sums(view.manifest)
    tasks = (
        (view, row, int(sizes[row["image_id"] - 1]), raw_folder.known_hash(sums, row["image_id"]))
        for split in view.splits
        for rows in view.blocks(split)
        for row in rows
    )
    return worker_pool.run(
        _verify_image, tasks, threads or 4 * worker_pool.available_cores(), processes=False
    )


def _verify_image(task: tuple[RawImages, dict[str, Any], int, str]) -> _Part:
    view, row, size, sha256 = task
    place = view.place(row)
    try:
        data = storage.read_bytes(place)
    except ResourceError:
        raise
    except StorageError as error:
        return _Part(row["file_name"], 1, 1, 0, [f"{place}: {error.message}"])
    wrong = ""
    if len(data) != size:
        wrong = f"{len(data):,} bytes, not {size:,}"
    elif sha256 and (actual := hashlib.sha256(data).hexdigest()) != sha256:
        wrong = f"its sha256 is {actual}, not {sha256}"
    else:
        try:
            with Image.open(io.BytesIO(data)) as image:
                image.load()
        except Exception as error:  # decoders of damaged bytes raise nearly anything
            check_resources(error, place)
            wrong = f"cannot be decoded: {error}"
    return _Part(row["file_name"], 1, 1, len(data), [f"{place}: {wrong}"] if wrong else [])


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
    if index.settings is None or not index.content:
        raise DataError(
            f"an earlier program wrote {folder}, and did not note with which settings", fix=_AGAIN
        )
    data_root = data_root_of(folder)
    raw = raw_folder.read_manifest(storage.join(data_root, "raw", index.raw_fingerprint))
    if raw.content != index.content:
        raise DataError(f"{folder} is of other images than {raw.uri} has now", fix=_AGAIN)
    for part in index.splits.values():
        for item in part.shards:
            if any(item.name.removesuffix(".tar") in problem for problem in verified.problems):
                note(folder, item.name)
    shard(raw, data_root, replace(DataConfig(), **index.settings, max_bad_fraction=1.0))


def _repair_raw(folder: str, threads: int) -> None:
    planned = _plan(folder)
    if planned.settings is None:
        raise DataError(
            f"an earlier program wrote {folder}, and did not note with which settings", fix=_AGAIN
        )
    config = replace(DataConfig(), **planned.settings, max_bad_fraction=1.0)
    data_root = data_root_of(folder)
    raw = download.download(planned.source, data_root, config)
    if raw.uri != folder:
        raise DataError(f"{planned.source} has changed since {folder} was made of it", fix=_AGAIN)
    verified = verify(folder, threads)
    if not verified.problems:
        return
    if _fetch_named(verified, tuple(config.allow_hosts)):
        # Other bytes than there were: what is there now is counted and hashed anew.
        for name in storage.list_files(storage.join(folder, "fetched")):
            storage.delete(storage.join(folder, "fetched", name))
        storage.delete(storage.join(folder, raw_folder.MANIFEST))
        download.download(planned.source, data_root, config)


def _plan(folder: str) -> raw_folder.RawManifest:
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
                    data = fetch.read_again(view.manifest.source, row["origin"], hosts)
                    others |= raw_folder.hash_of(data) != raw_folder.known_hash(sums, row["image_id"])
                    storage.write_bytes(place, data, confirm=True)
    return others
