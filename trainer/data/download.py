"""Downloads a source's images and annotations to the data root.

<data_root>/images/<source>/<2 hex>/<key>-<digest>.<ext>   bytes as the source has them
<data_root>/raw/<fingerprint>/                             see `trainer.data.raw_folder`

`download` does everything in one process. Several machines share the work by `plan`, `fetch_partition` for
each part, and `join`.
"""

import hashlib
import json
import logging
from dataclasses import replace
from typing import Any

import numpy as np

from trainer import storage
from trainer.base.errors import DataError
from trainer.config.schema import DataConfig
from trainer.data import annotations, exclusions, fetch, raw_folder, sources
from trainer.data import problem_counts as reasons
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
"""Keys of the section `data` that determine raw tables."""


def fingerprint(*parts: Any) -> str:
    """Return 16 hex digits that name the result of these parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def choices(config: DataConfig) -> list[Any]:
    """Return the parts of a configuration that determine the images and boxes of raw tables."""
    chosen = [config.val_fraction, config.classes, config.max_images, config.empty_images]
    # Tables that are older than these keys keep their names.
    later = {key: getattr(config, key) for key in ("boxes_from", "box_format", "merge_classes")}
    defaults = DataConfig()
    later = {key: value for key, value in later.items() if value != getattr(defaults, key)}
    return [*chosen, *([config.test_fraction] if config.test_fraction else []), *([later] if later else [])]


def download(source: str, data_root: str, config: DataConfig) -> RawManifest:
    """Download a source (see `sources.parse`) to a data root, or find it there; return its manifest.

    A killed call is continued: stored images are not fetched again.

    Raises:
        DataError: the source is missing, empty, not of its format, or too much of it is bad.
        StorageError: the data root cannot be written.
    """
    planned = plan(source, data_root, config)
    manifest = finished(planned, config)
    if manifest is None:
        fetch_partition(planned, config)
        manifest = join(planned, config)
    return manifest


def plan(source: str, data_root: str, config: DataConfig) -> RawManifest:
    """List a source and write its annotations as tables, or find them there; return the plan.

    Raises:
        DataError: the source is missing, empty or not of its format, too many of its boxes cannot be used, or
            they are almost certainly wrong (see `trainer.data.plausibility`).
        StorageError: the data root cannot be written.
    """
    origin = sources.parse(source, config)
    listing = origin.listing()
    root = storage.absolute(data_root)
    without = exclusions.names(root, origin.uri)
    left_out = [sorted(without)] if without else []
    name = fingerprint("raw", VERSION, origin.uri, listing.state, *choices(config), *left_out)
    uri = storage.join(root, "raw", name)
    found = raw_folder.find_plan(uri)
    if found and found.warnings is not None:
        annotations.check_listed(Problems.of(found.problems), origin.uri, found.splits, config)
        return found
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
    logger.info("listed %s: %s images in %s", planned.source, _image_counts(planned), uri)
    return planned


def finished(planned: RawManifest, config: DataConfig) -> RawManifest | None:
    """Return the manifest if all images of the source are stored, else None.

    Raises:
        DataError: see `join`.
        StorageError: the data root cannot be read.
    """
    manifest = raw_folder.find_manifest(planned)
    if manifest is None or manifest.unfetched or fetch.count_absent(manifest):
        return None
    check(manifest, config)
    logger.info("raw images of %s are there already: %s", manifest.source, manifest.uri)
    return manifest


def fetch_partition(
    planned: RawManifest, config: DataConfig, partition: int = 0, partitions: int = 1
) -> None:
    """Fetch the images of a partition (from 0) of up to 256 that are not stored.

    Images that failed in an earlier call are requested again. If the source is down, and an earlier download
    was good enough without them, they are left out again.

    Raises:
        DataError: far too many images cannot be fetched.
        StorageError: the data root cannot be written.
    """
    known = raw_folder.known_fetched(planned)
    try:
        fetched = fetch.run(planned, config, partition, partitions, known._replace(failures={}))
    except fetch.SourceDown as error:
        if raw_folder.find_manifest(planned) is None:
            raise
        logger.warning("%s; continuing without the images that an earlier download lacked", error.message)
        fetched = fetch.run(planned, config, partition, partitions, known)
    raw_folder.write_report(planned, partition, partitions, fetched)


def join(planned: RawManifest, config: DataConfig, partitions: int = 1) -> RawManifest:
    """Write and return the manifest of the images that all partitions fetched.

    Raises:
        DataError: more images are missing than `data.max_bad_fraction` allows.
        StorageError: a partition's report is missing.
    """
    sums, failed = raw_folder.read_reports(planned, partitions)
    failures = sorted(failed.values())  # The examples are the same for any number of partitions.
    problems = Problems.of(planned.problems)
    for failure in failures:
        problems.add(failure.reason, failure.message)
    content, digest = raw_folder.write_arrays(planned.uri, sums, failures)
    manifest = replace(
        planned,
        kind="raw",
        content=content,
        sums=digest,
        unfetched=sum(failure.requested for failure in failures),
        splits=_fetched_counts(planned, sums["bytes"]),
        problems=problems.cases(),
    )
    check(manifest, config)
    if manifest == raw_folder.find_manifest(planned):
        logger.info("raw images of %s are there already: %s", manifest.source, manifest.uri)
        return manifest
    manifest.write()
    summary = f" ({problems.summary()})" if problems.counts else ""
    logger.info(
        "raw images of %s: %s in %s%s", manifest.source, _image_counts(manifest), manifest.uri, summary
    )
    return manifest


def _image_counts(raw: RawManifest) -> str:
    return ", ".join(f"{split.images} {name}" for name, split in raw.splits.items())


def _fetched_counts(planned: RawManifest, sizes: np.ndarray) -> dict[str, SplitCounts]:
    """Return the numbers of fetched images and of their boxes by split."""
    counts = {}
    first = 0
    for split, listed in planned.splits.items():
        is_stored = sizes[first : first + listed.images] > 0
        first += listed.images
        boxes = listed.boxes
        if not is_stored.all():
            boxes = int(planned.table(split).box_counts()[is_stored].sum())
        counts[split] = SplitCounts(int(is_stored.sum()), boxes)
    return counts


def check(manifest: RawManifest, config: DataConfig) -> None:
    """Check raw images against the present configuration, and warn about classes without boxes.

    Raises:
        DataError: more images or boxes are bad than `data.max_bad_fraction` allows, or no image is left.
    """
    problems = Problems.of(manifest.problems)
    manifest.check(manifest.source, problems, config.max_bad_fraction)
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
