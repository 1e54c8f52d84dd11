"""Which version of a model is current: `<data_root>/models/NAME/current`, and where its versions lie."""

import re
from typing import Any

from trainer import storage
from trainer.errors import ConfigError

CURRENT = "current"
_TEXTS = ("name", "version", "model", "checkpoint", "evaluation", "fingerprint")
_SHAPE: dict[str, Any] = dict.fromkeys(_TEXTS, str) | {"metrics": {"*": float}, "history": [str]}
_SHAPE |= {"digest?": str, "classes?": [str]}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def is_name(text: str) -> bool:
    """Tell whether a text may name a model or a version."""
    return _NAME.fullmatch(text) is not None and text != CURRENT


def check_name(name: str) -> None:
    """Refuse a name or version that is not usable as a folder name.

    Raises:
        ConfigError: saying what it may be.
    """
    if not is_name(name):
        raise ConfigError(
            f"{name!r} cannot name a model or a version",
            fix="use letters, digits, '.', '_' and '-', beginning with a letter or digit, at most 100",
        )


def folder(data_root: str, name: str) -> str:
    """URI of the folder with a model's versions."""
    check_name(name)
    return storage.join(data_root, "models", name)


def current(data_root: str, name: str) -> dict[str, Any] | None:
    """Return the content of a model's `current`, or None where nothing was promoted.

    Raises:
        StorageError: it cannot be read, or is damaged.
        DataError: it is of a newer version, or of another form.
    """
    uri = storage.join(folder(data_root, name), CURRENT)
    if not storage.exists(uri):
        return None
    remedy = f"write it anew: kubedet model promote {name} VERSION --data-root {data_root}"
    record = storage.read_json(uri, storage.Form("current model", 1, _SHAPE, remedy, version_key="form"))
    check_name(record["version"])
    return dict(record)
