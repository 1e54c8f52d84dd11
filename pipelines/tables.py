"""Tables as the command line prints them."""

from collections.abc import Sequence, Set


def columns(rows: Sequence[Sequence[str]], *, right: Set[int] = frozenset()) -> str:
    """Align rows of cells by the columns that a terminal shows them in.

    Args:
        rows: the cells, the heads among them; all rows have the same number of cells.
        right: numbers of the columns that are aligned to the right.
    """
    from rich.cells import cell_len

    widths = [max(map(cell_len, cells)) for cells in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        line = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            space = " " * (width - cell_len(cell))
            line.append(space + cell if column in right else cell + space)
        lines.append("  ".join(line).rstrip())
    return "\n".join(lines)
