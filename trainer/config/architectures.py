"""The registry of detectors by `model.architecture`; importing it imports no PyTorch."""

import difflib
from dataclasses import fields
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from trainer.base.errors import ConfigError, install_command

DEFAULT = "retinanet"


class Entry(NamedTuple):
    """Import paths and requirements of an architecture."""

    options: str  # `module:Class` of its options, a subclass of `config.ModelConfig`
    network: str  # `module:Class` of its network, a subclass of `model.architecture.Architecture`
    extra: str = ""
    """Extra of kubedet that the architecture requires, if any."""
    packages: tuple[str, ...] = ()  # packages of that extra


def _make_entry(folder: str, module: str, name: str, extra: str = "", *packages: str) -> Entry:
    package = f"trainer.model.{folder}"
    return Entry(f"{package}.options:{name}Options", f"{package}.{module}:{name}", extra, packages)


_DETR = ("detr", "transformers", "scipy")
ARCHITECTURES = {
    "retinanet": _make_entry("retinanet", "retinanet", "RetinaNet"),
    "dfine": _make_entry("dfine", "dfine", "DFine", *_DETR),
    "rtdetr": _make_entry("dfine", "dfine", "RTDetr", *_DETR),
    "rfdetr": _make_entry("rfdetr", "rfdetr", "RFDetr", *_DETR),
    "deimv2": _make_entry("deimv2", "deimv2", "Deimv2", *_DETR),
}
"""All architectures by name."""


def find_entry(name: Any) -> Entry:
    """Look up an architecture; raises ConfigError for any other value."""
    if not isinstance(name, str) or name not in ARCHITECTURES:
        close = difflib.get_close_matches(str(name), ARCHITECTURES, n=1)
        raise ConfigError(
            f"unknown architecture {name!r}",
            fix=f"did you mean {close[0]}?" if close else f"use one of: {', '.join(ARCHITECTURES)}",
        )
    return ARCHITECTURES[name]


def options_class(name: str) -> Any:
    """Return the dataclass of an architecture's options."""
    return _import_object(find_entry(name).options)


def network_class(name: str) -> Any:
    """Return the class of an architecture's network."""
    require_packages(name)
    return _import_object(find_entry(name).network)


def default_options() -> Any:
    """Return the default options of the default architecture."""
    return options_class(DEFAULT)()


def require_packages(name: str) -> None:
    """Raise ConfigError if packages of an architecture are not installed, without importing them."""
    item = find_entry(name)
    missing = [package for package in item.packages if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"model.architecture {name} needs packages that are not installed: {', '.join(missing)}",
            fix=f"{install_command(item.extra)}, in the training image too, or set another architecture",
        )


def find_by_option(key: str) -> list[str]:
    """Return the names of the architectures that have an option."""
    return [name for name in ARCHITECTURES if key in {field.name for field in fields(options_class(name))}]


@cache
def _import_object(import_path: str) -> Any:
    module, _, name = import_path.partition(":")
    return getattr(import_module(module), name)
