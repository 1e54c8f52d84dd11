"""Signatures of bundles, by an elliptic-curve key, with the OpenSSF's model-signing."""

import importlib
from pathlib import Path
from typing import Any

from trainer.base.errors import ExportError, first_line
from trainer.export import bundle
from trainer.export.bundle import Bundle


def check_key(private_key: str) -> None:
    """Refuse a key that cannot sign: better before minutes of work than after them.

    Args:
        private_key: path of a PEM file.

    Raises:
        ExportError: the package is missing, or the key cannot be used.
    """
    signing = _module("signing")
    try:
        signing.Config().use_elliptic_key_signer(private_key=private_key)
    except Exception as error:  # the package has no common error of its own
        raise _unusable(private_key, error) from None


def sign(folder: Path, private_key: str) -> None:
    """Write model.sig over all files of a sealed folder.

    Args:
        folder: a local bundle.
        private_key: path of a PEM file.

    Raises:
        ExportError: the package is missing, or the key cannot be used.
    """
    signing = _module("signing")
    try:
        config = signing.Config().use_elliptic_key_signer(private_key=private_key)
        config.set_hashing_config(_hashing(folder)).sign(folder, folder / bundle.SIGNATURE)
    except Exception as error:  # the package has no common error of its own
        raise _unusable(private_key, error) from None


def check_signature(source: Bundle, public_key: str) -> None:
    """Compare a bundle with its signature: all that lies in its folder, and what it says it is.

    The files are those of the folder itself, where it is local, so that whatever the package refuses in it is
    refused here.

    Args:
        source: the bundle.
        public_key: path of a PEM file.

    Raises:
        ExportError: the key cannot be used, there is no signature, or it is not by this key or not of
            these files.
        StorageError: a file differs from its checksum, was added, or is a symbolic link.
    """
    verifying = _module("verifying")
    try:
        config = verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    except Exception as error:  # the package has no common error of its own
        raise ExportError(
            f"{public_key} is no public key: {first_line(error)}",
            fix="give the PEM file that `openssl ec -in private.pem -pubout` writes",
        ) from None
    source.check_whole()
    with bundle.as_it_is(source) as folder:
        if not (folder / bundle.SIGNATURE).exists():
            raise ExportError(
                f"the bundle {source.uri} is not signed",
                fix="export with a key (KUBEDET_SIGNING_KEY), or verify without --public-key",
            )
        try:
            config.set_hashing_config(_hashing(folder)).verify(folder, folder / bundle.SIGNATURE)
        except Exception as error:  # the package has no common error of its own
            raise ExportError(
                f"the signature of {source.uri} does not fit {public_key}: {first_line(error)}",
                fix="check that the key is the signer's; do not use this model",
            ) from None


def _unusable(private_key: str, error: Exception) -> ExportError:
    return ExportError(
        f"the bundle cannot be signed with {private_key}: {first_line(error)}",
        fix="give an unencrypted PEM file of an elliptic-curve private key "
        "(openssl ecparam -name prime256v1 -genkey -noout)",
    )


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
