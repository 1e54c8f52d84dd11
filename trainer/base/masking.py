"""Secrets in addresses: taken out of what is printed, and refused where an address comes in."""

import re

_SPACES = re.compile(r"(\s+)")
_AUTHORITY = re.compile(r"://([^/?#\s]*)")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]*\]|[^\[\]@:]*)(:[0-9]+)?")
_SIGNATURE = re.compile(
    r"(?i)([?&](?:x-(?:amz|goog)-(?:signature|credential|security-token)|signature|sig|token|access_token)=)"
    r"[^&\s]+"
)


def masked(text: str) -> str:
    """Return a text without the names and passwords, and without the signatures, of addresses in it.

    A password may hold what has a meaning in addresses, a slash above all: all is left out up to the last @.
    `http://host:9000/a@b` is an address as it should be, and stays.
    """
    if "://" in text and "@" in text:
        text = "".join(_without_userinfo(word) for word in _SPACES.split(text))
    return _SIGNATURE.sub(r"\1***", text)


def has_userinfo(text: str) -> bool:
    """Tell whether an address in a text has a name or a password before its host."""
    return "://" in text and any(_begin(word) is not None for word in _SPACES.split(text))


def _without_userinfo(word: str) -> str:
    begin = _begin(word)
    return word if begin is None else f"{word[:begin]}***{word[word.rindex('@') :]}"


def _begin(word: str) -> int | None:
    """Return where the name before a host begins in a word without spaces; None where there is none."""
    end = word.rfind("@")
    for match in _AUTHORITY.finditer(word):
        if match.start(1) <= end and not _HOST.fullmatch(match[1]):
            return match.start(1)
    return None
