"""Versions of the data: a name for the content of a source when it was read.

<data_root>/versions/<version>-<digest of source and settings>.json names the raw folder and its content. A
run with a known version gets the same images and boxes again, even if the source has changed since.
"""

from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Literal

from pydantic.dataclasses import dataclass

from trainer import storage
from trainer.base.errors import DataError, check_name
from trainer.base.json_files import STRICT
from trainer.config.schema import DataConfig
from trainer.data import download, raw_folder
from trainer.data.problem_counts import Cases
from trainer.data.raw_folder import images_uri
from trainer.data.raw_manifest import MANIFEST, RawManifest, SplitCounts
from trainer.launching.shared_work import SharedWork

_VERSION_FIX = "choose another data_version"


@dataclass(config=STRICT, frozen=True)
class Pinned:
    """The fields of a raw manifest that another download into the same folder may change."""

    content: str
    splits: dict[str, SplitCounts]
    problems: dict[str, Cases]
    unfetched: int


@dataclass(config=STRICT, frozen=True)
class DataVersion:
    """The file of a version."""

    data_version: str
    source: str
    raw: str  # Folder of the raw data, below the data root.
    fingerprint: str
    pinned: Pinned
    recorded: str
    kind: Literal["data version"] = "data version"
    version: Literal[1] = 1


def fetch(
    source: str, data_root: str, config: DataConfig, version: str, listed: RawManifest | None = None
) -> RawManifest:
    """Fetch a source's data, or return those of a known version; an empty `version` names none.

    `listed` is the plan of the download, if the source was listed already.
    """
    if manifest := find(source, data_root, config, version):
        return manifest
    if listed and listed.kind == "plan":
        manifest = download.fetch(listed, config, SharedWork())
    else:
        manifest = download.download(source, data_root, config)
    if not version:
        return manifest
    uri, record = _recorded(source, data_root, config, version)
    if record and (record.fingerprint != manifest.fingerprint or record.pinned.content != manifest.content):
        raise DataError(
            f"the data of version {version} was deleted, and {source} has changed since", fix=_VERSION_FIX
        )
    recorded = DataVersion(
        version,
        source,
        f"raw/{manifest.fingerprint}",
        manifest.fingerprint,
        Pinned(manifest.content, manifest.splits, manifest.problems, manifest.unfetched),
        datetime.now(UTC).isoformat(timespec="seconds"),
    )
    storage.write_json(uri, asdict(recorded))
    return manifest


def find(source: str, data_root: str, config: DataConfig, version: str) -> RawManifest | None:
    """Return the raw manifest of a version, or None if its data does not exist."""
    if not version:
        return None
    check_name(version, "data_version")
    _, record = _recorded(source, data_root, config, version)
    folder = storage.join(data_root, record.raw) if record else ""
    if not record or not storage.exists(storage.join(folder, MANIFEST)):
        return None
    raw = raw_folder.read_manifest(folder)
    raw = replace(raw, **vars(record.pinned))
    if not storage.exists(images_uri(folder, raw.content)):  # The folder was deleted and written again.
        return None
    download.check(raw, config)
    storage.touch(storage.join(folder, MANIFEST))
    return raw


def _recorded(
    source: str, data_root: str, config: DataConfig, version: str
) -> tuple[str, DataVersion | None]:
    """Return the URI of a version's file, and its content if it exists."""
    # The settings that affect the raw tables; not how fast they were fetched.
    excluded = download.read_excluded(config.exclude)
    digest = download.fingerprint("version", source, *download.choices(config), *excluded)
    uri = storage.join(data_root, "versions", f"{version}-{digest}.json")
    if not storage.exists(uri):
        return uri, None
    return uri, storage.read_model(uri, DataVersion, _VERSION_FIX)
