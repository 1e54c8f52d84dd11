"""Creates Typer commands from functions: options from the signature, help from the docstring.

A positional parameter becomes an argument of the command; a keyword-only parameter becomes an option with the
same name, with `-` for `_`. The text in its `Annotated` is the name of its value in the help.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from trainer.base.errors import ConfigError

Function = Callable[..., Any]
Builders = dict[Any, Function]
"""Functions that build the value of a parameter, by its annotation. Their parameters become options."""

FLAGS = {
    "count": ("--count", "-n"),
    "fields": ("--set",),
    "follow": ("--follow", "-f"),
    "namespace": ("--namespace", "-n"),
    "output": ("--output", "-o"),
    "overrides": ("--set",),
}
"""Option names by parameter, if there are several or they differ from the parameter's name."""

COMMON_HELP = {"json": "print the result as JSON"}
"""Help of options that docstrings do not describe."""

_SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Examples):$", re.MULTILINE)
_ARGUMENT = re.compile(r"^    (\w+): ", re.MULTILINE)
_TYPE_NAMES = {int: "N", float: "X", str: "TEXT"}


@dataclass(frozen=True)
class Docstring:
    """A docstring in Google's style."""

    text: str  # Summary and description.
    parameters: Mapping[str, str]  # Descriptions of the parameters, each as one line.

    @classmethod
    def parse(cls, function: Function) -> "Docstring":
        """Read the docstring of a function or a class."""
        text, *sections = _SECTION.split(inspect.getdoc(function) or "")
        args = dict(zip(sections[::2], sections[1::2], strict=True)).get("Args", "")
        _, *parts = _ARGUMENT.split(args)
        described = dict(zip(parts[::2], parts[1::2], strict=True))
        return cls(text.strip(), {name: " ".join(text.split()) for name, text in described.items()})


@dataclass(frozen=True)
class Option:
    """An option or argument of a command: one parameter of a function."""

    name: str
    kind: Any  # Type that Typer parses: int, float, bool, str, Literal, or a list of these.
    value: str  # Name of the value in the help; empty for switches and choices.
    help: str
    default: Any
    is_argument: bool
    is_mapping: bool  # Whether each value is KEY=VALUE.

    @classmethod
    def from_parameter(cls, parameter: inspect.Parameter, text: str) -> "Option":
        """Return the option for a parameter with the description `text`."""
        kind, value, default = parameter.annotation, "", parameter.default
        while get_origin(kind) in (Annotated, Union, UnionType):
            if get_origin(kind) is Annotated:
                value = value or next((item for item in get_args(kind) if isinstance(item, str)), "")
                kind = get_args(kind)[0]
            else:  # The command line uses the first type of the union.
                kind = get_args(kind)[0]
        is_mapping, is_repeated = get_origin(kind) is Mapping, get_origin(kind) is Sequence
        kind = str if is_mapping else get_args(kind)[0] if is_repeated else kind
        if kind is not bool and get_origin(kind) is not Literal:
            value = value or _TYPE_NAMES[kind]
        if is_mapping or is_repeated:
            kind = list.__class_getitem__(kind)
            default = [] if default is not parameter.empty else default
        is_argument = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        return cls(parameter.name, kind, value, text, default, is_argument, is_mapping)

    @property
    def flags(self) -> tuple[str, ...]:
        """The option's names on the command line; none for an argument."""
        return () if self.is_argument else FLAGS.get(self.name, (f"--{self.name.replace('_', '-')}",))

    @property
    def placeholder(self) -> str:
        """Placeholder of the value in the help, e.g. `URI` or `train|val|test`; empty for a switch."""
        if self.value:
            return f"{self.value}..." if get_origin(self.kind) is list else self.value
        return "|".join(map(str, get_args(self.kind)))

    @property
    def shows_default(self) -> bool:
        """Whether the help appends the default: only if it is not empty and not in the description."""
        empty: tuple[Any, ...] = ("", None, False, [], inspect.Parameter.empty)
        return self.default not in empty and "default:" not in self.help

    def declare(self) -> inspect.Parameter:
        """Return the parameter with the annotation that Typer reads."""
        make: Function = typer.Argument if self.is_argument else typer.Option
        settings = {"help": self.help, "show_default": self.shows_default, "metavar": self.value or None}
        annotation = Annotated.__class_getitem__((self.kind, make(*self.flags, **settings)))  # type: ignore[attr-defined]
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.name, kind, default=self.default, annotation=annotation)


def read_options(
    function: Function, builders: Builders, *, only_keywords: bool = False
) -> dict[str, list[Option]]:
    """Return the options for each parameter of a function: one, or those of the builder of the parameter."""
    described = COMMON_HELP | {**Docstring.parse(function).parameters}
    options = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if only_keywords and parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        if build := builders.get(parameter.annotation):
            options[name] = [option for below in read_options(build, {}).values() for option in below]
        else:
            options[name] = [Option.from_parameter(parameter, described[name])]
    return options


def make_command(
    function: Function,
    show: Function,
    builders: Builders,
    readers: Mapping[str, Callable[[list[str]], Any]],
) -> Function:
    """Return a function for a Typer command: it calls `function`, shows the result, and returns an exit code.

    Args:
        function: the function of the API that the command calls.
        show: prints the result; its keyword-only parameters become further options. It may return an exit
            code. Its parameter `arguments`, if any, receives the arguments of the call.
        builders: see `Builders`.
        readers: functions that parse the KEY=VALUE texts of an option, by its name; default: `read_pairs`.
    """
    parameters = inspect.signature(function).parameters
    groups = read_options(function, builders)
    shown = read_options(show, {}, only_keywords=True)

    def run(**given: Any) -> int:
        def read(option: Option) -> Any:
            value = given[option.name]
            return readers.get(option.name, read_pairs)(value) if option.is_mapping else value

        arguments = {}
        for name, options in groups.items():
            if build := builders.get(parameters[name].annotation):
                arguments[name] = build(**{option.name: read(option) for option in options})
            else:
                arguments[name] = read(options[0])
        further = {name: given[name] for name in shown}
        if "arguments" in inspect.signature(show).parameters:
            further["arguments"] = arguments
        return show(function(**arguments), **further) or 0

    declared = [option.declare() for options in (groups | shown).values() for option in options]
    run.__signature__ = inspect.Signature(declared)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in declared}
    return run


def read_pairs(texts: Sequence[str]) -> dict[str, str]:
    """Parse KEY=VALUE texts."""
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise ConfigError(f"{text!r} is not KEY=VALUE", fix="write a name, =, and its value")
        pairs[key] = value
    return pairs
