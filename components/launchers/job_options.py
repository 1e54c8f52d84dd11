"""The specification of a job from a file, `FIELD=VALUE` texts, and single fields."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from components.launchers.spec import JobSpec, build_spec
from trainer.base.errors import ConfigError, refuse_userinfo
from trainer.base.safe_text import parse_digits, parse_yaml

_MAX_BYTES = 200_000  # Maximum length of a specification; most have a thousand characters.

_SPECIFICATION = "the job's specification"
_FIX = "correct these; `kubedet job fields` explains each"


def read_job(
    command: Annotated[Sequence[str], "[--] COMMAND"] = (),
    *,
    spec: Annotated[str, "FILE"] = "",
    fields: Annotated[Sequence[str], "FIELD=VALUE"] = (),
    name: Annotated[str | None, "NAME"] = None,
    image: Annotated[str | None, "IMAGE"] = None,
    nodes: int | None = None,
    nproc: int | None = None,
    gpus: int | None = None,
    env: Annotated[Sequence[str], "NAME=VALUE"] = (),
    mount: Annotated[Sequence[str], "CLAIM:PATH"] = (),
) -> JobSpec:
    """Return a job from a file; `fields` and the other arguments override its fields.

    Args:
        command: what each pod runs; after -- it may have options
        spec: the job's fields as YAML or JSON; - reads stdin
        fields: set one field, nested ones with dots: network.profile=rdma; may be repeated
        name: name of the job
        image: container image
        nodes: number of pods
        nproc: training processes in each pod; 0: one for each GPU
        gpus: GPUs of each pod
        env: an environment variable; may be repeated
        mount: mount a PersistentVolumeClaim in every pod; may be repeated

    Raises:
        ConfigError: lists every invalid field.
    """
    tree = _read_file(spec) if spec else {}
    texts = [*fields, *(f"env.{text}" for text in env)]
    given = {"name": name, "image": image, "nodes": nodes, "nproc": nproc, "gpus": gpus}
    texts += [f"{field}={value}" for field, value in given.items() if value is not None]
    problems = [problem for text in texts for problem in set_field(tree, JobSpec, text)]
    if mount:
        pairs = [text.partition(":") for text in mount]
        mounts = tree["mounts"] if isinstance(tree.get("mounts"), list) else []
        tree["mounts"] = [*mounts, *({"claim": claim, "path": path} for claim, _, path in pairs)]
    if command:
        tree["command"] = list(command)
    try:
        job = build_spec(tree, where=_SPECIFICATION)
    except ConfigError as error:
        if not error.message.startswith(f"{_SPECIFICATION} cannot be used:"):
            raise
        problems += error.message.splitlines()[1:]
    # With a default name, a job would replace those of others.
    problems += [f"  {field}: is missing" for field in ("name", "image") if not tree.get(field)]
    if problems:
        raise ConfigError("\n".join([f"{_SPECIFICATION} cannot be used:", *problems]), fix=_FIX)
    return job


def parse_fields(texts: Sequence[str]) -> dict[str, Any]:
    """Parse FIELD=VALUE texts into a tree of fields."""
    tree: dict[str, Any] = {}
    if problems := [problem for text in texts for problem in set_field(tree, JobSpec, text)]:
        raise ConfigError("\n".join(["fields of the job cannot be used:", *problems]), fix=_FIX)
    return tree


def _read_file(name: str) -> dict[str, Any]:
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
        value = parse_yaml(text, _MAX_BYTES)
    except ValueError as error:
        raise ConfigError(
            f"cannot read {where} as YAML: {error}", fix="write one `field: value` per line"
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
        return [f"  {text!r} is not FIELD=VALUE"]
    problem = _set_value(tree, kind, path, value)
    return [f"  {path}: {problem}"] if problem else []


def _set_value(node: Any, kind: Any, path: str, value: str) -> str:
    """Set the value at a path below a node whose type is `kind`; return the problem, if any.

    The types of the fields matter: a mapping's key may contain dots (kubernetes.io/arch), a list's is a
    number, and the value of a string field is not parsed (cpu_limit=4).
    """
    container = get_origin(kind) or kind
    key, _, rest = (path, "", "") if container is Mapping else path.partition(".")
    part: Any = key
    if not isinstance(node, list if container is tuple else dict):
        return f"the value given before is not a {'list' if container is tuple else 'mapping'}"
    if container is tuple:
        part, inner = parse_digits(key), _without_none(get_args(kind)[0])
        if part is None or part > len(node):
            return f"{key!r} is not a number from 0 to {len(node)}"
        if isinstance(node, list) and part == len(node):
            node.append(None)
    elif container is Mapping:
        inner = _without_none(get_args(kind)[1])
    elif key in (hints := get_type_hints(kind)):
        inner = _without_none(hints[key])
    else:
        return "no such field"
    if not rest:
        node[part] = value
        if inner is not str:
            with suppress(ValueError):  # Otherwise the specification reports the expected type.
                node[part] = parse_yaml(value, _MAX_BYTES)
        return ""
    if not is_dataclass(inner) and get_origin(inner) not in (Mapping, tuple):
        return f"{key} has no fields"
    if isinstance(node, dict):
        node.setdefault(part, None)
    if node[part] is None:
        node[part] = [] if get_origin(inner) is tuple else {}
    return _set_value(node[part], inner, rest, value)


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, UnionType):
        return next(item for item in get_args(kind) if item is not NoneType)
    return kind
