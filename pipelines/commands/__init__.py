"""What the commands share. `add` of a module declares its command, which imports what it needs later."""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, NoReturn, TypeAlias

from trainer.base.safe_text import aligned, as_message, cells, printable

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Where a command adds its parser."""

_EXIT_CODES = "Exit codes: 0; 2 for a mistake in options or data; 143 if it was stopped; 1 otherwise."
_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """argparse's parser with suggestions for misspelled options, which cannot be abbreviated."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "epilog": _EXIT_CODES, **settings})

    def parse_known_args(  # type: ignore[override]  # argparse has overloads for other namespaces.
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; unknown arguments are an error of this command, not of the program."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [option for option in self._option_string_actions if option.startswith("--")]
            remedy = guess([word.partition("=")[0] for word in unknown], known)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{_as_fix(remedy)}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit with code 2."""
        if self._subparsers and message.startswith("the following arguments are required"):
            self.print_help(sys.stderr)
            self.exit(2)
        if choice := _CHOICE.search(message):
            message += _as_fix(guess([choice[1]], [name.strip("'") for name in choice[2].split(", ")]))
        super().error(as_message(message))


def show(text: str) -> None:
    """Print a text with names from files, without their control characters."""
    print(printable(text))


def guess(words: Iterable[str], known: Sequence[str]) -> str:
    """Return a remedy for misspelled words that names the closest ones; empty if none is close."""
    close = [match for word in words for match in difflib.get_close_matches(word, known, n=1)]
    return f"did you mean {' or '.join(close)}?" if close else ""


def _as_fix(remedy: str) -> str:
    return f"\n  fix: {remedy}" if remedy else ""


def option(
    parser: "argparse._ActionsContainer",
    names: str,
    text: str,
    default: Any = "",
    *,
    least: int | None = None,
    **settings: Any,
) -> None:
    """Declare an option in the parser of a command or a group of it.

    `names` are its names and its metavar, "-o --output DIR"; "one|other" are the only values,
    "KEY=VALUE..." may be repeated, and without a metavar it is a switch. A default that is not empty is
    added to the help; if it is a number, the value has its type. `least` is the least number that is valid.
    `settings` go to argparse.
    """
    *flags, value = names.split()
    if value.startswith("-"):
        flags, settings = [*flags, value], settings | {"action": "store_true"}
    else:
        if value.endswith("..."):
            value, default, settings = value[:-3], [], settings | {"action": "append"}
        settings |= {"choices": value.split("|")} if "|" in value else {"metavar": value}
        settings = {"default": default} | settings
        if isinstance(default, int | float):
            settings = {"type": type(default)} | settings
        is_shown = isinstance(default, str | int | float) and default not in ("", 0, argparse.SUPPRESS)
        if is_shown and "default:" not in text:
            text += f" (default: {default})"
    if least is not None:
        settings["type"] = _at_least(least, settings["type"])
    # argparse formats the help with %.
    parser.add_argument(*flags, help=text.replace("%", "%%"), **settings)


def _at_least(least: int, kind: type) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        value = kind(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"must be {least} or more, not {text}")
        return value

    return number


def verb(
    verbs: Any,
    name: str,
    command: Callable[[argparse.Namespace], int],
    text: str,
    description: str = "",
    **settings: Any,
) -> Any:
    """Declare a verb that calls `command`, and return its parser; an empty description is `text`."""
    description = description or f"{text[0].upper()}{text[1:]}."
    parser = verbs.add_parser(name, help=text, description=description, **settings)
    parser.set_defaults(command=command)
    return parser


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
