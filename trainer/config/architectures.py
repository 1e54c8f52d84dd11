"""The registry of detectors by `model.architecture`; importing it imports no PyTorch."""

import difflib
from dataclasses import fields
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from trainer.base.errors import ConfigError, install_extra

DEFAULT = "retinanet"


class Entry(NamedTuple):
    """Location of an architecture."""

    options: str  # `module:Class` of its options, a subclass of `config.ModelConfig`
    network: str  # `module:Class` of its network, a subclass of `model.architecture.Architecture`
    extra: str = ""
    """The extra that it requires, if any."""
    packages: tuple[str, ...] = ()  # packages of that extra


def _entry(folder: str, module: str, name: str, extra: str = "", *packages: str) -> Entry:
    place = f"trainer.model.{folder}"
    return Entry(f"{place}.options:{name}Options", f"{place}.{module}:{name}", extra, packages)


_DETR = ("detr", "transformers", "scipy")
ARCHITECTURES = {
    "retinanet": _entry("retinanet", "retinanet", "RetinaNet"),
    "dfine": _entry("dfine", "dfine", "DFine", *_DETR),
    "rtdetr": _entry("dfine", "dfine", "RTDetr", *_DETR),
    "rfdetr": _entry("rfdetr", "rfdetr", "RFDetr", *_DETR),
    "deimv2": _entry("deimv2", "deimv2", "Deimv2", *_DETR),
}
"""Every architecture by its name."""


def entry(name: Any) -> Entry:
    """Return the entry of an architecture; `name` may be any value."""
    if not isinstance(name, str) or name not in ARCHITECTURES:
        close = difflib.get_close_matches(str(name), ARCHITECTURES, n=1)
        raise ConfigError(
            f"unknown architecture {name!r}",
            fix=f"did you mean {close[0]}?" if close else f"use one of: {', '.join(ARCHITECTURES)}",
        )
    return ARCHITECTURES[name]


def options_class(name: str) -> Any:
    """Return the dataclass of an architecture's options."""
    return _load(entry(name).options)


def network_class(name: str) -> Any:
    """Return the class of an architecture's network."""
    require(name)
    return _load(entry(name).network)


def default_options() -> Any:
    """Return the default options of the default architecture."""
    return options_class(DEFAULT)()


def require(name: str) -> None:
    """Refuse an architecture whose packages are not installed, without importing them."""
    item = entry(name)
    missing = [package for package in item.packages if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"model.architecture {name} needs the package {', '.join(missing)}, which is not installed",
            fix=f"{install_extra(item.extra)}, in the training image too; or set another model.architecture",
        )


def supporting(key: str) -> list[str]:
    """Return the architectures that have an option."""
    return [name for name in ARCHITECTURES if key in {field.name for field in fields(options_class(name))}]


@cache
def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
