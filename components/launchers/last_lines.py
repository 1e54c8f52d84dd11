"""The error message of a failed training, parsed from the last lines of its output."""

import itertools
from collections.abc import Iterable

LAST_LINES = 20
"""Lines that an error shows of a training that ended without a message of its own."""

_NO_MESSAGE = "To enable traceback see"  # What torchrun says of a worker that crashed.


def own_message(lines: Iterable[str]) -> str:
    """Return the last message `error: ...` with the indented lines that belong to it, or nothing."""
    output = list(lines)
    starts = [index for index, line in enumerate(output) if line.startswith("error: ")]
    if not starts or _NO_MESSAGE in output[starts[-1]]:
        return ""
    rest = itertools.takewhile(lambda line: line.startswith("  "), output[starts[-1] + 1 :])
    return "\n".join([output[starts[-1]].removeprefix("error: "), *rest])


def indented(lines: Iterable[str]) -> str:
    """Return lines as they stand below an error."""
    return "\n".join(f"  {line}" for line in lines)
