"""`kubedet recipes`: the named configurations."""

import argparse

from pipelines.commands import Commands
from trainer import configuration, recipes


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser("recipes", help="list the named configurations")
    parser.add_argument("--show", metavar="NAME", help="print one with all its keys, as JSON")
    parser.set_defaults(command=_recipes)


def _recipes(options: argparse.Namespace) -> int:
    if options.show:
        print(configuration.to_json(recipes.load(options.show)), end="")
        return 0
    width = max(map(len, recipes.RECIPES))
    for name, recipe in recipes.RECIPES.items():
        print(f"{name:<{width}}  {(recipe.__doc__ or '').splitlines()[0]}")
    return 0
