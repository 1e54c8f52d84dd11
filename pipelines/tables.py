"""Tables as the command line prints them."""

from collections.abc import Sequence, Set

from trainer.base.safe_text import aligned, cells


def columns(rows: Sequence[Sequence[str]], *, right: Set[int] = frozenset()) -> str:
    """Align rows, which all have the same number of cells; `right` are the columns to align to the right."""
    widths = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            aligned(cell, width, right=number in right)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
