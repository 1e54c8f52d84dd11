"""From a source to raw images and annotations under the data root.

<data_root>/images/<source>/<2 hex>/<key>-<digest>.<ext>   bytes as the source has them
<data_root>/raw/<fingerprint>/<split>.parquet              annotations (see trainer.data.raw_table)
<data_root>/raw/<fingerprint>/plan.json                    written when the tables are whole
<data_root>/raw/<fingerprint>/fetched/<k>-of-<n>.parquet   what one of n partitions brought
<data_root>/raw/<fingerprint>/sizes-<content>.npy          bytes of each image, by id; 0: not to be had
<data_root>/raw/<fingerprint>/failed.csv                   each image that is not to be had, and why
<data_root>/raw/<fingerprint>/manifest.json                written last

The images of a source are kept once, whatever its fingerprint: when it has changed, or another part
of it is wanted, only what is new is fetched.
"""

import csv
import hashlib
import io
import json
import logging
from typing import Any

import numpy as np

from trainer import storage
from trainer.config import DataConfig
from trainer.data import annotations, fetch, fetch_reports, sources
from trainer.data import problem_counts as reasons
from trainer.data.fetch_reports import Failure
from trainer.data.problem_counts import Problems
from trainer.data.raw_table import Table
from trainer.errors import DataError

logger = logging.getLogger(__name__)

VERSION = 5
"""Raise it when the same source gives other raw tables."""


def fingerprint(*parts: Any) -> str:
    """Return 16 hex digits that name what was made from these parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def choices(config: DataConfig) -> list[Any]:
    """Return what of a configuration decides which images and boxes the raw tables have."""
    chosen = [config.val_fraction, config.classes, config.max_images, config.empty_images]
    # Tables from before there was a test_fraction keep their names.
    return [*chosen, config.test_fraction] if config.test_fraction else chosen


def download(source: str, data_root: str, config: DataConfig) -> dict[str, Any]:
    """Bring a source's images and annotations under the data root, or find them there.

    A call that was killed is continued: images that are there are not fetched again.

    Args:
        source: e.g. "sample", "coco:PATH", "voc:PATH"; see `sources.parse`.
        data_root: URI of a folder, local or in an object store.
        config: how much may be bad, which classes, how many connections.

    Returns:
        The manifest, which is in `<uri>/manifest.json` too.

    Raises:
        DataError: the source is missing, empty, not of its format, or too much of it is bad.
        StorageError: the data root cannot be written.
    """
    planned = plan(source, data_root, config)
    fetch_partition(planned, config)
    return join(planned, config)


def plan(source: str, data_root: str, config: DataConfig) -> dict[str, Any]:
    """List a source and write its annotations as tables, or find them there.

    Args:
        source: see `download`.
        data_root: URI of a folder.
        config: classes, boxes_from, val_fraction, test_fraction, max_images, empty_images and
            max_bad_fraction are used.

    Returns:
        kind, version, uri, fingerprint, source, images (URI of the images' folder), splits
        (images and boxes of each), categories, hierarchy, problems; it is in `<uri>/plan.json` too.

    Raises:
        DataError: the source is missing, empty or not of its format, or too many of its boxes cannot be used.
        StorageError: the data root cannot be written.
    """
    origin = sources.parse(source, config.boxes_from, config.allow_hosts)
    listing = origin.listing()
    name = fingerprint("raw", VERSION, origin.uri, listing.state, *choices(config))
    root = storage.absolute(data_root)
    uri = storage.join(root, "raw", name)
    plan_uri = storage.join(uri, "plan.json")
    if storage.exists(plan_uri):
        planned_before: dict[str, Any] = storage.read_json(plan_uri)
        problems = Problems()
        problems.merge(planned_before["problems"])
        annotations.check_listed(problems, origin.uri, planned_before["splits"], config)
        return planned_before
    storage.remove_stale(uri)
    built = annotations.build(listing, config, uri, origin.uri)
    planned = {
        "kind": "plan",
        "version": VERSION,
        "uri": uri,
        "fingerprint": name,
        "source": origin.uri,
        "images": storage.join(root, "images", fingerprint(origin.images_uri)),
        "splits": built.splits,
        "categories": built.categories,
        "hierarchy": built.hierarchy,
        "problems": listing.problems.to_json(),
    }
    storage.write_json(plan_uri, planned)
    counts = ", ".join(f"{split['images']} {name}" for name, split in built.splits.items())
    logger.info("listed %s: %s images in %s", planned["source"], counts, uri)
    return planned


def fetch_partition(
    planned: dict[str, Any], config: DataConfig, partition: int = 0, partitions: int = 1
) -> None:
    """Fetch the images of one of several partitions; those that are there are not fetched again.

    Those that failed in an earlier call, and were not just missing, are tried again; also where the
    download was good enough without them, and then it stays so if the source is down.

    Args:
        planned: what `plan` returned.
        config: connections, and how much may be bad.
        partition: which, from 0.
        partitions: how many.

    Raises:
        DataError: far too many cannot be had.
        StorageError: the data root cannot be written.
    """
    earlier = _finished(planned)
    if earlier and not _incomplete(earlier):
        if partitions > 1:  # Of a single one `join` tells.
            logger.info("raw images of %s are there already: %s", planned["source"], planned["uri"])
        return
    report = fetch_reports.place(planned["uri"], partition, partitions)
    if storage.exists(report) and not fetch_reports.worth_another_try(report):
        logger.info("the images of partition %d of %d are there already", partition + 1, partitions)
        return
    try:
        fetch.run(planned, config, partition, partitions)
    except fetch.SourceDown as error:
        if not earlier:
            raise
        logger.warning("%s; going on without what an earlier download did not get either", error.message)
        fetch.run(planned, config, partition, partitions, again=False)


def join(planned: dict[str, Any], config: DataConfig, partitions: int = 1) -> dict[str, Any]:
    """Put together what the partitions fetched, or find it there.

    Args:
        planned: what `plan` returned; or a manifest, which is then left as it is.
        config: how much may be bad.
        partitions: how many there were.

    Returns:
        The manifest: as `planned`, with kind "raw", splits and problems as they are now, and content,
        which tells which of the images are there.

    Raises:
        DataError: more cannot be had than `data.max_bad_fraction` allows.
        StorageError: a partition's report is missing.
    """
    uri = planned["uri"]
    manifest = _finished(planned) if planned["kind"] == "plan" else planned
    if not manifest or (_incomplete(manifest) and planned["kind"] == "plan"):
        gathered, sizes, failed = _gather(planned, partitions)
        if gathered != manifest:
            _write_arrays(uri, sizes, failed)
            _check(gathered, config)
            storage.write_json(storage.join(uri, "manifest.json"), gathered)
            counts = ", ".join(f"{split['images']} {name}" for name, split in gathered["splits"].items())
            problems = Problems()
            problems.merge(gathered["problems"])
            summary = f" ({problems.summary()})" if problems.counts else ""
            logger.info("raw images of %s: %s in %s%s", gathered["source"], counts, uri, summary)
            return gathered
    logger.info("raw images of %s are there already: %s", manifest["source"], uri)
    _check(manifest, config)
    return manifest


def _finished(planned: dict[str, Any]) -> dict[str, Any] | None:
    """Return the manifest of a download that was good enough; None if there is none."""
    uri = storage.join(planned["uri"], "manifest.json")
    return storage.read_json(uri) if storage.exists(uri) else None


def _incomplete(manifest: dict[str, Any]) -> bool:
    """Tell whether it is worth to try again what a download did not get."""
    return any(reason in manifest["problems"] for reason in reasons.TRIED_AGAIN)


def _gather(planned: dict[str, Any], partitions: int) -> tuple[dict[str, Any], np.ndarray, list[Failure]]:
    """Return the manifest of what the partitions' reports tell, the bytes of each image, the failures."""
    problems = Problems()
    problems.merge(planned["problems"])
    sizes = np.zeros(sum(split["images"] for split in planned["splits"].values()), np.int32)
    failed: list[Failure] = []
    for partition in range(partitions):
        ids, fetched, faults = fetch_reports.read(fetch_reports.place(planned["uri"], partition, partitions))
        sizes[ids - 1] = fetched
        failed += faults
    for failure in sorted(failed):  # The examples are the same whatever the partitions are.
        problems.add(failure.reason, failure.message)
    manifest = planned | {
        "kind": "raw",
        "content": content_of(sizes),
        "splits": _counts(planned, sizes),
        "problems": problems.to_json(),
    }
    return manifest, sizes, failed


def content_of(sizes: np.ndarray) -> str:
    """Return 16 hex digits that tell which images are there, from the bytes of each (0: not there)."""
    return hashlib.sha256(sizes.astype("<i4").tobytes()).hexdigest()[:16]


def sizes_uri(raw: str, content: str) -> str:
    """Return where the bytes of each image are: a .npy file, int32 [images], 0 where one is not there.

    Args:
        raw: URI of the raw folder.
        content: see `content_of`.
    """
    return storage.join(raw, f"sizes-{content}.npy")


def _counts(planned: dict[str, Any], sizes: np.ndarray) -> dict[str, dict[str, int]]:
    """Return images and boxes of each split without those that cannot be had."""
    counts = {}
    first = 0
    for split, listed in planned["splits"].items():
        stored = sizes[first : first + listed["images"]] > 0
        first += listed["images"]
        boxes = listed["boxes"]
        if not stored.all():
            table = Table(storage.join(planned["uri"], f"{split}.parquet"))
            each = np.concatenate([table.box_counts(block) for block in range(table.blocks)])
            boxes = int(each[stored].sum())
        counts[split] = {"images": int(stored.sum()), "boxes": boxes}
    return counts


def _write_arrays(uri: str, sizes: np.ndarray, failed: list[Failure]) -> None:
    buffer = io.BytesIO()
    np.save(buffer, sizes, allow_pickle=False)
    storage.write_bytes(sizes_uri(uri, content_of(sizes)), buffer.getvalue())
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Failure._fields)
    writer.writerows(sorted(failed))
    storage.write_bytes(storage.join(uri, "failed.csv"), text.getvalue().encode())


def _check(manifest: dict[str, Any], config: DataConfig) -> None:
    """Warn of what the user should know; raise DataError if too much is bad."""
    problems = Problems()
    problems.merge(manifest["problems"])
    images = sum(counts["images"] for counts in manifest["splits"].values())
    boxes = sum(counts["boxes"] for counts in manifest["splits"].values())
    problems.check(
        manifest["source"],
        images=images + problems.total(reasons.BAD_IMAGES),
        boxes=boxes + problems.total(reasons.UNLISTED_BOXES),
        max_bad_fraction=config.max_bad_fraction,
    )
    if images == 0 or not manifest["splits"].get("train", {}).get("images"):
        raise DataError(f"{manifest['source']}: no training image could be read", fix="check the source")
    empty = problems.examples.get(reasons.CLASS_WITHOUT_BOXES, [])
    if empty:
        logger.warning(
            "%d classes have no box in train and cannot be learned: %s%s; add images of them, or leave "
            "them out with data.classes",
            problems.counts[reasons.CLASS_WITHOUT_BOXES],
            ", ".join(empty),
            ", ..." if len(empty) < problems.counts[reasons.CLASS_WITHOUT_BOXES] else "",
        )
