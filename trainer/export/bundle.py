"""A bundle: one folder with a model for serving and its description.

- `model.safetensors`: weights in torchvision's layout
- `model.onnx` and others: the exported formats
- `model_metadata.json`: classes, input, outputs, thresholds, origin, checks
- `MODEL_CARD.md`: the same for human readers
- `model.sig`: signature, if a key was given
- `SHA256SUMS`: written last, so a folder without it is not a bundle (`sha256sum -c` checks it)
"""

import hashlib
import importlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer import storage
from trainer.base.errors import ExportError, FormatError, StorageError, install_command, wrap_exceptions
from trainer.base.os_errors import translate_oserror
from trainer.base.temporary_folders import temporary_folder
from trainer.export.metadata import REMEDY, Metadata

METADATA = "model_metadata.json"
WEIGHTS = "model.safetensors"
CARD = "MODEL_CARD.md"
SIGNATURE = "model.sig"
CHECKSUMS = "SHA256SUMS"
_MAX_BYTES = 16 * 1024**3
_MAX_TEXT_BYTES = 16 * 1024**2


@dataclass(frozen=True)
class Bundle:
    """A bundle whose checksums and metadata have been read and match."""

    uri: str
    metadata: Metadata
    checksums: dict[str, str]  # sha256 of each file by name, except SHA256SUMS and the signature
    digest: str  # sha256 of SHA256SUMS, which identifies all files except the signature

    @property
    def class_names(self) -> list[str]:
        """Names of the classes, by label."""
        return [category["name"] for category in self.metadata.classes]

    def verify_checksums(self) -> None:
        """Compare all files with their checksums. Raises the errors of `verified_files`."""
        with self.verified_files(self.checksums):
            pass

    def verify_exact_files(self) -> None:
        """Compare all files with their checksums, and refuse any other file in the folder."""
        added = set(storage.list_files(self.uri)) - {*self.checksums, CHECKSUMS, SIGNATURE}
        problems = [f"{name}: added: not listed in {CHECKSUMS}" for name in added]
        if storage.is_local(self.uri):
            top = storage.local_path(self.uri)
            for path in top.rglob("*"):
                if path.is_symlink():
                    problems.append(f"{path.relative_to(top)}: a symbolic link")
                elif not (path.is_file() or path.is_dir()):
                    problems.append(f"{path.relative_to(top)}: not a regular file")
        if problems:
            raise StorageError(
                f"{self.uri} has changed since it was exported:\n  " + "\n  ".join(sorted(problems)),
                fix="remove the files that were added, or export the model again",
            )
        _check_size(storage.join(self.uri, SIGNATURE), _MAX_TEXT_BYTES)
        self.verify_checksums()

    def verified_files(self, names: Iterable[str]) -> AbstractContextManager[Path]:
        """Provide a local folder with the named files after verifying their checksums."""
        return _open_verified_files(self.uri, self.checksums, names)


@contextmanager
def _open_verified_files(uri: str, checksums: dict[str, str], names: Iterable[str]) -> Iterator[Path]:
    paths, problems = {}, []
    with temporary_folder() as temporary:
        for name in names:
            if name not in checksums:
                problems.append(f"{name}: not in the bundle")
                continue
            file = storage.join(uri, name)
            try:
                _check_size(file, _MAX_TEXT_BYTES if name == METADATA else _MAX_BYTES)
                paths[name] = storage.local_copy(file)
                if file_sha256(paths[name]) != checksums[name]:
                    problems.append(f"{name}: its bytes have changed since the bundle was written")
            except StorageError as error:
                problems.append(f"{name}: {error.message}")
        if problems:
            raise StorageError(f"the bundle {uri} cannot be used:\n  " + "\n  ".join(problems), fix=REMEDY)
        if storage.is_local(uri):
            yield storage.local_path(uri)
            return
        for name, path in paths.items():
            # Link the files in one folder: runtimes look for other files next to the first.
            os.symlink(path, temporary / name)
        yield temporary


def exists(uri: str) -> bool:
    """Return whether a complete bundle exists."""
    return storage.exists(storage.join(uri, CHECKSUMS))


def load(uri: str) -> Bundle:
    """Load a bundle after verifying the checksum of its metadata."""
    sums = storage.join(uri, CHECKSUMS)
    if not storage.exists(sums):
        raise StorageError(
            f"{uri} is not a complete bundle: it has no {CHECKSUMS}, which is written last",
            fix="use the folder of an exported model (RUN/model, or one that `kubedet model list` shows)",
        )
    _check_size(sums, _MAX_TEXT_BYTES)
    content = storage.read_bytes(sums)
    checksums = _parse_checksums(content, sums)
    with _open_verified_files(uri, checksums, [METADATA]):
        metadata = storage.read_model(storage.join(uri, METADATA), Metadata, REMEDY)
    for name, entry in metadata.formats.items():
        if unlisted := sorted(set(entry.files) - set(checksums)):
            problem = f"formats.{name}.files: {', '.join(unlisted)} not listed in {CHECKSUMS}"
            raise FormatError(f"{storage.join(uri, METADATA)}: {problem}", fix=REMEDY)
    return Bundle(uri, metadata, checksums, hashlib.sha256(content).hexdigest())


def _check_size(uri: str, maximum: int) -> None:
    state = storage.state(uri)
    if state is not None and state.size > maximum:
        raise StorageError(f"{uri} has {state.size} bytes, which exceeds the limit of {maximum}", fix=REMEDY)


def write_checksums(folder: Path) -> None:
    """Write the checksums of a local folder's files to SHA256SUMS."""
    files = sorted(path for path in folder.iterdir() if path.name not in (CHECKSUMS, SIGNATURE))
    (folder / CHECKSUMS).write_text("".join(f"{file_sha256(path)}  {path.name}\n" for path in files))


def publish(folder: Path, uri: str, names: Sequence[str] = ()) -> None:
    """Copy a local folder with checksums, or only its files `names`, to a URI; SHA256SUMS is copied last.

    Files of a previous bundle that this one lacks, such as an old signature, are deleted.
    """
    names = names or [path.name for path in folder.iterdir()]
    storage.remove_stale(uri)
    sums, old_names = storage.join(uri, CHECKSUMS), {SIGNATURE}
    if storage.exists(sums):
        old_names |= set(_parse_checksums(storage.read_bytes(sums), sums))
        # Delete the old checksums first: they must not cover replaced files.
        storage.delete(sums)
    for name in sorted(old_names - set(names)):
        storage.delete(storage.join(uri, name))
    for name in sorted(names, key=lambda name: (name == CHECKSUMS, name)):
        storage.upload(folder / name, storage.join(uri, name), confirm=True)


def copy(source: Bundle, uri: str) -> None:
    """Verify a bundle and copy it to another folder; SHA256SUMS is copied last."""
    with source.verified_files(source.checksums) as folder:
        extra = [name for name in (CHECKSUMS, SIGNATURE) if storage.exists(storage.join(source.uri, name))]
        if not storage.is_local(source.uri):
            for name in extra:
                (folder / name).write_bytes(storage.read_bytes(storage.join(source.uri, name)))
        publish(folder, uri, [*source.checksums, *extra])


def file_sha256(path: Path) -> str:
    """Return the hexadecimal sha256 of a file."""
    with translate_oserror(str(path), "read"), storage.open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _parse_checksums(data: bytes, uri: str) -> dict[str, str]:
    checksums = {}
    for line in data.decode(errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        if len(digest) != 64 or not name or "/" in name:
            raise StorageError(f"{uri} is damaged at line {line[:80]!r}", fix=REMEDY)
        checksums[name] = digest
    if METADATA not in checksums:
        raise StorageError(f"{uri} does not list {METADATA}", fix=REMEDY)
    return checksums


def sign(folder: Path, private_key: str) -> None:
    """Sign all files of a folder that has checksums; write model.sig."""
    signing_config(private_key).set_hashing_config(_hashing_config(folder)).sign(folder, folder / SIGNATURE)


def check_signature(source: Bundle, public_key: str) -> None:
    """Verify a bundle's signature after checking its files with `verify_exact_files`."""
    fix = "use the PEM file that `openssl ec -in private.pem -pubout` writes"
    verifying = _import_model_signing("verifying")
    with wrap_exceptions(ExportError, f"{public_key} is not a public key", fix=fix):
        config = verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    source.verify_exact_files()
    with _local_folder(source) as folder:
        if not (folder / SIGNATURE).exists():
            raise ExportError(
                f"the bundle {source.uri} is not signed",
                fix="export with a key (KUBEDET_SIGNING_KEY), or verify without --public-key",
            )
        mismatch = f"the signature of {source.uri} does not match the key {public_key}"
        fix = "check that this is the signer's key; do not use the model"
        with wrap_exceptions(ExportError, mismatch, fix=fix):
            config.set_hashing_config(_hashing_config(folder)).verify(folder, folder / SIGNATURE)


def signing_config(private_key: str) -> Any:
    """Return the signing configuration for a key."""
    fix = (
        "use an unencrypted PEM file of an elliptic-curve private key "
        "(openssl ecparam -name prime256v1 -genkey -noout)"
    )
    signing = _import_model_signing("signing")
    with wrap_exceptions(ExportError, f"{private_key} cannot be used to sign the bundle", fix=fix):
        return signing.Config().use_elliptic_key_signer(private_key=private_key)


@contextmanager
def _local_folder(source: Bundle) -> Iterator[Path]:
    if storage.is_local(source.uri):
        yield storage.local_path(source.uri)
        return
    with temporary_folder() as target:
        for name in storage.list_files(source.uri):
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(storage.local_copy(storage.join(source.uri, name)), path)
        yield target


def _import_model_signing(name: str) -> Any:
    try:
        return importlib.import_module(f"model_signing.{name}")
    except ImportError:
        raise ExportError(
            "the package model-signing, which signatures need, is not installed",
            fix=install_command("signing"),
        ) from None


def _hashing_config(folder: Path) -> Any:
    hashing = _import_model_signing("hashing")
    return hashing.Config().set_ignored_paths(paths=[folder / SIGNATURE], ignore_git_paths=False)
