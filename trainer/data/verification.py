"""Whether data is still what was written: all hashes, every image."""

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

import numpy as np
from PIL import Image

from trainer import log, storage
from trainer.data import pool
from trainer.data.decoding import decode
from trainer.data.explore import RawImages, Shards, open_view
from trainer.data.shard_index import ShardDataset, parse_sample
from trainer.errors import ConfigError, DataError, StorageError

_BLOCK = 1024 * 1024
_SHOWN = 20
_UNDECODABLE = "cannot be decoded"


@dataclass
class Verified:
    """What was looked at, and what is wrong."""

    kind: str
    uri: str
    files: int = 0
    """Shards, or raw images."""
    images: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)


class _Part(NamedTuple):
    """What one task found."""

    files: int
    images: int
    bytes: int
    problems: list[str]


def verify(text: str, threads: int = 0) -> Verified:
    """Read all of the shards, or of the raw images, of a folder.

    Of a shard its size and sha256 are compared with the index, the CRC-32, record and size of every
    sample, and every image is decoded; of raw images the number of bytes, and each is decoded.

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
        total = sum(of["samples"] for of in view.index["splits"].values())
    elif isinstance(view, RawImages):
        parts = _raw(view, threads)
        total = sum(of["images"] for of in view.manifest["splits"].values())
    else:
        raise ConfigError(
            f"{text} is a source: there is nothing to compare it with",
            fix="name a folder <data_root>/shards/<fingerprint> or <data_root>/raw/<fingerprint>; "
            "`kubedet data inspect` counts a source's problems",
        )
    found = Verified(view.kind, view.uri)
    with log.progress("verify", total, "images") as bar:
        for part in parts:
            found.files += part.files
            found.images += part.images
            found.bytes += part.bytes
            found.problems += part.problems
            bar.update(part.images, note=f"{len(found.problems)} problems" if found.problems else "")
    found.problems.sort()
    return found


def check(found: Verified) -> None:
    """Raise DataError with the problems, if there are any."""
    if not found.problems:
        return
    shown = "".join(f"\n  {problem}" for problem in found.problems[:_SHOWN])
    more = f"\n  and {len(found.problems) - _SHOWN} more" if len(found.problems) > _SHOWN else ""
    fix = f"delete this folder and run the {'shard' if found.kind == 'shards' else 'download'} step again"
    if found.kind == "shards" and any(_UNDECODABLE in problem for problem in found.problems):
        fix += ", with data.decode_check=true, which leaves out the images that cannot be decoded"
    raise DataError(f"{found.uri}: {len(found.problems)} problems:{shown}{more}", fix=fix)


def _shards(view: Shards, threads: int) -> Iterator[_Part]:
    datasets = [ShardDataset(view.uri, split) for split in view.splits]
    tasks = [(dataset, shard) for dataset in datasets for shard in range(len(dataset.shards))]
    return pool.run(_verify_shard, tasks, threads or pool.available_cores(), processes=False)


def _verify_shard(task: tuple[ShardDataset, int]) -> _Part:
    """Read a shard from start to end once."""
    dataset, number = task
    shard = dataset.shards[number]
    rows = dataset.samples[dataset.samples["shard"] == number]
    problems: list[str] = []
    digest = hashlib.sha256()
    size = images = 0

    def take(file: IO[bytes], count: int) -> bytes:
        nonlocal size
        data = file.read(count)
        digest.update(data)
        size += len(data)
        return data

    try:
        with storage.open_reader(storage.join(dataset.uri, shard["name"])) as file:
            for row in rows:
                take(file, int(row["offset"]) - size)
                stop = int(row["json_offset"]) + int(row["json_length"])
                wrong = _judge(row, take(file, stop - size))
                images += 1
                if wrong:
                    problems.append(f"{shard['name']}, image id {row['image_id']}: {wrong}")
            while take(file, _BLOCK):
                pass
    except StorageError as error:
        return _Part(1, images, size, [*problems, error.message])
    if size != shard["bytes"]:
        problems.insert(0, f"{shard['name']}: {size:,} bytes, not {shard['bytes']:,}")
    elif digest.hexdigest() != shard["sha256"]:
        problems.insert(0, f"{shard['name']}: its sha256 is {digest.hexdigest()}, not {shard['sha256']}")
    return _Part(1, images, size, problems)


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
    sizes = view.sizes()
    tasks = (
        (view, row, int(sizes[row["image_id"] - 1]))
        for split in view.splits
        for rows in view.blocks(split)
        for row in rows
    )
    return pool.run(_verify_image, tasks, threads or 4 * pool.available_cores(), processes=False)


def _verify_image(task: tuple[RawImages, dict[str, Any], int]) -> _Part:
    view, row, size = task
    try:
        data = storage.read_bytes(view.place(row))
    except StorageError as error:
        return _Part(1, 1, 0, [error.message])
    wrong = ""
    if len(data) != size:
        wrong = f"{len(data):,} bytes, not {size:,}"
    else:
        try:
            with Image.open(io.BytesIO(data)) as image:
                image.load()
        except Exception as error:  # decoders of damaged bytes raise nearly anything
            wrong = f"cannot be decoded: {error}"
    return _Part(1, 1, len(data), [f"{row['file_name']}: {wrong}"] if wrong else [])
