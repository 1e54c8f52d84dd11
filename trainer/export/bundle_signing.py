"""Signatures of bundles, by an elliptic-curve key, with the OpenSSF's model-signing."""

import importlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer import storage
from trainer.base.errors import ExportError, translated
from trainer.base.temporary_folders import temporary_folder
from trainer.export import bundle
from trainer.export.bundle import Bundle


def check_key(private_key: str) -> None:
    """Raise ExportError if a key cannot sign, before minutes of work."""
    _signer(private_key)


def sign(folder: Path, private_key: str) -> None:
    """Write model.sig over all files of a sealed folder."""
    _signer(private_key).set_hashing_config(_hashing(folder)).sign(folder, folder / bundle.SIGNATURE)


def check_signature(source: Bundle, public_key: str) -> None:
    """Verify the signature of all files in a bundle's folder.

    Raises:
        ExportError: the key cannot be used, or there is no signature by this key of these files.
        StorageError: a file differs from its checksum, was added, or is a symbolic link.
    """
    fix = "give the PEM file that `openssl ec -in private.pem -pubout` writes"
    verifying = _module("verifying")
    with translated(ExportError, f"{public_key} is no public key", fix=fix):
        config = verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    source.check_whole()
    with _all_files(source) as folder:
        if not (folder / bundle.SIGNATURE).exists():
            raise ExportError(
                f"the bundle {source.uri} is not signed",
                fix="export with a key (KUBEDET_SIGNING_KEY), or verify without --public-key",
            )
        mismatch = f"the signature of {source.uri} does not fit {public_key}"
        fix = "check that this is the signer's key; do not use the model"
        with translated(ExportError, mismatch, fix=fix):
            config.set_hashing_config(_hashing(folder)).verify(folder, folder / bundle.SIGNATURE)


def _signer(private_key: str) -> Any:
    fix = (
        "give an unencrypted PEM file of an elliptic-curve private key "
        "(openssl ecparam -name prime256v1 -genkey -noout)"
    )
    signing = _module("signing")
    with translated(ExportError, f"the bundle cannot be signed with {private_key}", fix=fix):
        return signing.Config().use_elliptic_key_signer(private_key=private_key)


@contextmanager
def _all_files(source: Bundle) -> Iterator[Path]:
    if storage.is_local(source.uri):
        yield storage.local_path(source.uri)
        return
    with temporary_folder() as target:
        for name in storage.list_files(source.uri):
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(storage.local_copy(storage.join(source.uri, name)), path)
        yield target


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"model_signing.{name}")
    except ImportError:
        raise ExportError(
            "signatures need the package model-signing, which is not installed",
            fix="pip install 'kubedet[signing]'",
        ) from None


def _hashing(folder: Path) -> Any:
    hashing = _module("hashing")
    return hashing.Config().set_ignored_paths(paths=[folder / bundle.SIGNATURE], ignore_git_paths=False)
