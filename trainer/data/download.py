"""From a source to raw images and annotations under the data root.

<data_root>/raw/<fingerprint>/images/<split>/<key>.<ext>   bytes as the source has them
<data_root>/raw/<fingerprint>/annotations/<split>.json     internal form, not yet cleaned
<data_root>/raw/<fingerprint>/manifest.json                written last
"""

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainer import storage
from trainer.config import DataConfig
from trainer.data import annotations, pool, sources
from trainer.data import problems as reasons
from trainer.data.problems import Problems
from trainer.data.sources.base import Entry, Source
from trainer.errors import DataError, StorageError
from trainer.log import progress

logger = logging.getLogger(__name__)

VERSION = 1


def fingerprint(*parts: Any) -> str:
    """Return 16 hex digits that name what was made from these parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


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
    found = sources.parse(source)
    listing = found.listing()
    print_of_source = fingerprint(
        "raw", VERSION, found.uri, listing.state, config.val_fraction, config.classes
    )
    uri = storage.join(storage.absolute(data_root), "raw", print_of_source)
    manifest_uri = storage.join(uri, "manifest.json")
    if storage.exists(manifest_uri):
        logger.info("raw images of %s are there already: %s", found.uri, uri)
        manifest = storage.read_json(manifest_uri)
        _check(manifest, config)
        return manifest
    forms, entries_of = annotations.build(listing, config)
    failed = _fetch(found, forms, entries_of, uri, config, listing.problems)
    for split, form in forms.items():
        _leave_out(form, failed.get(split, set()))
        storage.write_json(storage.join(uri, "annotations", f"{split}.json"), form)
    manifest = {
        "kind": "raw",
        "version": VERSION,
        "uri": uri,
        "fingerprint": print_of_source,
        "source": found.uri,
        "splits": {
            split: {"images": len(form["images"]), "boxes": len(form["annotations"])}
            for split, form in forms.items()
        },
        "categories": [category["name"] for category in forms["train"]["categories"]],
        "problems": listing.problems.to_json(),
    }
    _check(manifest, config)
    storage.write_json(manifest_uri, manifest)
    logger.info(
        "raw images of %s: %s in %s%s",
        found.uri,
        ", ".join(f"{counts['images']} {split}" for split, counts in manifest["splits"].items()),
        uri,
        f" ({listing.problems.summary()})" if listing.problems.counts else "",
    )
    return manifest


@dataclass(frozen=True)
class _Task:
    """One image to fetch."""

    source: Source
    entry: Entry
    split: str
    file_name: str
    target: str


def _fetch(
    source: Source,
    forms: dict[str, dict[str, Any]],
    entries_of: dict[str, list[Entry]],
    uri: str,
    config: DataConfig,
    problems: Problems,
) -> dict[str, set[str]]:
    """Write all images that are not there yet; return the file names that failed, by split."""
    # An empty file is what a power cut leaves of one that was not flushed.
    there = {
        split: {
            name
            for name, state in storage.list_states(storage.join(uri, "images", split)).items()
            if state.size > 0
        }
        for split in forms
    }
    total = sum(len(form["images"]) for form in forms.values())
    storage.remove_stale(uri)
    failed: dict[str, set[str]] = {}
    allowed = max(reasons.EXAMPLES, config.max_bad_fraction * total)

    def tasks() -> Iterator[_Task]:
        for split, form in forms.items():
            for image, entry in zip(form["images"], entries_of[split], strict=True):
                if image["file_name"] not in there[split]:
                    target = storage.join(uri, "images", split, image["file_name"])
                    yield _Task(source, entry, split, image["file_name"], target)

    done = sum(
        image["file_name"] in there[split] for split, form in forms.items() for image in form["images"]
    )
    workers = (config.processes or pool.available_cores()) if source.cpu_bound else config.threads
    workers = min(workers, max(1, total - done))
    with progress("download", total, "images", done=done) as bar:
        for task, fault in pool.run(_save, tasks(), workers, processes=source.cpu_bound):
            if fault:
                failed.setdefault(task.split, set()).add(task.file_name)
                problems.add(fault[0], f"{task.split}/{task.entry.file_name}: {fault[1]}")
                if problems.total(reasons.BAD_IMAGES) > allowed:
                    problems.check(
                        "download", images=total, boxes=0, max_bad_fraction=config.max_bad_fraction
                    )
            bad = sum(map(len, failed.values()))
            bar.update(note=f"{bad} missing" if bad else "")
    return failed


def _save(task: _Task) -> tuple[_Task, tuple[str, str] | None]:
    """Fetch one image; return the task and, if it cannot be had, the reason and details."""
    if task.entry.fault:
        return task, task.entry.fault
    try:
        data = task.source.read(task.entry)
    except StorageError as error:
        return task, (reasons.IMAGE_MISSING, error.message)
    # Flushing each image to the disk would take longer than fetching it.
    storage.write_bytes(task.target, data, sync=False)
    return task, None


def _leave_out(form: dict[str, Any], file_names: set[str]) -> None:
    """Take images that could not be fetched out of the internal form, with their boxes."""
    if not file_names:
        return
    form["images"] = [image for image in form["images"] if image["file_name"] not in file_names]
    kept = {image["id"] for image in form["images"]}
    form["annotations"] = [box for box in form["annotations"] if box["image_id"] in kept]


def _check(manifest: dict[str, Any], config: DataConfig) -> None:
    """Warn of what the user should know; raise DataError if too much is bad."""
    problems = Problems()
    problems.merge(manifest["problems"])
    images = sum(counts["images"] for counts in manifest["splits"].values())
    boxes = sum(counts["boxes"] for counts in manifest["splits"].values())
    problems.check(
        manifest["source"],
        images=images + problems.total(reasons.BAD_IMAGES),
        boxes=boxes + problems.total([reasons.BOX_UNKNOWN_IMAGE]),
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
