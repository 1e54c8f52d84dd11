"""From a source to raw images and annotations under the data root.

<data_root>/images/<source>/<2 hex>/<key>-<digest>.<ext>   bytes as the source has them
<data_root>/raw/<fingerprint>/<split>.parquet              annotations (see trainer.data.raw_folder)
<data_root>/raw/<fingerprint>/plan.json                    written when the tables are whole
<data_root>/raw/<fingerprint>/fetched/<k>-of-<n>.parquet   what one of n partitions brought
<data_root>/raw/<fingerprint>/sizes-<content>.npy          bytes of each image, by id; 0: not to be had
<data_root>/raw/<fingerprint>/sums-<digest>.npy            place, bytes and sha256 of each image, by id
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
from dataclasses import replace
from typing import Any

import numpy as np

from trainer import storage
from trainer.base.errors import DamagedError, DataError, FormError
from trainer.config.schema import DataConfig
from trainer.data import annotations, fetch, forgotten, raw_folder, sources
from trainer.data import problem_counts as reasons
from trainer.data.fetch import Failure
from trainer.data.problem_counts import Problems
from trainer.data.raw_folder import VERSION, RawManifest, SplitCounts

logger = logging.getLogger(__name__)

SETTINGS = (
    "val_fraction",
    "test_fraction",
    "classes",
    "max_images",
    "empty_images",
    "boxes_from",
    "box_format",
    "merge_classes",
    "allow_hosts",
)
"""Keys of the section `data` that decide on raw tables."""

_MENDING = "mending"
"""File of a raw folder whose manifest is older than the reports: images that had been lost came again."""


def fingerprint(*parts: Any) -> str:
    """Return 16 hex digits that name what was made from these parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def choices(config: DataConfig) -> list[Any]:
    """Return what of a configuration decides which images and boxes the raw tables have."""
    chosen = [config.val_fraction, config.classes, config.max_images, config.empty_images]
    # Tables from before there were these keys keep their names.
    later = {key: getattr(config, key) for key in ("boxes_from", "box_format", "merge_classes")}
    defaults = DataConfig()
    later = {key: value for key, value in later.items() if value != getattr(defaults, key)}
    return [*chosen, *([config.test_fraction] if config.test_fraction else []), *([later] if later else [])]


def download(source: str, data_root: str, config: DataConfig) -> RawManifest:
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


def plan(source: str, data_root: str, config: DataConfig) -> RawManifest:
    """List a source and write its annotations as tables, or find them there; damaged ones are mended.

    Args:
        source: see `download`.
        data_root: URI of a folder.
        config: classes, boxes_from, val_fraction, test_fraction, max_images, empty_images and
            max_bad_fraction are used.

    Returns:
        The plan, which is in `<uri>/plan.json` too.

    Raises:
        DataError: the source is missing, empty or not of its format, too many of its boxes cannot be used, or
            they are almost certainly wrong (see `trainer.data.plausibility`).
        StorageError: the data root cannot be written.
    """
    origin = sources.parse(source, config)
    listing = origin.listing()
    root = storage.absolute(data_root)
    without = forgotten.names(root, origin.uri)
    left_out = [sorted(without)] if without else []
    name = fingerprint("raw", VERSION, origin.uri, listing.state, *choices(config), *left_out)
    uri = storage.join(root, "raw", name)
    planned_before = _planned(uri)
    if planned_before and planned_before.warnings is not None:
        problems = Problems.of(planned_before.problems)
        annotations.check_listed(problems, origin.uri, planned_before.splits, config)
        return planned_before
    storage.remove_stale(uri)
    built = annotations.build(listing, config, uri, origin.uri, without)
    planned = RawManifest(
        "plan", VERSION, name, origin.uri,
        images=storage.join(root, "images", fingerprint(origin.images_uri)),
        problems=listing.problems.cases(),
        settings={key: getattr(config, key) for key in SETTINGS},
        uri=uri,
        **vars(built),
    )  # fmt: skip
    planned.write()
    for warning in built.warnings:
        logger.warning("%s", warning)
    counts = ", ".join(f"{split.images} {name}" for name, split in built.splits.items())
    logger.info("listed %s: %s images in %s", planned.source, counts, uri)
    return planned


def is_complete(planned: RawManifest) -> bool:
    """Return whether all images of a plan that can be had are stored, so that nothing has to be fetched.

    Raises:
        StorageError: the data root cannot be read.
    """
    manifest = _finished(planned)
    if manifest is None or manifest.unfetched or storage.exists(_mending(planned)):
        return False
    return fetch.absent(manifest, 0, 1) == 0


def fetch_partition(
    planned: RawManifest, config: DataConfig, partition: int = 0, partitions: int = 1
) -> None:
    """Fetch the images of one of several partitions; those that are there are not fetched again.

    Those that failed in an earlier call are asked for again, for a source may be mended; also where the
    download was good enough without them, and then it stays so if the source is down. Those that an earlier
    call brought, and that are missing now or cut off, are fetched again.

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
    lost = earlier is not None and fetch.absent(earlier, partition, partitions) > 0
    if earlier and not lost and not earlier.unfetched:
        if partitions > 1:  # Of a single one `join` tells.
            logger.info("raw images of %s are there already: %s", planned.source, planned.uri)
        return
    report = fetch.report_uri(planned.uri, partition, partitions)
    if lost:
        storage.write_bytes(_mending(planned), b"")
    if not lost and storage.exists(report) and not fetch.worth_another_try(report):
        logger.info("the images of partition %d of %d are there already", partition + 1, partitions)
        return
    try:
        fetch.run(planned, config, partition, partitions)
    except fetch.SourceDown as error:
        if not earlier:
            raise
        logger.warning("%s; going on without what an earlier download did not get either", error.message)
        fetch.run(planned, config, partition, partitions, again=False)


def join(planned: RawManifest, config: DataConfig, partitions: int = 1) -> RawManifest:
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
    uri = planned.uri
    mending = _mending(planned)
    manifest = _finished(planned) if planned.kind == "plan" else planned
    stale = manifest is None or manifest.unfetched or storage.exists(mending)
    if manifest is None or (planned.kind == "plan" and stale):
        gathered, sums, failed = _gather(planned, partitions)
        if gathered == manifest:
            storage.delete(mending)
        else:
            _write_arrays(uri, sums, failed)
            _check(gathered, config)
            gathered.write()
            storage.delete(mending)
            counts = ", ".join(f"{split.images} {name}" for name, split in gathered.splits.items())
            problems = Problems.of(gathered.problems)
            summary = f" ({problems.summary()})" if problems.counts else ""
            logger.info("raw images of %s: %s in %s%s", gathered.source, counts, uri, summary)
            return gathered
    logger.info("raw images of %s are there already: %s", manifest.source, uri)
    _check(manifest, config)
    return manifest


def _planned(folder: str) -> RawManifest | None:
    """Return the plan that is there with whole tables; None where it has to be made, or made anew.

    Raises:
        DataError: it is of a newer version.
        StorageError: the folder cannot be read.
    """
    if not storage.exists(storage.join(folder, raw_folder.PLAN)):
        return None
    try:
        planned = raw_folder.read_plan(folder)
        fault = raw_folder.table_fault(planned)
    except (DamagedError, FormError) as error:
        fault = error.message
    if fault:
        logger.warning("%s; mending it from the source", fault)
        return None
    return planned


def _finished(planned: RawManifest) -> RawManifest | None:
    """Return the manifest of a download that was good enough; None if there is none that is whole."""
    if not storage.exists(storage.join(planned.uri, raw_folder.MANIFEST)):
        return None
    try:
        manifest = raw_folder.read_manifest(planned.uri)
        fault = raw_folder.arrays_fault(manifest)
    except (DamagedError, FormError) as error:
        fault = error.message
    if fault:
        logger.warning("%s; mending it", fault)
    elif manifest.tables == planned.tables:
        return manifest
    return None


def _mending(planned: RawManifest) -> str:
    return storage.join(planned.uri, _MENDING)


def _gather(planned: RawManifest, partitions: int) -> tuple[RawManifest, np.ndarray, list[Failure]]:
    """Return the manifest of what the partitions' reports tell, rows of SUM of each image, the failures."""
    problems = Problems.of(planned.problems)
    sums = np.zeros(planned.listed_images, raw_folder.SUM)
    failed: list[Failure] = []
    for partition in range(partitions):
        report = fetch.read_report(fetch.report_uri(planned.uri, partition, partitions))
        sums[report.ids - 1] = report.sums
        failed += report.failures
    for failure in sorted(failed):  # The examples are the same whatever the partitions are.
        problems.add(failure.reason, failure.message)
    sizes = sums["bytes"]
    manifest = replace(
        planned,
        kind="raw",
        content=raw_folder.content_of(sizes),
        sums=raw_folder.digest_of(sums),
        unfetched=sum(failure.requested for failure in failed),
        splits=_counts(planned, sizes),
        problems=problems.cases(),
    )
    return manifest, sums, failed


def _counts(planned: RawManifest, sizes: np.ndarray) -> dict[str, SplitCounts]:
    """Return images and boxes of each split without those that cannot be had."""
    counts = {}
    first = 0
    for split, listed in planned.splits.items():
        stored = sizes[first : first + listed.images] > 0
        first += listed.images
        boxes = listed.boxes
        if not stored.all():
            table = planned.table(split)
            each = np.concatenate([table.box_counts(block) for block in range(table.blocks)])
            boxes = int(each[stored].sum())
        counts[split] = SplitCounts(int(stored.sum()), boxes)
    return counts


def _write_arrays(uri: str, sums: np.ndarray, failed: list[Failure]) -> None:
    raw_folder.write_sizes(uri, sums["bytes"])
    raw_folder.write_sums(uri, sums)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = Failure._fields[:-1]
    writer.writerow(columns)
    writer.writerows(failure[: len(columns)] for failure in sorted(failed))
    storage.write_bytes(storage.join(uri, "failed.csv"), text.getvalue().encode())


def _check(manifest: RawManifest, config: DataConfig) -> None:
    """Warn of what the user should know; raise DataError if too much is bad."""
    problems = Problems.of(manifest.problems)
    problems.check(
        manifest.source,
        images=manifest.listed_images + problems.total(reasons.BAD_IMAGES),
        boxes=manifest.listed_boxes + problems.total(reasons.UNLISTED_BOXES),
        max_bad_fraction=config.max_bad_fraction,
    )
    if "train" not in manifest.splits or not manifest.splits["train"].images:
        raise DataError(f"{manifest.source}: no training image could be read", fix="check the source")
    empty = problems.examples.get(reasons.CLASS_WITHOUT_BOXES, [])
    if empty:
        logger.warning(
            "%d classes have no box in train and cannot be learned: %s%s; add images of them, or leave "
            "them out with data.classes",
            problems.counts[reasons.CLASS_WITHOUT_BOXES],
            ", ".join(empty),
            ", ..." if len(empty) < problems.counts[reasons.CLASS_WITHOUT_BOXES] else "",
        )
