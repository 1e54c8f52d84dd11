"""Keys and file names of images (safe on every file system, unique), and hashes of the keys."""

import hashlib
import re
import unicodedata
from pathlib import PurePosixPath

MAX_KEY = 80  # Longest key: a tar header holds 100 bytes of name, ".json" included.
_EXTENSION = re.compile(r"\.[A-Za-z0-9]{1,5}$")


def stem(file_name: str) -> str:
    """Return a key of [A-Za-z0-9_-] for a file name, usually its stem; two names may have the same key."""
    plain_stem = _EXTENSION.sub("", file_name)
    plain = unicodedata.normalize("NFKD", plain_stem).encode("ascii", "ignore").decode()
    safe = re.sub(r"[^A-Za-z0-9_-]+", "_", plain).strip("_-")
    # The letters that were dropped may have been the only difference between two names.
    if safe and len(safe) <= MAX_KEY and plain.isascii() and len(plain) == len(plain_stem):
        return safe
    return distinct_key(safe or "image", file_name)


def distinct_key(key: str, file_name: str) -> str:
    """Return a key that is distinct for each file name."""
    normal = unicodedata.normalize("NFC", file_name).encode("utf-8", "surrogatepass")
    return f"{key[: MAX_KEY - 9]}-{hashlib.sha256(normal).hexdigest()[:8]}"


def key_number(key: str) -> int:
    """Return a number below 2**64 by which keys that differ only in case are equal."""
    return int.from_bytes(hashlib.sha256(key.lower().encode()).digest()[:8], "big")


def hash_fraction(key: str, salt: str) -> float:
    """Return a number in [0, 1) that depends on the key and nothing else."""
    return int(hashlib.sha256(f"{salt}:{key}".encode()).hexdigest()[:13], 16) / 16**13


def image_path(key: str, file_name: str, origin: str, version: str) -> str:
    """Return the relative name under which an image's bytes are stored; it depends on the bytes.

    It begins with a folder of two hex digits, so that no folder holds more than 1/256 of them.
    """
    digest = hashlib.sha256(f"{origin}\n{version}".encode()).hexdigest()[:16]
    suffix = PurePosixPath(file_name.lower()).suffix
    return f"{digest[:2]}/{key}-{digest}{suffix if _EXTENSION.fullmatch(suffix) else ''}"


def path_digest(name: str) -> str:
    """Return the digest in a name that `image_path` gave (without its folder)."""
    return name.partition(".")[0].rpartition("-")[2]
