"""A bundle: one folder with a model for serving and its description.

- `model.safetensors`: weights in torchvision's layout
- `model.onnx` and others: the formats asked for
- `model_metadata.json`: classes, input, outputs, thresholds, where it comes from, checks
- `MODEL_CARD.md`: the same for people
- `sbom.cdx.json`: CycloneDX: the files, and the packages that made them
- `model.sig`: signature, where a key was given
- `SHA256SUMS`: written last: a folder without it is no bundle (`sha256sum -c` reads it)
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from trainer import storage
from trainer.base.errors import FormError, StorageError
from trainer.base.os_errors import explained
from trainer.base.temporary_folders import temporary_folder
from trainer.storage.local import open_file

METADATA = "model_metadata.json"
WEIGHTS = "model.safetensors"
CARD = "MODEL_CARD.md"
SBOM = "sbom.cdx.json"
SIGNATURE = "model.sig"
CHECKSUMS = "SHA256SUMS"
FORM = storage.Form(
    "model",
    2,
    {
        "name": str,
        "model_version": str,
        "created": str,
        "classes": [{"id": int, "name": str}],
        "input": {"input_size": int},
        "outputs": {},
        "thresholds": {},
        "formats": {"*": {"files": [str]}},
        "trained_on": {"shards": str, "checkpoint": str},
        "metrics": {"evaluation": str, "values": {"*": float}},
        "versions": {"*": str},
        "config": {},
    },
    "export the model again, or take another version",
)
"""Of METADATA."""
_READ_AT_ONCE = 8 * 1024 * 1024
_MOST_BYTES = 16 * 1024**3
"""Of a file of a bundle; the largest of ours has half a GB."""
_MOST_BYTES_OF_TEXT = 16 * 1024**2
"""Of the checksums, the metadata and the signature."""
_LARGEST_INPUT = 8192
"""Side of the input square: preprocessing takes 15 bytes for each of its pixels."""


@dataclass(frozen=True)
class Bundle:
    """A bundle whose checksums and metadata have been read, and agree."""

    uri: str
    """Its folder."""
    metadata: dict[str, Any]
    """The content of model_metadata.json."""
    checksums: dict[str, str]
    """sha256 of each file by name, SHA256SUMS and the signature excepted."""
    digest: str = ""
    """sha256 of SHA256SUMS: of all that is in the bundle but the signature."""

    @property
    def class_names(self) -> list[str]:
        """Names of the classes, by label."""
        return [category["name"] for category in self.metadata["classes"]]

    def check(self, names: Iterable[str] = ()) -> None:
        """Compare files with their checksums; all of them where none is named.

        Raises:
            StorageError: one is missing or has changed; each is named.
        """
        with self.files(names or self.checksums):
            pass

    def check_whole(self) -> None:
        """Compare all files with their checksums, and refuse whatever else is in the folder.

        Raises:
            StorageError: naming what is missing, changed, added, or not a regular file.
        """
        listed = {*self.checksums, CHECKSUMS, SIGNATURE}
        problems = _irregular(self.uri) + [
            f"{name}: added: {CHECKSUMS} does not list it"
            for name in storage.list_files(self.uri)
            if name not in listed
        ]
        if problems:
            raise StorageError(
                f"{self.uri} is not the bundle as it was written:\n  " + "\n  ".join(sorted(problems)),
                fix="take away what you know does not belong there; else export the model again",
            )
        _check_size(storage.join(self.uri, SIGNATURE), _MOST_BYTES_OF_TEXT)
        self.check()

    @contextmanager
    def files(self, names: Iterable[str]) -> Iterator[Path]:
        """Provide a local folder with the named files, verified by their checksums.

        Raises:
            StorageError: one is not in the bundle, is missing or has changed; each is named.
        """
        paths, problems = {}, []
        with temporary_folder() as temporary:
            for name in names:
                try:
                    paths[name] = self._checked(name)
                except StorageError as error:
                    problems.append(f"{name}: {error.message}")
            if problems:
                raise StorageError(
                    f"the bundle {self.uri} cannot be used:\n  " + "\n  ".join(problems), fix=FORM.remedy
                )
            if storage.is_local(self.uri):
                yield storage.local_path(self.uri)
                return
            for name, path in paths.items():
                # In one folder under their own names: runtimes look for a second file next to the first.
                os.symlink(path, temporary / name)
            yield temporary

    def _checked(self, name: str) -> Path:
        if name not in self.checksums:
            raise StorageError("not in the bundle")
        uri = storage.join(self.uri, name)
        _check_size(uri, _MOST_BYTES_OF_TEXT if name == METADATA else _MOST_BYTES)
        path = storage.local_copy(uri)
        if file_sha256(path) != self.checksums[name]:
            raise StorageError("its bytes have changed since the bundle was written")
        return path


def exists(uri: str) -> bool:
    """Tell whether a whole bundle is there."""
    return storage.exists(storage.join(uri, CHECKSUMS))


def load(uri: str) -> Bundle:
    """Read what a folder holds.

    Raises:
        StorageError: there is no whole bundle, or its metadata have changed.
        DataError: they are of a newer version, or of another form.
    """
    sums = storage.join(uri, CHECKSUMS)
    if not storage.exists(sums):
        raise StorageError(
            f"{uri} holds no bundle: {CHECKSUMS} is missing, which is written last",
            fix="give the folder of an exported model (RUN/model, or one that `kubedet model list` shows)",
        )
    _check_size(sums, _MOST_BYTES_OF_TEXT)
    content = storage.read_bytes(sums)
    checksums = _parse(content, sums)
    Bundle(uri, {}, checksums).check([METADATA])
    metadata = storage.read_json(storage.join(uri, METADATA), FORM)
    _check_values(storage.join(uri, METADATA), metadata, checksums)
    return Bundle(uri, metadata, checksums, hashlib.sha256(content).hexdigest())


def _check_size(uri: str, most: int) -> None:
    state = storage.state(uri)
    if state is not None and state.size > most:
        raise StorageError(
            f"{uri} has {state.size} bytes, more than the {most} that are read",
            fix=FORM.remedy,
        )


def _check_values(uri: str, metadata: dict[str, Any], checksums: dict[str, str]) -> None:
    size, ids = metadata["input"]["input_size"], [category["id"] for category in metadata["classes"]]
    problems = []
    try:
        if datetime.fromisoformat(metadata["created"]).tzinfo is None:
            raise ValueError("it has no time zone")
    except ValueError as error:
        problems.append(f"created is {metadata['created'][:60]!r}, not a time: {error}")
    if not 0 < size <= _LARGEST_INPUT:
        problems.append(f"input.input_size is {size}, not 1 to {_LARGEST_INPUT}")
    if sorted(ids) != list(range(len(ids))) or not ids:
        problems.append("the ids of classes are not 0, 1, 2, ...")
    for name, described in metadata["formats"].items():
        unlisted = sorted(set(described["files"]) - set(checksums))
        if not described["files"] or unlisted:
            problems.append(f"formats.{name}.files: {', '.join(unlisted) or 'none'}, not files of the bundle")
    if problems:
        raise FormError(f"{uri}: {'; '.join(problems)}", fix=FORM.remedy)


def seal(folder: Path) -> None:
    """Write SHA256SUMS over the files of a local folder."""
    files = sorted(path for path in folder.iterdir() if path.name not in (CHECKSUMS, SIGNATURE))
    (folder / CHECKSUMS).write_text("".join(f"{file_sha256(path)}  {path.name}\n" for path in files))


def publish(folder: Path, uri: str) -> None:
    """Copy a sealed local folder to a URI; the checksums come last.

    Files of a previous bundle that this one does not have are deleted: an old signature or format would
    be taken for one of the new files.

    Raises:
        StorageError: the target cannot be written.
    """
    _publish(folder, [path.name for path in folder.iterdir()], uri)


def copy(source: Bundle, uri: str) -> None:
    """Copy a whole bundle to another folder, checked on the way, the checksums last.

    Raises:
        StorageError: a file is missing or has changed, or the target cannot be written.
    """
    with source.files(source.checksums) as folder:
        extra = [name for name in (CHECKSUMS, SIGNATURE) if storage.exists(storage.join(source.uri, name))]
        if not storage.is_local(source.uri):
            for name in extra:
                (folder / name).write_bytes(storage.read_bytes(storage.join(source.uri, name)))
        _publish(folder, [*source.checksums, *extra], uri)


def _publish(folder: Path, names: list[str], uri: str) -> None:
    storage.remove_stale(uri)
    sums, before = storage.join(uri, CHECKSUMS), {SIGNATURE}
    if storage.exists(sums):
        before |= set(_parse(storage.read_bytes(sums), sums))
        # The old checksums must not vouch for files that are being replaced.
        storage.delete(sums)
    for name in sorted(before - set(names)):
        storage.delete(storage.join(uri, name))
    for name in sorted(names, key=lambda name: (name == CHECKSUMS, name)):
        storage.upload(folder / name, storage.join(uri, name), confirm=True)


def _irregular(uri: str) -> list[str]:
    if not storage.is_local(uri):
        return []
    top = storage.local_path(uri)
    irregular = []
    for folder, folders, files in os.walk(top):
        for path in (Path(folder) / name for name in [*folders, *files]):
            if path.is_symlink():
                irregular.append(f"{path.relative_to(top)}: a symbolic link")
            elif not (path.is_file() or path.is_dir()):
                irregular.append(f"{path.relative_to(top)}: not a regular file")
    return irregular


def file_sha256(path: Path) -> str:
    """sha256 of a file, in hexadecimal.

    Raises:
        StorageError: it cannot be read, or is not a regular file.
    """
    digest = hashlib.sha256()
    with explained(str(path), "read"), open_file(path) as file:
        while block := file.read(_READ_AT_ONCE):
            digest.update(block)
    return digest.hexdigest()


def _parse(data: bytes, uri: str) -> dict[str, str]:
    checksums = {}
    for line in data.decode(errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        if len(digest) != 64 or not name or "/" in name:
            raise StorageError(
                f"{uri} is damaged at line {line[:80]!r}",
                fix=FORM.remedy,
            )
        checksums[name] = digest
    if METADATA not in checksums:
        raise StorageError(f"{uri} does not list {METADATA}", fix="export the model again")
    return checksums
