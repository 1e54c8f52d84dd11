"""Where the Hugging Face hub is, and who one is to it, from the variables that its own programs read."""

import os
from urllib.parse import urlsplit

from trainer.base.errors import StorageError

ADDRESS = "HF_ENDPOINT"
"""Environment variable: the hub's address, where it is a mirror of yours."""
TOKEN = "HF_TOKEN"  # noqa: S105
"""Environment variable: what may read private models, and gated ones whose conditions were accepted."""

_HOME = "https://huggingface.co"


def address() -> str:
    """Return the hub's address, without a last slash."""
    return (os.environ.get(ADDRESS) or _HOME).rstrip("/")


def has_token() -> bool:
    """Tell whether the environment holds a token."""
    return bool(os.environ.get(TOKEN, "").strip())


def authorization(url: str) -> dict[str, str]:
    """Return the header that shows the token, for an address of the hub; {} for all others.

    The clients leave it out where the hub sends them on to another server, which has files of the hub's.

    Raises:
        StorageError: the token has characters that no header can have; it is not told.
    """
    token = os.environ.get(TOKEN, "").strip()
    if not token or _origin(url) != _origin(address()):
        return {}
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise StorageError(
            f"{TOKEN} in the environment is no token: it holds spaces, line breaks or other such characters",
            fix="set it to the token alone, hf_ and letters and digits",
        )
    return {"Authorization": f"Bearer {token}"}


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme.lower(), parts.netloc.lower()
