"""The command line `kubedet COMMAND`. Each command is a module in `pipelines/commands`."""

import importlib
import io
import os
import sys
from functools import partial
from types import SimpleNamespace

from pipelines.commands.parser import Parser, guess
from trainer.base.errors import EXIT_FAILURE, ConfigError, KubedetError, refuse_userinfo
from trainer.base.os_errors import translate_named_oserrors

_GROUPS = {
    "Pipeline": {
        "run": "run the whole pipeline on this machine",
        "submit": "run it in Kubeflow",
        "schedule": "run it on a schedule in Kubeflow: create, list, pause, history",
        "tune": "search for the best hyper-parameters, here or in Kubeflow",
        "recipes": "list the named configurations, and explain their keys",
        "weights": "fetch and list the published weights that recipes start from",
        "data": "data: inspect, verify, preview, compare, merge, forget, prune",
    },
    "Models": {
        "evaluate": "score a model on shards, or a file of detections",
        "compare": "compare two evaluations of the same images",
        "predict": "draw the detections of a model on images",
        "serve": "try a model in a browser",
        "model": "published models: list, promote, verify, trace, layout",
    },
    "Cluster": {
        "job": "training jobs: submit, list, logs, stop, menu",
        "cluster": "write files for a cluster: manifests, the compiled pipeline",
        "doctor": "check the requirements of a run",
        "completion": "print a script for shell completion",
    },
}
SUMMARIES = {name: text for group in _GROUPS.values() for name, text in group.items()}
"""A summary of each command, in the order of the help."""

MOVED = {
    "compile": ("cluster", "compile"),
    "manifests": ("cluster", "manifests"),
    "menu": ("job", "menu"),
    "prune": ("data", "prune"),
    "trace": ("model", "trace"),
}
"""Successors of commands of earlier versions, which still work."""

_SCHEDULE = {
    "--cron": "create", "--run-now": "run", "--list": "list", "--pause": "pause", "--resume": "resume",
    "--history": "history", "--delete": "delete",
}  # fmt: skip
"""Successors of options of `kubedet schedule`."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Returns:
        Exit code: 0, 2 for the user's mistakes, 143 if it was stopped and can be continued, else 1.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # File names may be undecodable.
            stream.reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        for argument in arguments:
            _refuse_undecodable(argument)
            refuse_userinfo(argument, "the command line")
        return _run(_current(arguments))
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
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"kubedet {version('kubedet')}")
        return 0
    if arguments[0] not in SUMMARIES:
        raise ConfigError(
            f"kubedet has no command {arguments[0][:60]!r}",
            fix=guess(arguments[:1], [*SUMMARIES]) or "`kubedet --help` lists the commands",
        )
    options = make_parser(arguments[0]).parse_args(arguments)
    with translate_named_oserrors():
        return options.command(options)


def _current(arguments: list[str]) -> list[str]:
    """Return the current form of a command line of an earlier version, and warn about it."""
    command, *rest = arguments or [""]
    if command in MOVED:
        now, before = [*MOVED[command], *rest], command
    elif command == "schedule" and rest[:1] and rest[0].startswith("-"):
        option = next((word for word in rest if word in _SCHEDULE), "")
        if not option:
            return arguments
        kept = [word for word in rest if word != option or option == "--cron"]
        now, before = [command, _SCHEDULE[option], *kept], f"schedule {option}"
    else:
        return arguments
    print(f"warning: `kubedet {before}` is now `kubedet {' '.join(now[:2])}`", file=sys.stderr)
    return now


def _refuse_undecodable(argument: str) -> None:
    """Refuse undecodable words: manifests, pipelines and jobs are UTF-8."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{argument!r} on the command line is not UTF-8",
            fix="rename the file or folder; or name the folder that it is in",
        ) from None


def _help() -> str:
    """Return the help, which fits a small screen, without importing the commands."""
    lines = [
        "usage: kubedet COMMAND ...     (`kubedet COMMAND --help` explains a command)",
        "",
        "Train an object detector on Kubeflow, or on one machine, with one pipeline.",
        "Start with `kubedet run`, which needs no data.",
    ]
    width = max(map(len, SUMMARIES))
    for title, commands in _GROUPS.items():
        lines += [f"{title}:", *(f"  {name:<{width}}  {text}" for name, text in commands.items())]
    return "\n".join(lines)


def make_parser(command: str = "") -> Parser:
    """Return the parser of one command, for a quick start, or of all."""
    parser = Parser(prog="kubedet", description="Train an object detector on Kubeflow, or on one machine.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in (command,) if command else SUMMARIES:
        with_summary = SimpleNamespace(add_parser=partial(commands.add_parser, help=SUMMARIES[name]))
        importlib.import_module(f"pipelines.commands.{name}").add(with_summary)
    return parser


if __name__ == "__main__":
    sys.exit(main())
