"""Options that several commands share."""

import argparse

from trainer import configuration
from trainer.errors import ConfigError


def add_training(parser: argparse.ArgumentParser) -> None:
    """Declare what to train on and how."""
    parser.add_argument(
        "--source", default="sample", metavar="URI",
        help="sample (drawn by the program), coco:PATH, voc:PATH (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--recipe", default="debug", metavar="NAME", help="see `kubedet recipes` (default: debug)"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="change one value of the recipe, e.g. train.lr=0.01; may be given again",
    )  # fmt: skip
    parser.add_argument(
        "--gate", default="", metavar="RULE",
        help="what a model must reach to be exported, e.g. 'coco/AP50 >= 0.5' (default: the recipe's)",
    )  # fmt: skip


def pairs(texts: list[str], option: str = "--set") -> dict[str, object]:
    """Read `key=value` texts; a value is JSON where it is JSON, else text.

    Raises:
        ConfigError: a text is not of that form.
    """
    values = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ConfigError(
                f"{option} {text!r} is not key=value", fix=f"write it like {option} train.epochs=10"
            )
        values[key.strip()] = configuration.parse_value(value)
    return values
