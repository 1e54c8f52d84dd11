"""Tables as the command line prints them."""

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], *, right: frozenset[int] | set[int] = frozenset()) -> str:
    """Align rows of cells, which all have the same number of cells.

    Args:
        rows: the cells, the heads among them.
        right: numbers of the columns that are aligned to the right.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
