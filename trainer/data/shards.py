"""From raw images and annotations to shards, by several processes.

<data_root>/shards/<fingerprint>/
  <split>-00000.tar           standard tar: KEY.jpg, KEY.json
  <split>-00000.json          sidecar, written after its tar: the shard is whole
  annotations/<split>.json    cleaned internal form: the ground truth of evaluation
  <split>.samples.npy         where each sample is
  index.json                  written last
"""

import logging
from collections import defaultdict
from typing import Any

from trainer import storage
from trainer.config import DataConfig
from trainer.data import pool
from trainer.data import problems as reasons
from trainer.data.annotations import hash_fraction
from trainer.data.download import fingerprint
from trainer.data.problems import Problems
from trainer.data.shard_index import write_index
from trainer.data.shard_writer import ShardTask, write_shard
from trainer.log import progress

logger = logging.getLogger(__name__)

VERSION = 1
"""Raise it when the same raw images give other shards."""


def shard(raw: dict[str, Any], data_root: str, config: DataConfig) -> dict[str, Any]:
    """Write the shards of what `download` brought, or find them there.

    A call that was killed is continued: shards that are whole are not written again. The result
    does not depend on the number of processes.

    Args:
        raw: the manifest that `download` returned.
        data_root: URI of a folder, local or in an object store.
        config: size of shards and images, how much may be bad, how many processes.

    Returns:
        The index, which is in `<uri>/index.json` too.

    Raises:
        DataError: too many images or boxes are bad, or a worker was killed.
        StorageError: the data root cannot be read or written.
    """
    name = fingerprint(
        "shards", VERSION, raw["fingerprint"], config.shard_bytes, config.max_side, config.jpeg_quality
    )
    uri = storage.join(storage.absolute(data_root), "shards", name)
    index_uri = storage.join(uri, "index.json")
    if storage.exists(index_uri):
        logger.info("shards of %s are there already: %s", raw["source"], uri)
        index = storage.read_json(index_uri)
        _check(index["problems"], {}, raw, config)
        return index
    forms = {
        split: storage.read_json(storage.join(raw["uri"], "annotations", f"{split}.json"))
        for split in raw["splits"]
    }
    plans = {split: _plan(form, raw["uri"], split, config.shard_bytes) for split, form in forms.items()}
    sidecars = _write_all(raw, forms, plans, uri, config)
    problems = Problems()
    problems.merge(raw["problems"])
    for sidecar in sidecars.values():
        problems.merge(sidecar["problems"])
    _check(problems.counts, problems.examples, raw, config)
    header = {
        "kind": "shards",
        "version": VERSION,
        "uri": uri,
        "fingerprint": name,
        "raw_fingerprint": raw["fingerprint"],
        "categories": forms["train"]["categories"],
    }
    index = write_index(header, sidecars, forms, problems)
    told = f" ({problems.summary()})" if problems.counts else ""
    counts = ", ".join(f"{found['samples']} {split}" for split, found in index["splits"].items())
    logger.info("shards of %s: %s in %s%s", raw["source"], counts, uri, told)
    return index


def _plan(form: dict[str, Any], raw_uri: str, split: str, shard_bytes: int) -> list[list[dict[str, Any]]]:
    """Divide a split's images into shards by their raw sizes, in an order shuffled once.

    The order is that of a hash of each key, so every shard is a random sample of the split.
    """
    sizes = storage.list_states(storage.join(raw_uri, "images", split))
    shards: list[list[dict[str, Any]]] = []
    filled = shard_bytes
    for image in sorted(form["images"], key=lambda image: hash_fraction(image["file_name"], "shard")):
        if filled >= shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(image)
        state = sizes.get(image["file_name"])
        filled += state.size if state else 0
    return shards


def _write_all(
    raw: dict[str, Any],
    forms: dict[str, dict[str, Any]],
    plans: dict[str, list[list[dict[str, Any]]]],
    uri: str,
    config: DataConfig,
) -> dict[str, dict[str, Any]]:
    """Write the shards that are not there yet; return all sidecars by name, in order."""
    storage.remove_stale(uri)
    there = storage.list_states(uri)
    sidecars: dict[str, dict[str, Any]] = {}
    tasks = []
    for split, shards in plans.items():
        boxes = defaultdict(list)
        for annotation in forms[split]["annotations"]:
            boxes[annotation["image_id"]].append(annotation)
        for number, images in enumerate(shards):
            name = f"{split}-{number:05}"
            sidecar = _finished(uri, name, there)
            if sidecar is not None:
                sidecars[name] = sidecar
                continue
            tasks.append(
                ShardTask(
                    images_uri=storage.join(raw["uri"], "images", split),
                    shards_uri=uri,
                    name=name,
                    images=[(image, boxes[image["id"]]) for image in images],
                    labels=len(forms[split]["categories"]),
                    max_side=config.max_side,
                    jpeg_quality=config.jpeg_quality,
                )
            )
    total = sum(len(form["images"]) for form in forms.values())
    if sidecars:
        logger.info("%d of %d shards are there already", len(sidecars), len(sidecars) + len(tasks))
    workers = min(config.processes or pool.available_cores(), max(1, len(tasks)))
    bad = sum(len(sidecar["quarantined"]) for sidecar in sidecars.values())
    with progress("shard", total, "images", done=total - sum(len(task.images) for task in tasks)) as bar:
        for name, sidecar in pool.run(_write_one, tasks, workers, processes=True):
            sidecars[name] = sidecar
            bad += len(sidecar["quarantined"])
            bar.update(
                sidecar["samples"] + len(sidecar["quarantined"]), note=f"{bad} unreadable" if bad else ""
            )
    return dict(sorted(sidecars.items()))


def _write_one(task: ShardTask) -> tuple[str, dict[str, Any]]:
    return task.name, write_shard(task)


def _finished(uri: str, name: str, there: dict[str, storage.FileState]) -> dict[str, Any] | None:
    """Return the sidecar of a shard that is whole, or None."""
    tar = there.get(f"{name}.tar")
    if tar is None or f"{name}.json" not in there:
        return None
    sidecar = storage.read_json(storage.join(uri, f"{name}.json"))
    return sidecar if sidecar["bytes"] == tar.size else None


def _check(
    counts: dict[str, int], examples: dict[str, list[str]], raw: dict[str, Any], config: DataConfig
) -> None:
    """Raise DataError if more is bad than the configuration lets pass."""
    problems = Problems(dict(counts), dict(examples))
    before = Problems()
    before.merge(raw["problems"])
    problems.check(
        f"shards of {raw['source']}",
        images=sum(split["images"] for split in raw["splits"].values()) + before.total(reasons.BAD_IMAGES),
        boxes=sum(split["boxes"] for split in raw["splits"].values())
        + before.total([reasons.BOX_UNKNOWN_IMAGE]),
        max_bad_fraction=config.max_bad_fraction,
    )
