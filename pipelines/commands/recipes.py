"""`kubedet recipes`: the named configurations."""

import argparse
from collections.abc import Iterable
from dataclasses import asdict

from pipelines.commands import Commands
from pipelines.commands.field_help import Kinds, describe
from pipelines.tables import columns
from trainer.config import architectures, parsing
from trainer.config.schema import Config, ModelConfig
from trainer.model import recipes


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "recipes",
        description="List the named configurations; a run takes one (--recipe) and changes single keys of it "
        "(--set).",
    )
    parser.add_argument("--show", metavar="NAME", help="print one with all its keys, as JSON")
    parser.add_argument(
        "--explain", nargs="?", const="", metavar="TEXT",
        help="say what each key means, or each that names TEXT, e.g. train. or anchor; with the values of "
        "--show NAME, or the defaults",
    )  # fmt: skip
    parser.set_defaults(command=_recipes)


def model_kinds(names: Iterable[str]) -> Kinds:
    """The kinds of the section `model`: the options of architectures, by their names."""
    return {ModelConfig: {name: architectures.options_class(name) for name in names}}


def _recipes(options: argparse.Namespace) -> int:
    if options.explain is not None:
        values = asdict(recipes.load(options.show)) if options.show else None
        names = [values["model"]["architecture"]] if values else list(architectures.ARCHITECTURES)
        print(describe(Config, options.explain, values, model_kinds(names)))
        return 0
    if options.show:
        print(parsing.to_json(recipes.load(options.show)), end="")
        return 0
    print(columns([(name, (of.__doc__ or "").splitlines()[0]) for name, of in recipes.RECIPES.items()]))
    return 0
