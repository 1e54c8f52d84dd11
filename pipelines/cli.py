"""The operator's command line: `kubedet COMMAND`. Each command is a file in `pipelines/commands`."""

import importlib
import io
import os
import sys

from pipelines.commands.parser import Parser
from trainer.base.errors import EXIT_FAILURE, ConfigError, KubedetError, refuse_userinfo
from trainer.base.os_errors import files_explained

COMMANDS = (
    "run", "tune", "compile", "submit", "schedule", "recipes", "data", "weights", "evaluate", "compare",
    "predict", "model", "trace", "prune", "serve", "job", "menu", "doctor", "manifests", "completion",
)  # fmt: skip
"""In the order of the help."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Returns:
        Exit code: 0, 2 for the user's mistakes, 1 for other failures, 143 when it was
        stopped and the same command goes on.
    """
    _print_whatever()
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["menu"] and not {"-h", "--help"} & {*arguments} and sys.stdout.isatty():
        print("kubedet menu: starting ...", flush=True)  # Its imports take seconds on a busy machine.
    try:
        # Before anything prints them, or hands them to another process.
        for argument in arguments:
            _refuse_undecodable(argument)
            refuse_userinfo(argument, "the command line")
        options = make_parser(*arguments[:1]).parse_args(arguments)
        with files_explained():
            return options.command(options)
    except KubedetError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # The reader of a pipe has gone, as in `kubedet recipes | head -1`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _refuse_undecodable(argument: str) -> None:
    """Refuse a word that is no text: manifests, pipelines and jobs, which it goes into, are UTF-8."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{argument!r} on the command line is not UTF-8",
            fix="rename the file or folder; or name the folder that it is in",
        ) from None


def _print_whatever() -> None:
    """Let names of files that are no text be printed, escaped, rather than end the program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def make_parser(command: str = "") -> Parser:
    """Return the parser of the whole command line.

    Args:
        command: the one command that it needs, for a quick start; all if there is no such command.
    """
    from importlib.metadata import version  # Most of the time until the menu's first line.

    parser = Parser(
        prog="kubedet",
        description="Train an object detector on Kubeflow, or on one machine, with one pipeline.",
        epilog="`kubedet COMMAND --help` tells more. To begin with: `kubedet run`, which needs no data.",
    )
    parser.add_argument("--version", action="version", version=f"kubedet {version('kubedet')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in (command,) if command in COMMANDS else COMMANDS:
        importlib.import_module(f"pipelines.commands.{name}").add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
