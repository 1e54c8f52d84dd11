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
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer import storage
from trainer.errors import StorageError
from trainer.os_errors import explained

METADATA = "model_metadata.json"
WEIGHTS = "model.safetensors"
CARD = "MODEL_CARD.md"
SBOM = "sbom.cdx.json"
SIGNATURE = "model.sig"
CHECKSUMS = "SHA256SUMS"
_READ_AT_ONCE = 8 * 1024 * 1024


@dataclass(frozen=True)
class Bundle:
    """A bundle whose checksums and metadata have been read, and agree."""

    uri: str
    """Its folder."""
    metadata: dict[str, Any]
    """The content of model_metadata.json."""
    checksums: dict[str, str]
    """sha256 of each file by name, SHA256SUMS and the signature excepted."""

    def check(self, names: Iterable[str] = ()) -> None:
        """Compare files with their checksums; all of them where none is named.

        Raises:
            StorageError: one is missing or has changed; each is named.
        """
        with self.files(names or self.checksums):
            pass

    @contextmanager
    def files(self, names: Iterable[str]) -> Iterator[Path]:
        """Provide a local folder with the named files, verified by their checksums.

        Raises:
            StorageError: one is not in the bundle, is missing or has changed; each is named.
        """
        with tempfile.TemporaryDirectory(prefix="kubedet-") as temporary:
            paths = {}
            problems = []
            for name in names:
                if name not in self.checksums:
                    problems.append(f"{name}: not in the bundle")
                    continue
                try:
                    paths[name] = storage.local_copy(storage.join(self.uri, name))
                except StorageError as error:
                    problems.append(f"{name}: {error.message}")
                    continue
                if file_sha256(paths[name]) != self.checksums[name]:
                    problems.append(f"{name}: its bytes have changed since the bundle was written")
            if problems:
                raise StorageError(
                    f"the bundle {self.uri} cannot be used:\n  " + "\n  ".join(problems),
                    fix="export the model again, or take another version",
                )
            if storage.is_local(self.uri):
                yield storage.local_path(self.uri)
                return
            folder = Path(temporary)
            for name, path in paths.items():
                # In one folder under their own names: runtimes look for a second file beside the first.
                os.symlink(path, folder / name)
            yield folder


def exists(uri: str) -> bool:
    """Tell whether a whole bundle is there."""
    return storage.exists(storage.join(uri, CHECKSUMS))


def load(uri: str) -> Bundle:
    """Read what a folder holds.

    Args:
        uri: the bundle's folder.

    Raises:
        StorageError: there is no whole bundle, or its metadata have changed.
    """
    sums = storage.join(uri, CHECKSUMS)
    if not storage.exists(sums):
        raise StorageError(
            f"{uri} holds no bundle: {CHECKSUMS} is missing, which is written last",
            fix="give the folder of an exported model (RUN/model, or one that `kubedet model list` shows)",
        )
    checksums = _parse(storage.read_bytes(sums), sums)
    empty = Bundle(uri, {}, checksums)
    empty.check([METADATA])
    return Bundle(uri, storage.read_json(storage.join(uri, METADATA)), checksums)


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
    sums = storage.join(uri, CHECKSUMS)
    names = sorted(path.name for path in folder.iterdir() if path.name != CHECKSUMS)
    before = {SIGNATURE}
    if storage.exists(sums):
        before |= set(_parse(storage.read_bytes(sums), sums))
        # The old checksums must not vouch for files that are being replaced.
        storage.delete(sums)
    for name in sorted(before - set(names)):
        storage.delete(storage.join(uri, name))
    for name in names:
        storage.upload(folder / name, storage.join(uri, name))
    storage.upload(folder / CHECKSUMS, sums)


def copy(source: Bundle, uri: str) -> None:
    """Copy a whole bundle to another folder, checked on the way, the checksums last."""
    with materialised(source) as folder:
        publish(folder, uri)


@contextmanager
def materialised(source: Bundle) -> Iterator[Path]:
    """Copy all files, signature and checksums included, to a temporary folder."""
    extra = [CHECKSUMS, SIGNATURE]
    with source.files(source.checksums) as folder, tempfile.TemporaryDirectory(prefix="kubedet-") as target:
        for name in source.checksums:
            shutil.copyfile(folder / name, Path(target) / name)
        for name in extra:
            uri = storage.join(source.uri, name)
            if storage.exists(uri):
                (Path(target) / name).write_bytes(storage.read_bytes(uri))
        yield Path(target)


def file_sha256(path: Path) -> str:
    """sha256 of a file, in hexadecimal.

    Raises:
        StorageError: it cannot be read.
    """
    digest = hashlib.sha256()
    with explained(str(path), "read"), path.open("rb") as file:
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
                fix="export the model again, or take another version",
            )
        checksums[name] = digest
    if METADATA not in checksums:
        raise StorageError(f"{uri} does not list {METADATA}", fix="export the model again")
    return checksums
