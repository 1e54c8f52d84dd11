"""What commands print about the results of functions."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from trainer.base.safe_text import align, display_width, make_printable

MAX_ITEMS = 10  # Items of a list that are printed.


def show(text: str) -> None:
    """Print a text without the control characters of file names."""
    print(make_printable(text))


def say(template: str) -> Callable[[object, Mapping[str, Any]], None]:
    """Return a function that prints a template with a command's arguments and `{result}`."""

    def show_text(result: object, arguments: Mapping[str, Any]) -> None:
        show(template.format(result=result, **arguments))

    return show_text


def print_json(value: Any) -> None:
    """Print dataclasses and what they contain as JSON."""
    from pydantic_core import to_json

    print(to_json(value, indent=2).decode())


def columns(rows: Sequence[Sequence[str]], *, right: Set[int] = frozenset()) -> str:
    """Align rows, which all have the same number of cells; `right` are the columns to align to the right."""
    widths = [max(map(display_width, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            align(cell, width, right=number in right)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Align a table of counts, all columns but the first to the right."""
    texts = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    return columns([heads, *texts], right={*range(1, len(heads))})


def print_list(title: str, items: Sequence[str]) -> None:
    """Print the first items of a list, if any."""
    if items:
        show(f"{title} ({len(items)}):\n" + "\n".join(f"  {item}" for item in items[:MAX_ITEMS]))
        if len(items) > MAX_ITEMS:
            print(f"  and {len(items) - MAX_ITEMS} more")


def format_bytes(count: int) -> str:
    """Format a size as MB or GB."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
