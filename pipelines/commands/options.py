"""Options that several commands share."""

import argparse
import os
from typing import Any

from pipelines.parameters import LOCAL, Parameter
from trainer.base.errors import ConfigError
from trainer.config.parsing import parse_overrides
from trainer.model import recipes


def add_overrides(parser: "argparse._ActionsContainer") -> None:
    """Declare --set and its short forms --boxes and --merge-classes, in a parser or a group of it."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="change one value of the configuration, e.g. train.lr=0.01; may be given again; "
        "`kubedet recipes --explain` says what there is",
    )  # fmt: skip
    parser.add_argument(
        "--boxes", action=_Set, choices=["auto", "xywh", "xyxy", "normalised"],
        const="data.box_format", dest="overrides", default=argparse.SUPPRESS,
        help="how the boxes of a COCO JSON are written; auto (the default) reads xywh in pixels, and fails "
        "if they look different; short for --set data.box_format=...",
    )  # fmt: skip
    parser.add_argument(
        "--merge-classes", action="append_const", const="data.merge_classes=true", dest="overrides",
        default=argparse.SUPPRESS,
        help="make one class of names that differ only by case, spaces or Unicode form; short for "
        "--set data.merge_classes=true",
    )  # fmt: skip


class _Set(argparse.Action):
    """Sets the key in `const` to the option's value, as --set does."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), f"{self.const}={values}"])


def read_recipe(options: argparse.Namespace) -> dict[str, Any]:
    """Return the overrides of --set, and put a recipe's name where --recipe names a file.

    What the file sets is among the overrides; --set goes before it.

    Raises:
        ConfigError: either cannot be used; StorageError: the file cannot be read.
    """
    overrides = parse_overrides(options.overrides)
    if options.recipe is None:
        return overrides
    options.recipe, of_file = recipes.named(options.recipe)
    return of_file | overrides


def add_parameter(parser: "argparse._ActionsContainer", item: Parameter) -> None:
    """Declare the option of a parameter of the pipeline; it is None where nobody gives it."""
    # argparse takes a percent sign for a format.
    description = item.help().replace("%", "%%")
    parser.add_argument(item.option, type=item.kind, metavar=item.metavar, help=description)


def add_published(parser: argparse.ArgumentParser, what: str = "where published models are") -> None:
    """Declare the data root, and what it is to the command."""
    parser.add_argument(
        "--data-root", default=LOCAL["data_root"].default, metavar="URI",
        help=f"{what} (default: %(default)s)",
    )  # fmt: skip


def add_prices(parser: argparse.ArgumentParser) -> None:
    """Declare --prices."""
    parser.add_argument(
        "--prices", default="", metavar="FILE",
        help="prices of hours and bytes, as YAML (default: what KUBEDET_PRICES names, or prices.yaml "
        "in the data root)",
    )  # fmt: skip


def use_prices(options: argparse.Namespace) -> str:
    """Let this process, and those that it starts, take the prices of --prices; return their absolute URI.

    Raises:
        ConfigError: the file cannot be used; StorageError: it cannot be read.
    """
    if not options.prices:
        return ""
    from operations import costs
    from trainer import storage

    uri = storage.absolute(options.prices)
    costs.read_prices(uri)
    os.environ[costs.VARIABLE] = uri
    return uri


def add_model(parser: argparse.ArgumentParser) -> None:
    """Declare which exported model is meant."""
    parser.add_argument(
        "model", metavar="MODEL",
        help="an exported model's folder (RUN/model, also on s3://), or NAME or NAME@VERSION of a "
        "published one",
    )  # fmt: skip
    add_published(parser)


def add_runtime(parser: argparse.ArgumentParser) -> None:
    """Declare which of a model's formats is run."""
    parser.add_argument(
        "--format", default="", metavar="F", dest="kind",
        help="format of the model to run: onnx, openvino, onnx-int8, torch-export (default: the first there "
        "is)",
    )  # fmt: skip
    parser.add_argument(
        "--run-code", action="store_true",
        help="open torch-export's model.pt2 too, which is a program: it can do on this machine whatever you "
        "can",
    )  # fmt: skip


def add_pixel_limit(parser: argparse.ArgumentParser) -> None:
    """Declare how large an image may be that is decoded."""
    parser.add_argument(
        "--max-pixels", type=int, default=50_000_000, metavar="N",
        help="images with more pixels are refused by their header, before they are decoded: a file of some "
        "kilobytes can take gigabytes of memory (default: %(default)s)",
    )  # fmt: skip


def checked_pixel_limit(options: argparse.Namespace) -> int:
    """Return the largest image, in pixels.

    Raises:
        ConfigError: it is not in the range of what can be decoded.
    """
    from trainer.data.images import MAX_PIXELS

    most: int = options.max_pixels
    if not 1 <= most <= MAX_PIXELS:
        raise ConfigError(
            f"--max-pixels must be from 1 to {MAX_PIXELS}, not {most}", fix="leave it out, or use 100000000"
        )
    return most
