"""The search for hyper-parameters: spaces, trials, and what became of them."""

import re

from trainer import storage
from trainer.base.errors import ConfigError

RUNNING = "running"
"""State of a trial that has not ended, as it is written."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def study_name(name: str, recipe: str) -> str:
    """Return the name of a search; of one that nobody named, by its recipe.

    Raises:
        ConfigError: it cannot be a folder's.
    """
    name = name or f"tune-{recipe}"
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"the name {name!r} cannot be a folder's",
            fix="use letters, digits, '.', '_' and '-', beginning with a letter or digit",
        )
    return name


def study_folder(data_root: str, name: str) -> str:
    """Return the URI of a study's folder."""
    return storage.join(data_root, "tuning", name)
