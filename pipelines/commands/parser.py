"""The parser of `kubedet` and its commands: how options are declared, and how a mistake is answered."""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """argparse's, with the usage of the command that is wrong, and a guess.

    An option must be written in full: what abbreviates one today may stand for two tomorrow.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def parse_known_args(  # type: ignore[override]  # argparse has overloads for other namespaces.
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; words that are left over are an error of this command, not of the program."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [option for option in self._option_string_actions if option.startswith("--")]
            remedy = guess([word.partition("=")[0] for word in unknown], known)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{_as_fix(remedy)}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Print the usage and what is wrong, and end with exit code 2."""
        if self._subparsers and message.startswith("the following arguments are required"):
            self.print_help(sys.stderr)
            self.exit(2)
        if choice := _CHOICE.search(message):
            message += _as_fix(guess([choice[1]], [name.strip("'") for name in choice[2].split(", ")]))
        super().error(message)


def guess(words: Iterable[str], known: Sequence[str]) -> str:
    """Return the remedy of misspelt words, which names the closest ones; empty if none is close."""
    close = [match for word in words for match in difflib.get_close_matches(word, known, n=1)]
    return f"did you mean {' or '.join(close)}?" if close else ""


def _as_fix(remedy: str) -> str:
    return f"\n  fix: {remedy}" if remedy else ""


def option(
    parser: "argparse._ActionsContainer", names: str, text: str, default: Any = "", **settings: Any
) -> None:
    """Declare an option.

    Args:
        parser: of the command, or a group of it.
        names: its names and what its value is called, "-o --output DIR"; "one|other" are the only values,
            "KEY=VALUE..." may be given several times, and without a value it is a switch.
        text: its help; a default that is not empty is added.
        default: a number's type is that of the value.
        settings: further ones of argparse.
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
    # argparse takes a percent sign for a format.
    parser.add_argument(*flags, help=text.replace("%", "%%"), **settings)


def verb(
    verbs: Any, name: str, command: Callable[[argparse.Namespace], int], text: str, description: str = "",
    **settings: Any,
) -> Any:  # fmt: skip
    """Declare a verb of a command, and return its parser.

    Args:
        verbs: what `add_subparsers` returned.
        name: of the verb.
        command: runs it; returns the exit code.
        text: what it does, in the list of verbs.
        description: at the top of its help; empty is `text` as a sentence.
        settings: further ones of argparse.
    """
    description = description or f"{text[0].upper()}{text[1:]}."
    parser = verbs.add_parser(name, help=text, description=description, **settings)
    parser.set_defaults(command=command)
    return parser
