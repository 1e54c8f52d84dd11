"""What a run's node hours, GPU hours and bytes cost, by a small file of prices."""

import os
from dataclasses import fields
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from trainer import storage
from trainer.base.bounded_text import yaml_value
from trainer.base.errors import ConfigError

VARIABLE = "KUBEDET_PRICES"
"""Environment variable: URI of the file."""

FILE = "prices.yaml"
"""The file of a data root, for where the variable names none."""

_LONGEST = 10_000
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(config=ConfigDict(extra="forbid", use_attribute_docstrings=True), frozen=True)
class Prices:
    """What is not named is not paid for."""

    currency: str = ""
    """In what prices are, e.g. EUR."""
    node_hour: Amount = 0.0
    """Price of a node for an hour, without its GPUs where these have a price of their own."""
    gpu_hour: Amount = 0.0
    """Price of a GPU for an hour."""
    gb_read: Amount = 0.0
    """Price of 10^9 bytes from object stores and the web."""
    gb_written: Amount = 0.0
    """Price of 10^9 bytes to object stores."""

    @property
    def has_money(self) -> bool:
        """Whether anything is paid for."""
        return any((self.node_hour, self.gpu_hour, self.gb_read, self.gb_written))


_ADAPTER = TypeAdapter(Prices)


def find(data_root: str) -> Prices | None:
    """Return the prices of the file that KUBEDET_PRICES names, or else of the data root; None without.

    Args:
        data_root: its URI.

    Raises:
        ConfigError: the file cannot be used.
        StorageError: it is missing or cannot be read.
    """
    if given := os.environ.get(VARIABLE, "").strip():
        return read(given)
    uri = storage.join(data_root, FILE)
    return read(uri) if storage.exists(uri) else None


def read(uri: str) -> Prices:
    """Read a file of prices, YAML or JSON.

    Raises:
        ConfigError: naming every key that is unknown or no amount.
        StorageError: it is missing or cannot be read.
    """
    names = ", ".join(field.name for field in fields(Prices))
    fix = f"write lines like `gpu_hour: 2.5`; keys are {names}"
    try:
        tree: Any = yaml_value(storage.read_bytes(uri), _LONGEST)
    except ValueError as error:
        raise ConfigError(f"{uri} is not YAML: {str(error).splitlines()[0]}", fix=fix) from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{uri} is no file of prices", fix=fix)
    try:
        return _ADAPTER.validate_python(tree)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, item['loc']))}: {item['msg'].lower()}" for item in error.errors()]
        raise ConfigError("\n".join([f"{uri} cannot be used:", *lines]), fix=fix) from None
