"""Wraps all functions of `kubedet.api`: validates arguments, and adds fixes to errors."""

import inspect
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

from trainer.base.errors import ConfigError, install_command, refuse_userinfo
from trainer.base.os_errors import translate_named_oserrors

P = ParamSpec("P")
R = TypeVar("R")


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function: validate its arguments, and convert system errors to KubedetErrors.

    Arguments must have the types in the signature; a `pathlib.Path` is accepted in place of a string.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given = signature.bind(*args, **kwargs)
        for name, value in given.arguments.items():
            plain = os.fspath(value) if isinstance(value, os.PathLike) else value
            check_text(plain, name)
            given.arguments[name] = _validate(name, plain, signature.parameters[name].annotation)
        with translate_errors():
            return function(*given.args, **given.kwargs)

    return call


def check_text(value: object, where: str) -> None:
    """Reject strings that contain a password, or that are not UTF-8 as manifests and pipelines require."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{where}: {value!r} is not UTF-8",
                fix="rename the file or folder, or pass the folder that contains it",
            ) from None
        refuse_userinfo(value, where)
    elif isinstance(value, Mapping):
        check_text([*value, *value.values()], where)
    elif isinstance(value, list | tuple):
        for item in value:
            check_text(item, where)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Convert OSErrors that name a file, and failed imports, to KubedetErrors."""
    try:
        with translate_named_oserrors():
            yield
    except ModuleNotFoundError as error:
        package, system = (error.name or "").partition(".")[0], platform.system()
        if package in sys.stdlib_module_names:
            reason, fix = f"{system} does not have", "use Linux, a container or WSL"
        elif package and not find_spec(package):
            reason, fix = "is not installed", install_command("train")
        else:
            raise
        raise ConfigError(f"this command needs {package}, which {reason}", fix=fix) from None


def _validate(name: str, value: Any, annotation: Any) -> Any:
    if isinstance(annotation, str):  # A class that is slow to import is not checked.
        return value
    from pydantic import ValidationError

    try:
        return _type_adapter(annotation).validate_python(value, strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        name = f"{name}.{problem['loc'][0]}" if is_dataclass(annotation) else name
        fix = f"correct the argument {name}, which is {str(problem['input'])[:60]!r}"
        raise ConfigError(f"{name}: {problem['msg']}", fix=fix) from None


@cache
def _type_adapter(annotation: Any) -> Any:
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter

    try:
        return TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:  # The type is a dataclass, which has its own configuration.
        return TypeAdapter(annotation)
