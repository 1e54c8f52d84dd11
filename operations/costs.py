"""Usage and cost of a run by step: sums of usage records, which may lack parts, and a file of prices."""

import logging
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from components import usage
from trainer import storage
from trainer.base import typed_json
from trainer.base.errors import ConfigError, FormError, KubedetError
from trainer.base.safe_text import yaml_value
from trainer.launching.usage import Record

logger = logging.getLogger(__name__)

_HOUR = 3600.0
VARIABLE = "KUBEDET_PRICES"  # Environment variable: URI of the file.
FILE = "prices.yaml"  # The file of a data root, if the variable names none.

_MAX_BYTES = 10_000


@dataclass(frozen=True)
class Prices:
    """Prices; those that are not named are 0."""

    currency: str = ""  # E.g. EUR.
    node_hour: float = 0.0  # Price of a node for an hour, without its GPUs if these have their own price.
    gpu_hour: float = 0.0
    gb_read: float = 0.0  # Price of 10^9 bytes from object stores and the web.
    gb_written: float = 0.0  # Price of 10^9 bytes to object stores.

    def __post_init__(self) -> None:
        for name, price in vars(self).items():
            if name != "currency" and not 0 <= float(price) < math.inf:
                raise ValueError(f"{name} is {price}, which is not a price")

    @property
    def has_money(self) -> bool:
        """Whether any price is above 0."""
        return any((self.node_hour, self.gpu_hour, self.gb_read, self.gb_written))


def find_prices(data_root: str) -> Prices | None:
    """Return the prices of the file that KUBEDET_PRICES names, or else of the data root; None without."""
    if given := os.environ.get(VARIABLE, "").strip():
        return read_prices(given)
    uri = storage.join(data_root, FILE)
    return read_prices(uri) if storage.exists(uri) else None


def read_prices(uri: str) -> Prices:
    """Read a file of prices, YAML or JSON."""
    names = ", ".join(field.name for field in fields(Prices))
    fix = f"write lines like `gpu_hour: 2.5`; keys are {names}"
    try:
        return typed_json.load(Prices, yaml_value(storage.read_bytes(uri), _MAX_BYTES), uri, fix)
    except FormError as error:
        raise ConfigError(error.message, fix=fix) from None
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{uri} cannot be used: {str(error).splitlines()[0]}", fix=fix) from None


class Figure(NamedTuple):
    """A sum of which parts may be unknown."""

    known: float = 0.0  # The sum of the known parts.
    lacks: bool = False  # Whether a part is unknown.

    @property
    def value(self) -> float | None:
        """The known part; None if nothing is known."""
        return None if self.lacks and not self.known else self.known

    def shown(self, digits: int = 3) -> str:
        """Return it as a cell of a table."""
        return "-" if self.value is None else f"{'>=' if self.lacks else ''}{self.known:,.{digits}f}"

    def fields(self) -> dict[str, object]:
        """Return it as JSON: its value, and `incomplete` if a part is unknown."""
        return {"value": self.value, **({"incomplete": True} if self.lacks else {})}


@dataclass(frozen=True)
class Used:
    """Usage and cost of a step, or of a whole run."""

    step: str
    tries: int  # Processes that have a record: tries, parts and nodes.
    node_hours: float
    gpu_hours: Figure
    read: int  # Bytes.
    written: int  # Bytes.
    money: Figure | None  # None if no price is known.

    def fields(self) -> dict[str, object]:
        """Return it as JSON."""
        fields = {
            "step": self.step, "tries": self.tries, "node_hours": self.node_hours,
            "bytes_read": self.read, "bytes_written": self.written, "gpu_hours": self.gpu_hours.fields(),
        }  # fmt: skip
        return fields | ({"money": self.money.fields()} if self.money is not None else {})


@dataclass(frozen=True)
class Costs:
    """Usage and cost of a run, by step and in total."""

    steps: tuple[Used, ...]  # In the order of their begins.
    total: Used
    currency: str = ""

    def __bool__(self) -> bool:
        """Whether anything is known."""
        return bool(self.steps)

    def fields(self) -> dict[str, object]:
        """Return it as JSON."""
        steps, currency = [step.fields() for step in self.steps], self.currency
        return {"steps": steps, "total": self.total.fields(), **({"currency": currency} if currency else {})}

    def table(self) -> list[tuple[str, ...]]:
        """Return a header, a row for each step and one for the total; nothing if nothing is known."""
        if not self.steps:
            return []
        rows = [["step", "node h", "GPU h", "GB read", "GB written"]]
        for used in (*self.steps, self.total):
            sums = (used.node_hours, used.read / 1e9, used.written / 1e9)
            hours, read, written = (f"{number:,.3f}" for number in sums)
            rows.append([used.step, hours, used.gpu_hours.shown(), read, written])
        if self.total.money is not None:
            money = [used.money.shown(2) for used in (*self.steps, self.total) if used.money is not None]
            rows = [[*row, cell] for row, cell in zip(rows, [self.currency or "money", *money], strict=True)]
        return [tuple(row) for row in rows]

    def numbers(self) -> dict[str, float]:
        """Return the known totals by name, for the metadata of an artifact in Kubeflow."""
        if not self.steps:
            return {}
        total = self.total
        known = {
            "gpu_hours": total.gpu_hours.value, "money": total.money.value if total.money else None,
            "node_hours": total.node_hours, "gb_read": total.read / 1e9, "gb_written": total.written / 1e9,
        }  # fmt: skip
        return {f"used/{name}": round(value, 4) for name, value in known.items() if value is not None}


def of_run(data_root: str, *run_ids: str) -> Costs:
    """Return what a run, identified by one or more IDs, has used so far; problems are only logged."""
    try:
        return summed(usage.of_run(data_root, *run_ids), find_prices(data_root))
    except KubedetError as error:
        logger.warning("the usage of the run is unknown: %s", error)
        return summed([])


def summed(records: Iterable[Record], prices: Prices | None = None) -> Costs:
    """Return the sums of one run's records, by step and in total."""

    def total(name: str, parts: Sequence[Record]) -> Used:
        nodes = sum(part.nodes * part.seconds for part in parts) / _HOUR
        gpus = sum((part.gpus or 0) * part.seconds for part in parts) / _HOUR
        lacks = any(part.gpus is None for part in parts)
        read, written = sum(part.read for part in parts), sum(part.written for part in parts)
        money = None
        if prices and prices.has_money:
            paid = nodes * prices.node_hour + gpus * prices.gpu_hour
            paid += (read * prices.gb_read + written * prices.gb_written) / 1e9
            money = Figure(paid, lacks and bool(prices.gpu_hour))
        return Used(name, len(parts), nodes, Figure(gpus, lacks), read, written, money)

    ordered = sorted(records, key=lambda record: record.began)
    names = dict.fromkeys(record.step for record in ordered)
    steps = tuple(total(name, [each for each in ordered if each.step == name]) for name in names)
    return Costs(steps, total("in all", ordered), prices.currency if prices else "")
