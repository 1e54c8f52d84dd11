"""`kubedet completion`: shell completion."""

import argparse

from pipelines import parameters
from pipelines.commands import Commands

SHELLS = ("bash", "zsh", "fish")
_CHOICES = {item.option: item.choices for item in parameters.TABLE.values() if item.choices}
"""Values of options that argparse does not check: mistakes are reported together."""

_CHOICES["--show"] = _CHOICES["--recipe"]
_FILES = ("FILE", "URI", "MODEL", "IMAGES")  # Metavars of paths.


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "completion",
        description="Print a script for shell completion. For this session: "
        'eval "$(kubedet completion bash)". For all sessions: save the script in the shell\'s folder for '
        "completions, and repeat this after each update.",
    )
    parser.add_argument("shell", choices=SHELLS, help="which shell")
    parser.set_defaults(command=_completion)


def _completion(options: argparse.Namespace) -> int:
    import shtab

    from pipelines.cli import make_parser

    places = {"DIR": shtab.DIRECTORY} | dict.fromkeys(_FILES, shtab.FILE)
    offered = {option: shtab.cmd(f"echo {' '.join(choices)}") for option, choices in _CHOICES.items()}
    parsers = [make_parser()]
    for parser in parsers:  # It grows by the parsers of commands and verbs.
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += set(action.choices.values())
            of_option = (offered[option] for option in action.option_strings if option in offered)
            place = next(of_option, places.get(str(action.metavar)))
            if place and not action.choices:
                action.complete = place  # type: ignore[attr-defined]  # What shtab looks for.
    print(shtab.complete(parsers[0], options.shell))
    return 0
