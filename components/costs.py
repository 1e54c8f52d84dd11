"""What a run used and cost, by step: sums of the records that `usage` keeps, with the prices of `prices`.

What nobody measured is unknown: a sum that lacks it is shown as `>=1.23`, and as `-` where all of it is
lacking. Energy that was not measured is estimated where the prices say how many watts, and shown as `~1.23`.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from components import prices as price_files
from components import usage
from components.prices import Prices
from trainer.errors import KubedetError
from trainer.usage.record import Record

logger = logging.getLogger(__name__)

_JOULES = 3.6e6
_HOUR = 3600.0
_NONE = "-"
_TOTAL = "in all"


@dataclass(frozen=True)
class Figure:
    """A sum, of which parts may be unknown or estimated."""

    known: float = 0.0
    """The sum of what is known."""
    lacks: bool = False
    """Whether a part is unknown."""
    estimated: bool = False
    """Whether a part is an estimate."""

    @classmethod
    def of(cls, value: float | None, *, estimated: bool = False) -> "Figure":
        """Return one number, or None for what is unknown."""
        return cls(value or 0.0, value is None, estimated)

    def __add__(self, other: "Figure") -> "Figure":
        """Return the sum."""
        estimated = self.estimated or other.estimated
        return Figure(self.known + other.known, self.lacks or other.lacks, estimated)

    def times(self, factor: float) -> "Figure":
        """Return a multiple; nothing of what is unknown is known to be nothing."""
        return Figure(self.known * factor, self.lacks, self.estimated) if factor else NOTHING

    @property
    def value(self) -> float | None:
        """What is known of it; None where nothing is."""
        return None if self.lacks and not self.known else self.known

    def shown(self, digits: int = 3) -> str:
        """Return it as a cell of a table."""
        if self.value is None:
            return _NONE
        mark = ">=" if self.lacks else "~" if self.estimated else ""
        return f"{mark}{self.known:,.{digits}f}"

    def fields(self) -> dict[str, Any]:
        """Return it as JSON: its value, and what is to be known of it."""
        marks = {"incomplete": self.lacks, "estimated": self.estimated}
        return {"value": self.value} | {name: True for name, is_so in marks.items() if is_so}


NOTHING = Figure()
"""Known to be none."""


@dataclass(frozen=True)
class Used:
    """What a step, or a whole run, used and cost."""

    step: str
    tries: int
    """Processes that have a record: tries, parts and nodes."""
    node_hours: float
    gpu_hours: Figure
    cpu_kwh: Figure
    """Energy of the processors, measured, or of the nodes, estimated."""
    gpu_kwh: Figure
    read: int
    """Bytes."""
    written: int
    """Bytes."""
    money: Figure | None
    """None where no price is known."""
    gco2: Figure | None
    """Grams."""

    @property
    def kwh(self) -> Figure:
        """All energy."""
        return self.cpu_kwh + self.gpu_kwh

    def fields(self) -> dict[str, Any]:
        """Return it as JSON."""
        figures = {name: getattr(self, name) for name in ("gpu_hours", "cpu_kwh", "gpu_kwh", "money", "gco2")}
        return {
            "step": self.step, "tries": self.tries, "node_hours": self.node_hours,
            "bytes_read": self.read, "bytes_written": self.written,
            **{name: figure.fields() for name, figure in figures.items() if figure is not None},
        }  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """What a run used, by step and in all."""

    steps: tuple[Used, ...]
    """In the order of their begins."""
    total: Used
    currency: str = ""

    def __bool__(self) -> bool:
        """Whether anything is known."""
        return bool(self.steps)

    def fields(self) -> dict[str, Any]:
        """Return it as JSON."""
        parts = {"steps": [step.fields() for step in self.steps], "total": self.total.fields()}
        return parts | ({"currency": self.currency} if self.currency else {})

    def table(self) -> list[tuple[str, ...]]:
        """Return a header, a row a step and one of all; nothing where nothing is known."""
        if not self.steps:
            return []
        has_money, has_gco2 = self.total.money is not None, self.total.gco2 is not None
        header = ["step", "node h", "GPU h", "CPU kWh", "GPU kWh", "GB read", "GB written"]
        header += [self.currency or "money"] * has_money + ["gCO2"] * has_gco2
        return [tuple(header), *(_row(used) for used in (*self.steps, self.total))]

    def text(self) -> str:
        """Return the table for a terminal."""
        rows = self.table()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
        )

    def numbers(self) -> dict[str, float]:
        """Return what is known in all, by name, as Kubeflow shows metadata of an artifact."""
        total = self.total
        if not self.steps:
            return {}
        figures = {"gpu_hours": total.gpu_hours, "kwh": total.kwh, "money": total.money, "gco2": total.gco2}
        known = {name: each.value for name, each in figures.items() if each is not None}
        known |= {"node_hours": total.node_hours, "gb_read": total.read / 1e9}
        known |= {"gb_written": total.written / 1e9}
        return {f"used/{name}": round(value, 4) for name, value in known.items() if value is not None}


def _row(used: Used) -> tuple[str, ...]:
    cells = [used.step, f"{used.node_hours:,.3f}", used.gpu_hours.shown()]
    cells += [used.cpu_kwh.shown(), used.gpu_kwh.shown(), f"{used.read / 1e9:,.3f}"]
    cells += [f"{used.written / 1e9:,.3f}"]
    cells += [used.money.shown(2)] if used.money is not None else []
    return (*cells, *([used.gco2.shown(1)] if used.gco2 is not None else []))


def of_run(data_root: str, *run_ids: str) -> Costs:
    """Return what a run has used up to now; what cannot be read costs a warning.

    Args:
        data_root: its URI.
        run_ids: the run's id, and others that it may be known by.
    """
    try:
        return summed(usage.of_run(data_root, *run_ids), price_files.find(data_root))
    except KubedetError as error:
        logger.warning("what the run used is not told: %s", error)
        return summed([])


def summed(records: Iterable[Record], prices: Prices | None = None) -> Costs:
    """Return what records tell, by step and in all.

    Args:
        records: of one run.
        prices: None where none are known.
    """
    ordered = sorted(records, key=lambda record: record.began)
    names = dict.fromkeys(record.step for record in ordered)
    steps = tuple(_sum(name, [each for each in ordered if each.step == name], prices) for name in names)
    return Costs(steps, _sum(_TOTAL, ordered, prices), prices.currency if prices else "")


def _sum(name: str, records: Sequence[Record], prices: Prices | None) -> Used:
    rates = prices or Prices()
    node_hours = sum(record.nodes * record.seconds for record in records) / _HOUR
    gpu_hours = _added(Figure.of(_gpu_hours(record)) for record in records)
    cpu_kwh = _added(_cpu_kwh(record, rates) for record in records)
    gpu_kwh = _added(_gpu_kwh(record, rates) for record in records)
    read, written = sum(record.read for record in records), sum(record.written for record in records)
    kwh = cpu_kwh + gpu_kwh
    money = Figure.of(node_hours * rates.node_hour) + gpu_hours.times(rates.gpu_hour)
    money += kwh.times(rates.kwh) + Figure.of((read * rates.gb_read + written * rates.gb_written) / 1e9)
    return Used(
        name, len(records), node_hours, gpu_hours, cpu_kwh, gpu_kwh, read, written,
        money if rates.has_money else None, kwh.times(rates.gco2_per_kwh) if rates.gco2_per_kwh else None,
    )  # fmt: skip


def _added(figures: Iterator[Figure]) -> Figure:
    return sum(figures, NOTHING)


def _gpu_hours(record: Record) -> float | None:
    return None if record.gpus is None else record.gpus * record.seconds / _HOUR


def _cpu_kwh(record: Record, rates: Prices) -> Figure:
    if record.nodes == 0:
        return NOTHING  # It waits, on a node that others have.
    if record.cpu_joules is not None:
        return Figure.of(record.cpu_joules / _JOULES)
    return _estimated(rates.watts_per_node, record.nodes * record.seconds)


def _gpu_kwh(record: Record, rates: Prices) -> Figure:
    if record.gpus == 0:
        return NOTHING
    if record.gpu_joules is not None:
        return Figure.of(record.gpu_joules / _JOULES)
    return _estimated(rates.watts_per_gpu, None if record.gpus is None else record.gpus * record.seconds)


def _estimated(watts: float, seconds: float | None) -> Figure:
    known = watts and seconds is not None
    return Figure.of(watts * (seconds or 0.0) / _JOULES if known else None, estimated=bool(known))
