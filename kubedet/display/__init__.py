"""Functions that print the results of commands."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from trainer.base.safe_text import align, display_width, make_printable

MAX_ITEMS = 10  # Maximum number of list items to print.


def print_safe(text: str) -> None:
    """Print a text, with control characters (e.g. of file names) escaped."""
    print(make_printable(text))


def make_printer(template: str) -> Callable[[object, Mapping[str, Any]], None]:
    """Return a function that prints a template with a command's arguments and `{result}`."""

    def show_text(result: object, arguments: Mapping[str, Any]) -> None:
        print_safe(template.format(result=result, **arguments))

    return show_text


def print_json(value: Any) -> None:
    """Print a value, e.g. a tree of dataclasses, as JSON."""
    from pydantic_core import to_json

    print(to_json(value, indent=2).decode())


def format_columns(rows: Sequence[Sequence[str]], *, right: Set[int] = frozenset()) -> str:
    """Align the cells of rows of equal length in columns; `right` are the right-aligned columns."""
    widths = [max(map(display_width, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            align(cell, width, right=number in right)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def format_table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format a table of counts; all columns except the first are right-aligned."""
    texts = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    return format_columns([heads, *texts], right={*range(1, len(heads))})


def print_list(title: str, items: Sequence[str]) -> None:
    """Print the first items of a list, if any."""
    if items:
        print_safe(f"{title} ({len(items)}):\n" + "\n".join(f"  {item}" for item in items[:MAX_ITEMS]))
        if len(items) > MAX_ITEMS:
            print(f"  and {len(items) - MAX_ITEMS} more")


def format_bytes(count: int) -> str:
    """Format a size as MB or GB."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
