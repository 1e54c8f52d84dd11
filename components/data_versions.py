"""Versions of the data: a name for the content of a source when it was read.

<data_root>/versions/<version>-<digest of source and settings>.json names the raw folder and its content. A
run with a known version gets the same images and boxes again, even if the source has changed since.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from components.records import KEY
from trainer import storage
from trainer.base import typed_json
from trainer.base.errors import DataError, check_name
from trainer.config.schema import DataConfig
from trainer.data import raw_folder
from trainer.data.download import check as check_raw
from trainer.data.download import choices, download, fingerprint
from trainer.data.problem_counts import Cases
from trainer.data.raw_folder import RawManifest, SplitCounts, images_uri

_VERSION_FIX = "choose another data_version"


@dataclass(frozen=True)
class Pinned:
    """The fields of a raw manifest that another download into the same folder may change."""

    content: str
    splits: dict[str, SplitCounts]
    problems: dict[str, Cases]
    unfetched: int = 0


@dataclass(frozen=True)
class DataVersion:
    """The file of a version."""

    kind: str
    version: int
    data_version: str
    source: str
    raw: str  # Folder of the raw data, below the data root.
    fingerprint: str
    pinned: Pinned | None = None  # None in files from before 0.2.
    recorded: str = ""


def fetch(
    source: str,
    data_root: str,
    config: DataConfig,
    version: str,
    fetch_raw: Callable[[], RawManifest] | None = None,
) -> RawManifest:
    """Fetch a source's data, or return those of a known version; `fetch_raw` is by default `download`."""
    if manifest := known(source, data_root, config, version):
        return manifest
    manifest = fetch_raw() if fetch_raw else download(source, data_root, config)
    if not version:
        return manifest
    uri, record = _recorded(source, data_root, config, version)
    if record and (
        record.fingerprint != manifest.fingerprint
        or (record.pinned and record.pinned.content != manifest.content)
    ):
        raise DataError(
            f"the data of version {version} was deleted, and {source} has changed since", fix=_VERSION_FIX
        )
    recorded = DataVersion(
        "data version",
        1,
        version,
        source,
        f"raw/{manifest.fingerprint}",
        manifest.fingerprint,
        Pinned(manifest.content, manifest.splits, manifest.problems, manifest.unfetched),
        datetime.now(UTC).isoformat(timespec="seconds"),
    )
    storage.write_json(uri, asdict(recorded))
    return replace(manifest, data_version=version)


def known(source: str, data_root: str, config: DataConfig, version: str) -> RawManifest | None:
    """Return the raw manifest of a version, including the version, or None if its data does not exist."""
    if not version:
        return None
    check_name(version, KEY)
    _, record = _recorded(source, data_root, config, version)
    folder = storage.join(data_root, record.raw) if record else ""
    if not record or not storage.exists(storage.join(folder, "manifest.json")):
        return None
    raw = raw_folder.read_manifest(folder)
    raw = replace(raw, **vars(record.pinned)) if record.pinned else raw
    if not storage.exists(images_uri(folder, raw.content)):  # The folder was deleted and written again.
        return None
    check_raw(raw, config)
    storage.touch(storage.join(folder, raw_folder.MANIFEST))
    return replace(raw, data_version=version)


def _recorded(
    source: str, data_root: str, config: DataConfig, version: str
) -> tuple[str, DataVersion | None]:
    """Return the URI of a version's file, and its content if it exists."""
    # The settings that affect the raw tables; not how fast they were fetched.
    digest = fingerprint("version", source, *choices(config))
    uri = storage.join(data_root, "versions", f"{version}-{digest}.json")
    if not storage.exists(uri):
        return uri, None
    record = storage.read_json(uri, storage.Form("data version", 1, remedy=_VERSION_FIX))
    return uri, typed_json.load(DataVersion, record, uri, _VERSION_FIX)


def label(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the version in a manifest as metadata for artifacts made from it; {} if there is none."""
    return {KEY: manifest[KEY]} if manifest.get(KEY) else {}
