"""Writes the tables of the documents that follow from the code: `make tables`, in the root of the repository.

A table stands between two comments, the first of which names it.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from pipelines import parameters
from pipelines.commands import run
from trainer.base.errors import ConfigError, KubedetError

PAGES = ("README.md", "docs/kubeflow.md")
"""The documents that have such tables."""

_TABLE = re.compile(r"(<!-- table: ([\w ]+) \(make tables\) -->\n).*?(<!-- end of the table -->)", re.DOTALL)


def of_parameters() -> str:
    """Return the table of the pipeline's parameters."""
    return _table(("parameter", "default", "meaning"), (item.row() for item in parameters.TABLE.values()))


def of_run() -> str:
    """Return the table of the options of `kubedet run`."""
    commands = argparse.ArgumentParser().add_subparsers()
    run.add(commands)
    actions = [action for action in commands.choices["run"]._actions if action.dest != "help"]
    rows = ((f"`{_named(action)}`", action.help or "") for action in actions)
    return _table(("option", "meaning"), rows)


def _named(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    return action.option_strings[-1] + value


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    escaped = ([cell.replace("|", r"\|") for cell in cells] for cells in lines)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in escaped)


TABLES: dict[str, Callable[[], str]] = {
    "parameters of the pipeline": of_parameters,
    "options of kubedet run": of_run,
}
"""The tables by the names that stand in the documents."""


def with_tables(text: str) -> str:
    """Return a document with its tables as the code has them.

    Args:
        text: the document.

    Raises:
        ConfigError: it names a table that there is not.
    """

    def with_code_table(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise ConfigError(f"there is no table {match[2]!r}", fix=f"use one of: {', '.join(TABLES)}")
        return f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}"

    return _TABLE.sub(with_code_table, text)


def main(root: Path = Path()) -> int:
    """Write the tables of all documents anew.

    Args:
        root: the repository.

    Returns:
        Exit code.
    """
    try:
        for name in PAGES:
            page = root / name
            if not page.is_file():
                raise ConfigError(f"there is no {page}", fix="call this in the root of the repository")
            before = page.read_text()
            if (after := with_tables(before)) != before:
                page.write_text(after)
                print(f"wrote the tables of {page}")
    except KubedetError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
