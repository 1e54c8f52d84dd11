"""The specification of a job on the command line: a file, `--set`, the common flags, a command."""

import argparse
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from components.jobs import PARAMETERS
from components.launchers import spec
from pipelines.commands import Parser, option
from trainer.base.errors import ConfigError, refuse_userinfo
from trainer.base.safe_text import whole_number, yaml_value

if TYPE_CHECKING:
    from components.launchers.spec import JobSpec

FLAGS = ("name", *PARAMETERS)  # Fields of JobSpec that have an option of their own.

_MAX_BYTES = 200_000  # Characters of a specification; most have a thousand.

_SPECIFICATION = "the job's specification"


class CommandParser(Parser):
    """A parser that puts everything after the first `--` unchanged into `options.arguments`."""

    takes_command = False
    """Whether there may be something after `--`."""

    def parse_known_args(self, args=None, namespace=None):
        """Parse what is before the first `--`."""
        words = list(sys.argv[1:] if args is None else args)
        separator = words.index("--") if "--" in words else len(words)
        options, unknown = super().parse_known_args(words[:separator], namespace)
        options.arguments = words[separator + 1 :]
        if options.arguments and not self.takes_command:
            self.error(f"takes no command: {' '.join(options.arguments)}")
        return options, unknown


def add_specification(parser: CommandParser) -> None:
    """Declare the description of a job without `--namespace`."""
    parser.takes_command = True
    option(parser, "--spec FILE", "the job's fields as YAML or JSON; - reads stdin")
    text = "set one field, nested ones with dots: network.profile=rdma; may be repeated"
    option(parser, "--set FIELD=VALUE...", text, dest="fields")
    for name in FLAGS:
        metavar = "N" if spec.FIELDS[name].annotation is int else name.upper()
        option(parser, f"--{name} {metavar}", spec.meaning(name), None)
    option(parser, "--env NAME=VALUE...", "an environment variable")
    option(parser, "--mount CLAIM:PATH...", "mount a PersistentVolumeClaim in every pod")


def specification(options: argparse.Namespace) -> "JobSpec":
    """Return the job of the options: the file first, then --set, then the flags."""
    from components.launchers.spec import JobSpec, from_fields

    tree = _from_file(options.spec) if options.spec else {}
    given = [*options.fields, *([f"runai_queue={options.project}"] if options.project else [])]
    for name in (*FLAGS, "namespace"):
        if (value := getattr(options, name)) is not None:
            given.append(f"{name}={value}")
    given += [f"env.{text}" for text in options.env]
    problems = [problem for text in given for problem in set_field(tree, JobSpec, text)]
    if options.mount:
        pairs = [text.partition(":") for text in options.mount]
        mounts = tree["mounts"] if isinstance(tree.get("mounts"), list) else []
        tree["mounts"] = [*mounts, *({"claim": claim, "path": path} for claim, _, path in pairs)]
    if options.arguments:
        tree["command"] = options.arguments
    try:
        job = from_fields(tree, where=_SPECIFICATION)
    except ConfigError as error:
        if not error.message.startswith(f"{_SPECIFICATION} cannot be used:"):
            raise
        problems += error.message.splitlines()[1:]
    # A job with a default name would replace another's.
    problems += [f"  {field}: is missing" for field in ("name", "image") if not tree.get(field)]
    if problems:
        raise ConfigError(
            "\n".join([f"{_SPECIFICATION} cannot be used:", *problems]),
            fix="correct these; `kubedet job fields` explains each",
        )
    return job


def _from_file(name: str) -> dict[str, Any]:
    where = "stdin" if name == "-" else name
    try:
        with nullcontext(sys.stdin) if name == "-" else Path(name).open(encoding="utf-8") as file:
            text = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"cannot read the specification {where}: {why}", fix="pass a YAML or JSON file"
        ) from None
    refuse_userinfo(text, where)
    try:
        value = yaml_value(text, _MAX_BYTES)
    except ValueError as error:
        raise ConfigError(
            f"cannot read {where} as YAML: {error}", fix="correct it: a job's fields, each `field: value`"
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(
            f"{where} contains no job fields", fix="write one `field: value` per line, e.g. nodes: 2"
        )
    return value


def set_field(tree: dict[str, Any], kind: Any, text: str) -> list[str]:
    """Put one `path=value` into a tree with the fields of a dataclass, `kind`; return problems as lines."""
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not path:
        return [f"  --set {text!r} is not FIELD=VALUE"]
    problem = _put(tree, kind, path, value)
    return [f"  {path}: {problem}"] if problem else []


def _put(node: Any, kind: Any, path: str, value: str) -> str:
    """Set the value at a path below a node whose type is `kind`; return the problem, if any.

    The types of the fields decide: a mapping's key may contain dots (kubernetes.io/arch), a list's is a
    number, and a string's value is not parsed (cpu_limit=4).
    """
    container = get_origin(kind) or kind
    key, _, rest = (path, "", "") if container is Mapping else path.partition(".")
    part: Any = key
    if not isinstance(node, list if container is tuple else dict):
        return f"what is given before is no {'list' if container is tuple else 'mapping'}"
    if container is tuple:
        part, inner = whole_number(key), _plain(get_args(kind)[0])
        if part is None or part > len(node):
            return f"{key!r} is not a number from 0 to {len(node)}"
        if isinstance(node, list) and part == len(node):
            node.append(None)
    elif container is Mapping:
        inner = _plain(get_args(kind)[1])
    elif key in (hints := get_type_hints(kind)):
        inner = _plain(hints[key])
    else:
        return "no such field"
    if not rest:
        node[part] = value
        if inner is not str:
            with suppress(ValueError):  # Else the specification reports the expected type.
                node[part] = yaml_value(value, _MAX_BYTES)
        return ""
    if not is_dataclass(inner) and get_origin(inner) not in (Mapping, tuple):
        return f"{key} has no fields"
    if isinstance(node, dict):
        node.setdefault(part, None)
    if node[part] is None:
        node[part] = [] if get_origin(inner) is tuple else {}
    return _put(node[part], inner, rest, value)


def _plain(kind: Any) -> Any:
    if get_origin(kind) in (Union, UnionType):
        return next(item for item in get_args(kind) if item is not NoneType)
    return kind
