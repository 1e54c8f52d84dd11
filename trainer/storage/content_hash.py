"""The hash of a file on a server, compared while its bytes arrive.

It is ours, which goes with each object as its attribute `sha256`, or an ETag of S3 that is an MD5.
"""

import hashlib
import re
from typing import Any, NamedTuple

from urllib3.exceptions import HTTPError

from trainer.storage import environment, failures, web
from trainer.storage.store import split
from trainer.storage.uris import CLOUDS, WEB, scheme

_SHA256, _MD5 = re.compile(r"[0-9a-f]{64}"), re.compile(r'"?([0-9a-f]{32})"?')
_GOOGLE = re.compile(r"md5=[A-Za-z0-9+/]{22}==")
_KEYS = ("x-amz-server-side-encryption-customer-algorithm", "x-amz-server-side-encryption-aws-kms-key-id")
_unhashed: set[str] = set()
"""Servers' folders whose ETags look like an MD5 and are none: those of a store that encrypts with keys."""


class Content(NamedTuple):
    """What an answer tells of a file's content."""

    size: int
    """Bytes."""
    etag: str
    sha256: str
    """"" where the store does not know it."""


def known_hash(attribute: str) -> str:
    """Return the hash that goes with an object as its attribute; "" for none, and for what is no hash."""
    return attribute if _SHA256.fullmatch(attribute) else ""


class Check:
    """The hash of a file, while its bytes arrive in order."""

    def __init__(self, uri: str, content: Content, sha256: str = "") -> None:
        self._uri = uri
        self._name, self._expected = "sha256", sha256 or content.sha256
        self._folder = uri.rpartition("/")[0]
        etag = _MD5.fullmatch(content.etag)
        if not self._expected and etag and self._folder not in _unhashed:
            self._name, self._expected = "md5", etag[1]
        self._hash = hashlib.new(self._name, usedforsecurity=False) if self._expected else None

    def update(self, data: Any) -> None:
        """Count bytes in."""
        if self._hash is not None:
            self._hash.update(data)

    def is_same(self) -> bool:
        """Tell whether the content has the hash that is known, if one is."""
        return self._hash is None or self._hash.hexdigest() == self._expected

    def compare(self) -> None:
        """Raise `Damaged` if the content is another one."""
        if self._hash is None or self.is_same():
            return
        if self._name == "md5" and not _is_hash(self._uri):
            _unhashed.add(self._folder)
            return
        raise failures.Damaged(
            f"{self._uri} is damaged: its {self._name} is {self._hash.hexdigest()}, not {self._expected}",
            fix="it was read again and differs still: run the command that writes it again",
        )


def _is_hash(uri: str) -> bool:
    """Tell whether a file's ETag, which looks like an MD5, is one: of a store of S3 that encrypts nothing.

    (https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html; Google's stores tell it besides.)
    """
    if scheme(uri) in CLOUDS:
        return False  # Google's is none where a key of one's own encrypts, and obstore hands no headers on
    try:
        if scheme(uri) in WEB:
            headers = web.head(uri)
        else:
            bucket, key = split(uri)
            headers = environment.client(scheme(uri)).stat_object(bucket, key).metadata or {}
    except (HTTPError, ValueError):
        return True
    encrypted = headers.get("x-amz-server-side-encryption", "AES256") != "AES256" or any(
        headers.get(name) for name in _KEYS
    )
    google = bool(_GOOGLE.search(headers.get("x-goog-hash", ""))) and not headers.get("content-encoding")
    return google or (bool(headers.get("x-amz-request-id")) and not encrypted)
