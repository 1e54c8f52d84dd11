"""Options that several commands share."""

import argparse

from pipelines.parameters import LOCAL, Parameter


def add_overrides(parser: "argparse._ActionsContainer") -> None:
    """Declare --set, in a parser or a group of it."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="change one value of the configuration, e.g. train.lr=0.01; may be given again; "
        "`kubedet recipes --explain` says what there is",
    )  # fmt: skip


def add_parameter(parser: "argparse._ActionsContainer", item: Parameter) -> None:
    """Declare the option of a parameter of the pipeline; it is None where nobody gives it."""
    # argparse takes a percent sign for a format.
    description = item.help().replace("%", "%%")
    parser.add_argument(item.option, type=item.kind, metavar=item.metavar, help=description)


def add_published(parser: argparse.ArgumentParser) -> None:
    """Declare where published models are."""
    parser.add_argument(
        "--data-root", default=LOCAL["data_root"].default, metavar="URI",
        help="where published models are (default: %(default)s)",
    )  # fmt: skip


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
