"""The Hugging Face hub's address and token, from the variables that its own programs read."""

import os
from urllib.parse import urlsplit

from trainer.base.errors import StorageError

ADDRESS = "HF_ENDPOINT"  # environment variable: the address of a mirror of the hub
TOKEN = "HF_TOKEN"  # noqa: S105
"""Environment variable: a token for private models, and for gated ones whose conditions were accepted."""


def address() -> str:
    """Return the hub's address, without a final slash."""
    return (os.environ.get(ADDRESS) or "https://huggingface.co").rstrip("/")


def authorization(url: str) -> dict[str, str]:
    """Return the header with the token for an address of the hub; {} for all others."""
    token, parts, own = os.environ.get(TOKEN, "").strip(), urlsplit(url), urlsplit(address())
    if not token or (parts.scheme.lower(), parts.netloc.lower()) != (own.scheme.lower(), own.netloc.lower()):
        return {}
    if not (token.isascii() and token.isprintable()) or " " in token:
        message = f"{TOKEN} in the environment is no token: it contains spaces, line breaks or the like"
        raise StorageError(message, fix="set it to the token alone, hf_ and letters and digits")
    return {"Authorization": f"Bearer {token}"}
