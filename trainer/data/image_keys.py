"""Derives keys, stored names and hashes of images; keys are safe on every file system."""

import hashlib
import re
import unicodedata
from pathlib import PurePosixPath

MAX_KEY = 80  # A tar header holds names of 100 bytes, including ".json".
_EXTENSION = re.compile(r"\.[A-Za-z0-9]{1,5}$")


def make_key(file_name: str) -> str:
    """Return a key of [A-Za-z0-9_-] for a file name, usually its stem; different names may share a key."""
    plain_stem = _EXTENSION.sub("", file_name)
    plain = unicodedata.normalize("NFKD", plain_stem).encode("ascii", "ignore").decode()
    safe = re.sub(r"[^A-Za-z0-9_-]+", "_", plain).strip("_-")
    # Without the dropped letters, two names could become equal.
    if safe and len(safe) <= MAX_KEY and plain.isascii() and len(plain) == len(plain_stem):
        return safe
    return distinct_key(safe or "image", file_name)


def distinct_key(key: str, file_name: str) -> str:
    """Return a key that is distinct for each file name."""
    normal = unicodedata.normalize("NFC", file_name).encode("utf-8", "surrogatepass")
    return f"{key[: MAX_KEY - 9]}-{hashlib.sha256(normal).hexdigest()[:8]}"


def key_hash(key: str) -> int:
    """Return a hash below 2**64 that ignores the case of the key."""
    return int.from_bytes(hashlib.sha256(key.lower().encode()).digest()[:8], "big")


def hash_fraction(key: str, salt: str) -> float:
    """Return a number in [0, 1) that depends only on the key and the salt."""
    return int(hashlib.sha256(f"{salt}:{key}".encode()).hexdigest()[:13], 16) / 16**13


def image_path(key: str, file_name: str, origin: str, version: str) -> str:
    """Return the relative path under which an image is stored; it changes with the image's version.

    It begins with a folder of two hex digits, so that each folder holds about 1/256 of the images.
    """
    digest = hashlib.sha256(f"{origin}\n{version}".encode()).hexdigest()[:16]
    suffix = PurePosixPath(file_name.lower()).suffix
    return f"{digest[:2]}/{key}-{digest}{suffix if _EXTENSION.fullmatch(suffix) else ''}"


def path_digest(name: str) -> str:
    """Return the digest in a file name created by `image_path`, without its folder."""
    return name.partition(".")[0].rpartition("-")[2]
