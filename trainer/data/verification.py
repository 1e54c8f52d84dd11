"""Checks all hashes of stored data, decodes every image, and repairs damage."""

import hashlib
import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from trainer import storage
from trainer.base import log, worker_pool
from trainer.base.errors import (
    ConfigError,
    DamagedError,
    DataError,
    FormatError,
    MissingError,
    ResourceError,
    StorageError,
)
from trainer.base.os_errors import raise_if_exhausted
from trainer.config.schema import DataConfig
from trainer.data import raw_folder, raw_manifest
from trainer.data.decoding import decode
from trainer.data.download import download
from trainer.data.image_fetching import read_report, refetch
from trainer.data.raw_manifest import RawManifest
from trainer.data.samples import RawRow
from trainer.data.shard_folder import INDEX, mark_damaged, read_index, read_sidecar
from trainer.data.shard_index import ShardDataset, data_root_of, parse_sample
from trainer.data.shards import shard

_LOG = logging.getLogger("data")
_BLOCK = 1024 * 1024
_MAX_SHOWN = 20
_UNDECODABLE = "cannot be decoded"
_FOLDER_FIX = "use a folder <data_root>/shards/<fingerprint> or <data_root>/raw/<fingerprint>"
_RUN_AGAIN_FIX = "run the command that prepared this data again: it rewrites missing and damaged files"


@dataclass
class VerificationResult:
    """The number of files that were checked, and their problems."""

    kind: str
    uri: str
    files: int = 0  # Shards, or raw images.
    images: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)


class _FileResult(NamedTuple):
    """The result of checking one file."""

    name: str
    problems: list[str]
    images: int = 0
    bytes: int = 0


def verify(text: str) -> VerificationResult:
    """Check all hashes of a folder of shards or raw images, and decode every image.

    Raises:
        ConfigError: the folder is neither, or incomplete.
        DataError: the index is damaged.
        StorageError: the folder cannot be read.
    """
    uri, cores = storage.absolute(text), worker_pool.available_cores()
    damaged: list[_FileResult] = []
    kind = "shards" if storage.exists(storage.join(uri, INDEX)) else "raw images"
    if kind == "shards":
        index, shards = read_index(uri), []
        for split in index.splits:
            try:
                dataset = ShardDataset(uri, split)
            except (DamagedError, MissingError, DataError) as error:
                damaged.append(_FileResult(f"{split}.samples.npy", [error.message]))
                continue
            shards += [(dataset, number) for number in range(len(dataset.shards))]
            try:
                if split != "train":
                    dataset.annotations()
            except ResourceError:
                raise
            except (StorageError, DataError) as error:
                damaged.append(_FileResult(f"annotations/{split}.json", [error.message]))
        parts = worker_pool.run(_verify_shard, shards, cores, processes=False)
        total = sum(index.samples.values())
    elif storage.exists(storage.join(uri, raw_manifest.MANIFEST)):
        raw = raw_folder.read_manifest(uri)
        damaged += _find_damaged_reports(raw)
        images = raw_folder.read_image_table(raw)
        verify_image = partial(_verify_image, raw, images)
        parts = worker_pool.run(verify_image, _stored_rows(raw, images), 4 * cores, processes=False)
        total = raw.image_count
    else:
        fix = f"{_FOLDER_FIX}; `kubedet data inspect` counts a source's problems"
        raise ConfigError(f"{text} contains neither complete shards nor complete raw images", fix=fix)
    result = VerificationResult(kind, uri)
    with log.progress("verify", total, "images") as bar:
        for part in parts:
            result.files += 1
            result.images += part.images
            result.bytes += part.bytes
            damaged += [part] if part.problems else []
            bar.update(part.images, note=f"problems in {len(damaged)} files" if damaged else "")
    result.problems = [problem for part in sorted(damaged) for problem in part.problems]
    return result


def check(result: VerificationResult) -> None:
    """Raise DataError with the problems, if there are any."""
    if not result.problems:
        return
    shown = "".join(f"\n  {problem}" for problem in result.problems[:_MAX_SHOWN])
    more = f"\n  and {len(result.problems) - _MAX_SHOWN} more" if len(result.problems) > _MAX_SHOWN else ""
    fix = f"run `kubedet data verify --repair {result.uri}`, or run the command again that wrote it"
    if result.kind == "shards" and any(_UNDECODABLE in problem for problem in result.problems):
        fix += "; set data.decode_check=true there to leave out images that cannot be decoded"
    count = f"{len(result.problems):,} problem{'s' * (len(result.problems) != 1)}"
    raise DataError(f"{result.uri}: {count}:{shown}{more}", fix=fix)


def _verify_shard(task: tuple[ShardDataset, int]) -> _FileResult:
    """Check a shard in one pass."""
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
    try:
        with storage.open_reader(storage.join(dataset.uri, shard.name)) as file:
            for row in rows:
                stop = int(row["json_offset"]) + int(row["json_length"])
                header = file.read(int(row["offset"]) - size)
                data = file.read(stop - size - len(header))
                digest.update(header + data)
                size += len(header) + len(data)
                images += 1
                if size < stop:
                    lost += 1
                    continue
                where = f"{shard.name}, image id {row['image_id']}"
                if sample := parse_sample(row, data):
                    try:
                        decode(sample[0], int(row["width"]), int(row["height"]))
                    except ValueError as error:
                        problems.append(f"{where}: {_UNDECODABLE}: {error}")
                else:
                    problems.append(f"{where}: its bytes differ from the index")
            while block := file.read(_BLOCK):
                digest.update(block)
                size += len(block)
    except ResourceError:  # The shard may be intact.
        raise
    except StorageError as error:
        return _FileResult(shard.name, [error.message, *problems], images, size)
    if size != shard.bytes:
        without = f"; {lost} of its {len(rows)} images are not in it" if lost else ""
        problems.insert(0, f"{shard.name}: {size:,} bytes, not {shard.bytes:,}{without}")
    elif digest.hexdigest() != shard.sha256:
        mark_damaged(dataset.uri, shard.name)
        problems.insert(0, f"{shard.name}: its sha256 is {digest.hexdigest()}, not {shard.sha256}")
    return _FileResult(shard.name, problems, images, size)


def _find_damaged_reports(raw: RawManifest) -> list[_FileResult]:
    """Return the damaged reports of fetched images (see `raw_folder`)."""
    damaged = []
    folder = storage.join(raw.uri, "fetched")
    for name in storage.list_files(folder):
        try:
            read_report(storage.join(folder, name))
        except DamagedError as error:
            damaged.append(_FileResult(f"fetched/{name}", [error.message]))
    return damaged


def _stored_rows(raw: RawManifest, images: np.ndarray) -> Iterator[RawRow]:
    """Yield the rows of all stored images."""
    for split in raw.splits:
        table = raw_folder.open_table(raw, split)
        for block in range(table.block_count):
            for row in table.read_block(block).to_pylist():
                if images["bytes"][row["image_id"] - 1]:
                    yield row


def _verify_image(raw: RawManifest, images: np.ndarray, row: RawRow) -> _FileResult:
    uri, problem, size = raw.image_uri(row), "", 0
    try:
        data = storage.read_bytes(uri, sha256=images["sha256"][row["image_id"] - 1].tobytes().hex())
        size = len(data)
        with Image.open(io.BytesIO(data)) as image:
            image.load()
    except ResourceError:
        raise
    except StorageError as error:
        problem = error.message
    except Exception as error:  # Decoders raise nearly anything for damaged bytes.
        raise_if_exhausted(error, uri)
        problem = f"{_UNDECODABLE}: {error}"
    return _FileResult(row["file_name"], [f"{uri}: {problem}"] if problem else [], 1, size)


def repair(text: str) -> VerificationResult:
    """Repair shards from raw images, or raw images from their source; return the result of `verify`.

    Raises:
        ConfigError: the folder contains neither.
        DataError, StorageError: the raw images or the source are not available, or have changed since.
    """
    folder = storage.absolute(text)
    if storage.exists(storage.join(folder, raw_manifest.PLAN)):
        _repair_raw(folder)
    elif not storage.exists(storage.join(folder, INDEX)):
        raise ConfigError(f"{text} contains neither shards nor raw images", fix=_FOLDER_FIX)
    elif problems := verify(folder).problems:
        index = read_index(folder)
        data_root = data_root_of(folder)
        raw = raw_folder.read_manifest(storage.join(data_root, "raw", index.raw_fingerprint))
        config = _repair_config(raw.settings | index.settings)
        if raw.content != index.content:
            raise DataError(
                f"{raw.uri} no longer has the images that {folder} was made from", fix=_RUN_AGAIN_FIX
            )
        for problem in problems:
            _LOG.warning("repairing %s", problem)
        for part in index.splits.values():
            for item in part.shards:
                if any(item.name.removesuffix(".tar") in problem for problem in problems):
                    mark_damaged(folder, item.name)
        shard(raw, data_root, config)
    return verify(folder)


def _repair_raw(folder: str) -> None:
    try:
        planned = raw_folder.read_manifest(folder, raw_manifest.PLAN)
    except (DamagedError, FormatError):
        planned = raw_folder.read_manifest(folder)
    config = _repair_config(planned.settings)
    data_root = data_root_of(folder)
    raw = download(planned.source, data_root, config, planned.excluded)
    if raw.uri != folder:
        raise DataError(f"{planned.source} has changed since {folder} was created", fix=_RUN_AGAIN_FIX)
    damaged = {problem.partition(": ")[0]: problem for problem in verify(folder).problems}
    images = raw_folder.read_image_table(raw)
    changed = bool(_find_damaged_reports(raw))
    for row in _stored_rows(raw, images) if damaged else ():
        place = raw.image_uri(row)
        if place in damaged:
            _LOG.warning("repairing %s", damaged[place])
            data = refetch(raw.source, row["origin"], config)
            changed |= hashlib.sha256(data).digest() != images["sha256"][row["image_id"] - 1].tobytes()
            storage.write_bytes(place, data, confirm=True)
    if changed:  # Count and hash the stored images again.
        for name in storage.list_files(storage.join(folder, "fetched")):
            storage.delete(storage.join(folder, "fetched", name))
        storage.delete(storage.join(folder, raw_manifest.MANIFEST))
        download(planned.source, data_root, config, planned.excluded)


def _repair_config(settings: dict[str, Any]) -> DataConfig:
    return replace(DataConfig(), **settings, max_bad_fraction=1.0)
