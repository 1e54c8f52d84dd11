"""`kubedet data forget`: takes images out of the data root, and out of all that is made from now on.

The list (`trainer.data.forgotten`) is written first: from then on no download brings them. Then their bytes
and the raw tables and shards that hold them are deleted, the file that makes a folder whole first: what is
killed in between is finished by the same command. What was seen stays, to tell whom it concerns.
"""

from typing import Any

from components.records import RunRecord
from operations import lineage
from trainer import storage
from trainer.base.errors import ConfigError
from trainer.data import forgotten, seen
from trainer.data.forgotten import Forgotten

_WHOLE = {"raw": ("manifest.json", "plan.json"), "shards": ("index.json",)}
"""Files that make a folder whole."""


def plan(data_root: str, names: list[str]) -> dict[str, Any]:
    """Tell what forgetting images would delete, and who saw them.

    Args:
        data_root: URI under which data are kept.
        names: keys or file names.

    Returns:
        images (to be put on the list), files (URIs of their bytes), folders (raw tables and shards that hold
        them, and are there), runs and models that saw them, running (of the runs, those without a result).

    Raises:
        ConfigError: an image was seen nowhere.
        StorageError: the data root cannot be read, or a record is damaged: a run might still train on them.
    """
    seen_in = lineage.saw(data_root, frozenset(names))
    rows = [(fingerprint, row) for fingerprint, of_one in seen_in.items() for row in of_one]
    named = {name for _, row in rows for name in (row["key"], row["file_name"])}
    if unknown := sorted(set(names) - named):
        raise ConfigError(
            f"no shards in {data_root} had an image {', '.join(unknown)}",
            fix="give keys or names of files as `kubedet model trace IMAGE` takes them",
        )
    headers = {each: seen.header(seen.place(data_root, each)) for each in seen_in}
    listed = [Forgotten(row["key"], row["file_name"], headers[each]["source"]) for each, row in rows]
    folders = [f"shards/{each}" for each in seen_in] + [f"raw/{head['raw']}" for head in headers.values()]
    present = [each for each in dict.fromkeys(folders) if storage.list_files(storage.join(data_root, each))]
    runs = [run for run in lineage.runs(data_root, strict=True) if run.fingerprint in seen_in]
    return {
        "images": list(dict.fromkeys(listed)),
        "files": _files(data_root, {(row["key"], row["image"]) for _, row in rows}),
        "folders": present,
        "runs": [run.run for run in runs],
        "running": [run.run for run in runs if not _ended(data_root, run)],
        "models": [item.shown for item in lineage.versions(data_root) if item.shards in seen_in],
    }


def forget(data_root: str, planned: dict[str, Any]) -> None:
    """Do what `plan` told.

    Raises:
        ConfigError: a run goes on with the images; nothing was deleted.
        StorageError: the data root cannot be written.
    """
    if planned["running"]:
        raise ConfigError(
            f"these runs still train with the images: {', '.join(planned['running'])}",
            fix="wait for their end or stop them and delete their folders; then give the same command again",
        )
    forgotten.add(data_root, planned["images"])
    for folder in planned["folders"]:
        uri = storage.join(data_root, folder)
        whole = _WHOLE[folder.partition("/")[0]]
        for name in [*whole, *(each for each in storage.list_files(uri) if each not in whole)]:
            storage.delete(storage.join(uri, name))
    for uri in planned["files"]:
        storage.delete(uri)


def _ended(data_root: str, run: RunRecord) -> bool:
    """Whether a run's training has ended, or its folder is gone."""
    folder = run.folder(data_root)
    result = storage.exists(storage.join(folder, "train", "result.json"))
    return result or not storage.exists(storage.join(folder, "config.json"))


def _files(data_root: str, images: set[tuple[str, str]]) -> list[str]:
    """Return the files with the bytes of images, of keys and digests, whatever source they are of."""
    root = storage.join(data_root, "images")
    ends = {f"{digest[:2]}/{key}-{digest}" for key, digest in images}
    sources = {name.partition("/")[0] for name in storage.list_files(root)} if images else set()
    files = []
    for source in sorted(sources):
        for folder in sorted({end[:2] for end in ends}):
            for name in storage.list_files(storage.join(root, source, folder)):
                if f"{folder}/{name}".partition(".")[0] in ends:
                    files.append(storage.join(root, source, folder, name))
    return files
