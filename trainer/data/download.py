"""Downloads a source's images and annotations to the data root.

<data_root>/images/<source>/<2 hex>/<key>-<digest>.<ext>   unchanged bytes of the source
<data_root>/raw/<fingerprint>/                             see `trainer.data.raw_folder`

The processes that torchrun started share the work: rank 0 lists the source, each process fetches the images
of the next free part, and rank 0 writes the manifest.
"""

import csv
import hashlib
import io
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pyarrow.compute as pc

from trainer import storage
from trainer.base import events
from trainer.base.errors import DamagedError, DataError, FormatError, MissingError
from trainer.base.log import log_activity
from trainer.config.schema import DataConfig
from trainer.data import annotations, plausibility, raw_folder, raw_manifest, sources
from trainer.data import problem_counts as reasons
from trainer.data.image_fetching import (
    ONE_LISTING_LIMIT,
    SHA256,
    Failure,
    ImageFetcher,
    SourceUnreachable,
    StoredImages,
    count_parts,
    read_reports,
)
from trainer.data.problem_counts import Problems
from trainer.data.raw_folder import VERSION
from trainer.data.raw_manifest import RawManifest, SplitCounts
from trainer.data.sources.files import read_entries
from trainer.launching.shared_work import SharedWork, join_shared_work

logger = logging.getLogger(__name__)

SETTINGS = (
    "val_fraction", "test_fraction", "classes", "max_images", "empty_images", "boxes_from", "box_format",
    "exclude", "allow_hosts",
)  # fmt: skip
"""Keys of the section `data` that determine the raw tables."""


def fingerprint(*parts: Any) -> str:
    """Return a hash of the parts, 16 hex digits, that names their result."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def select_table_settings(config: DataConfig) -> list[Any]:
    """Return the settings that determine images and boxes of the raw tables, except exclusions."""
    return [getattr(config, key) for key in SETTINGS if key not in ("exclude", "allow_hosts")]


def read_excluded(uri: str) -> list[str]:
    """Read data.exclude: sorted names and hashes of images; [] if no file is set."""
    if not uri:
        return []
    try:
        return sorted({line.lower() if SHA256.fullmatch(line) else line for line in read_entries(uri)})
    except MissingError as error:
        fix = "set data.exclude to a file that the step can read, or leave it unset"
        raise DataError(f"data.exclude: {error.message}", fix=fix) from None


def download(
    source: str, data_root: str, config: DataConfig, excluded: list[str] | None = None
) -> RawManifest:
    """Download a source (see `sources.parse`) to a data root, unless it is there; return its manifest.

    A repeated call continues an interrupted download. For `excluded` see `plan`.

    Raises:
        DataError: the source is missing, empty, not of its format, or has too many problems.
        StorageError: the data root cannot be written.
    """
    with join_shared_work() as work:
        planned = work.run_on_first(lambda: plan(source, data_root, config, excluded))
        return fetch(planned, config, work)


def plan(source: str, data_root: str, config: DataConfig, excluded: list[str] | None = None) -> RawManifest:
    """List a source and write its annotations as tables, unless they exist; return the plan.

    `excluded` are the lines of data.exclude; None reads the file.

    Raises:
        DataError: the source is missing, empty or not of its format, or too many of its boxes are unusable or
            almost certainly wrong (see `trainer.data.plausibility`).
        StorageError: the data root cannot be written.
    """
    origin = sources.parse(source, config)
    with log_activity(logger, f"listing {origin.uri}"):
        listing = origin.listing()
    root = storage.absolute(data_root)
    if excluded is None:
        excluded = read_excluded(config.exclude)
    name = fingerprint("raw", VERSION, origin.uri, listing.state, select_table_settings(config), excluded)
    uri = storage.join(root, "raw", name)
    if storage.exists(storage.join(uri, raw_manifest.PLAN)):
        try:
            found = raw_folder.read_manifest(uri, raw_manifest.PLAN)
            for split in found.splits:
                storage.local_copy(storage.join(uri, f"{split}.parquet"), sha256=found.tables.get(split, ""))
            annotations.check_listed_boxes(
                Problems.from_cases(found.problems), origin.uri, found.splits, config
            )
            return found
        except (DamagedError, FormatError, MissingError) as error:
            logger.warning("%s; repairing it from the source", error.message)
    storage.remove_stale(uri)
    with log_activity(logger, f"reading the annotations of {origin.uri}"):
        built = annotations.write_tables(listing, config, uri, origin.uri, frozenset(excluded))
    planned = RawManifest(
        "plan",
        VERSION,
        name,
        origin.uri,
        images=storage.join(root, "images", fingerprint(origin.images_uri)),
        problems=listing.problems.cases(),
        settings={key: getattr(config, key) for key in SETTINGS},
        excluded=excluded,
        uri=uri,
        **vars(built),
    )
    planned.write()
    for warning in built.warnings:
        logger.warning("%s", warning)
    logger.info("listed %s: %s images in %s", planned.source, _format_image_counts(planned), uri)
    return planned


def find_complete(planned: RawManifest, config: DataConfig) -> RawManifest | None:
    """Return the manifest if all images of the plan are stored, else None."""
    manifest = _find_manifest(planned)
    if manifest is None or manifest.unfetched:
        return None
    storage.touch(storage.join(manifest.uri, raw_manifest.MANIFEST))
    fetched = raw_folder.read_image_table(manifest)
    fetched = fetched[fetched["bytes"] > 0]
    stored = StoredImages(manifest.images, one_listing=len(fetched) <= ONE_LISTING_LIMIT)
    if (stored.sizes(fetched["place"]) != fetched["bytes"]).any():
        return None
    check(manifest, config)
    logger.info("raw images of %s are there already: %s", manifest.source, manifest.uri)
    events.emit(events.ResultReused(uri=manifest.uri))
    return manifest


def _find_manifest(planned: RawManifest) -> RawManifest | None:
    """Return the manifest of an earlier download of a plan if it is intact, else None."""
    if not storage.exists(storage.join(planned.uri, raw_manifest.MANIFEST)):
        return None
    try:
        manifest = raw_folder.read_manifest(planned.uri)
        raw_folder.read_image_table(manifest)
    except (DamagedError, FormatError, MissingError) as error:
        logger.warning("%s; repairing it", error.message)
        return None
    return manifest if manifest.tables == planned.tables else None


def fetch(planned: RawManifest, config: DataConfig, work: SharedWork) -> RawManifest:
    """Fetch the missing images of a plan, and return the manifest.

    Images that failed in an earlier download are requested again. If the source is down, and an earlier
    download was complete enough, they are left out again.
    """
    if manifest := work.run_on_first(lambda: find_complete(planned, config)):
        return manifest
    known, known_failures = read_reports(planned)
    parts = work.take_parts("images", count_parts(planned))
    fetching = ImageFetcher(planned, config, known, {}, work.size)
    try:
        fetching.run(parts)
    except SourceUnreachable as error:
        if _find_manifest(planned) is None:
            raise
        logger.warning("%s; continuing without the images that failed in an earlier download", error.message)
        remaining = chain(fetching.open_parts, parts)
        ImageFetcher(planned, config, known, known_failures, work.size).run(remaining)
    return work.run_on_first(lambda: write_manifest(planned, config))


def write_manifest(planned: RawManifest, config: DataConfig) -> RawManifest:
    """Write and return the manifest of the fetched images."""
    fetched, failed = read_reports(planned, complete=True)
    failures = sorted(failed.values())
    problems = Problems.from_cases(planned.problems)
    for failure in failures:
        problems.add(failure.reason, f"{failure.split}/{failure.file_name}: {failure.detail}")
    for copy in _find_unlabeled_copies(planned, fetched):
        problems.add(reasons.IMAGE_COPY_WITHOUT_BOXES, copy)
    splits, first = {}, 0
    for split, listed in planned.splits.items():
        is_stored = fetched["bytes"][first : first + listed.images] > 0
        first += listed.images
        boxes = listed.boxes
        if not is_stored.all():
            table = raw_folder.open_table(planned, split)
            lists = [table.read_block(block, ["boxes"])["boxes"] for block in range(table.block_count)]
            counts = np.concatenate([pc.list_value_length(boxes).to_numpy() for boxes in lists])
            boxes = int(counts[is_stored].sum())
        splits[split] = SplitCounts(int(is_stored.sum()), boxes)
    content = raw_folder.write_image_table(planned.uri, fetched)
    text = io.StringIO()
    columns = Failure._fields[:-1]
    csv.writer(text, lineterminator="\n").writerows(
        [columns, *(failure[: len(columns)] for failure in failures)]
    )
    storage.write_bytes(storage.join(planned.uri, "failed.csv"), text.getvalue().encode())
    manifest = replace(
        planned,
        kind="raw",
        content=content,
        splits=splits,
        problems=problems.cases(),
        unfetched=sum(failure.requested for failure in failures),
    )
    check(manifest, config)
    if manifest == _find_manifest(planned):
        storage.touch(storage.join(manifest.uri, raw_manifest.MANIFEST))
        logger.info("raw images of %s are there already: %s", manifest.source, manifest.uri)
        return manifest
    manifest.write()
    summary = f" ({problems.summary()})" if problems.counts else ""
    logger.info(
        "raw images of %s: %s in %s%s", manifest.source, _format_image_counts(manifest), manifest.uri, summary
    )
    return manifest


def _find_unlabeled_copies(planned: RawManifest, fetched: np.ndarray) -> Iterator[str]:
    """Yield `plausibility.unlabeled_copies` of the fetched images, in the order of the splits."""
    starts = np.ascontiguousarray(fetched["sha256"]).view(np.uint64)[::4]
    values, counts = np.unique(starts, return_counts=True)
    is_repeated = np.isin(starts, values[(counts > 1) & (values != 0)])
    if not is_repeated.any():
        return
    images, first = [], 0
    for split, listed in planned.splits.items():
        table, in_split = raw_folder.open_table(planned, split), is_repeated[first : first + listed.images]
        for block in range(table.block_count):
            rows = np.flatnonzero(in_split[block * raw_folder.BLOCK :][: raw_folder.BLOCK])
            if len(rows):
                columns = table.read_block(block, ["image_id", "file_name", "boxes"]).take(rows).to_pydict()
                for image_id, name, boxes in zip(*columns.values(), strict=True):
                    images.append((fetched["sha256"][image_id - 1].tobytes(), f"{split}/{name}", bool(boxes)))
        first += listed.images
    yield from plausibility.unlabeled_copies(images)


def _format_image_counts(raw: RawManifest) -> str:
    return ", ".join(f"{split.images} {name}" for name, split in raw.splits.items())


def check(manifest: RawManifest, config: DataConfig) -> None:
    """Raise DataError if raw images have too many problems; warn about classes without boxes."""
    problems = Problems.from_cases(manifest.problems)
    manifest.check(manifest.source, problems, config.max_bad_fraction)
    if "train" not in manifest.splits or not manifest.splits["train"].images:
        raise DataError(f"{manifest.source}: no training image could be read", fix="check the source")
    if count := problems.counts.get(reasons.CLASS_WITHOUT_BOXES, 0):
        shown = problems.examples[reasons.CLASS_WITHOUT_BOXES]
        logger.warning(
            "%d classes have no box in train and cannot be learned: %s%s; add images of them, or leave "
            "them out with data.classes",
            count,
            ", ".join(shown),
            ", ..." if len(shown) < count else "",
        )
