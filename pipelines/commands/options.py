"""Options of `kubedet run`."""

import argparse

from pipelines.commands import option
from pipelines.parameters import Parameter, Values
from trainer.config.parsing import parse_overrides
from trainer.model import recipes

Options = argparse.Namespace
Group = argparse._ActionsContainer


def add_overrides(parser: Group) -> None:
    """Declare --set."""
    option(
        parser,
        "--set KEY=VALUE...",
        "change one value of the configuration, e.g. train.lr=0.01; may be "
        "repeated; `kubedet recipes explain` lists the keys",
        dest="overrides",
    )


def read_recipe(options: Options) -> Values:
    """Return the overrides of a recipe file and of --set, which wins; replace the file by its recipe."""
    overrides = parse_overrides(options.overrides)
    if options.recipe is None:
        return overrides
    options.recipe, of_file = recipes.named(options.recipe)
    return of_file | overrides


def add_parameter(parser: Group, item: Parameter) -> None:
    """Declare the option of a parameter of the pipeline; its default is None."""
    option(parser, f"{item.option} {item.metavar}", item.help(), None, type=item.kind)
