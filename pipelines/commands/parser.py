"""The parser of `kubedet` and its commands, which answers a mistake with what was perhaps meant."""

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
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
