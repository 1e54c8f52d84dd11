"""The command line `kubedet COMMAND`. Each command is a module in `pipelines/commands`."""

import importlib
import io
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

from pipelines.commands import Parser
from trainer.base.errors import EXIT_FAILURE, ConfigError, KubedetError, install_extra, refuse_userinfo
from trainer.base.os_errors import translate_named_oserrors

SUMMARIES = {"run": "Run the whole pipeline on this machine."}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return 0, 2 for user errors, 143 if it can be continued, otherwise 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # File names may be undecodable.
            stream.reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return _run(arguments)
    except KubedetError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # E.g. `kubedet recipes | head -1`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(arguments: list[str]) -> int:
    check_words(arguments)
    options = make_parser(arguments[0]).parse_args(arguments)
    with translate_errors(f"kubedet {arguments[0]}"):
        return options.command(options)


@contextmanager
def translate_errors(caller: str) -> Iterator[None]:
    """Turn OSErrors that name a file, and imports of packages that `caller` lacks, into KubedetErrors."""
    try:
        with translate_named_oserrors():
            yield
    except ModuleNotFoundError as error:
        package, system = (error.name or "").partition(".")[0], platform.system()
        if package in sys.stdlib_module_names:
            reason, fix = f"{system} does not have", "run it on Linux, in a container or in WSL"
        elif package and not find_spec(package):
            reason, fix = "is not installed", install_extra("train")
        else:
            raise
        raise ConfigError(f"`{caller}` needs {package}, which {reason}", fix=fix) from None


def check_words(arguments: list[str]) -> None:
    """Refuse arguments that contain a password, or are not UTF-8, as manifests, pipelines and jobs are."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{argument!r} on the command line is not UTF-8",
                fix="rename the file or folder, or pass the folder that contains it",
            ) from None
        refuse_userinfo(argument, "the command line")


def make_parser(command: str = "", kind: type[Parser] = Parser) -> Parser:
    """Return the parser of one command, for a quick start, or of all."""
    parser = kind(prog="kubedet", description="Train an object detector on Kubeflow, or on one machine.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in (command,) if command else SUMMARIES:
        with_summary = SimpleNamespace(add_parser=partial(commands.add_parser, help=SUMMARIES[name]))
        module = importlib.import_module(f"pipelines.commands.{name}")
        module.add(with_summary)
    return parser


if __name__ == "__main__":
    sys.exit(main())
