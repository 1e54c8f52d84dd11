"""Options that several commands share."""

import argparse


def add_overrides(parser: "argparse._ActionsContainer") -> None:
    """Declare --set, in a parser or a group of it."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="change one value of the configuration, e.g. train.lr=0.01; may be given again; "
        "`kubedet recipes --explain` says what there is",
    )  # fmt: skip


def add_training(parser: argparse.ArgumentParser) -> None:
    """Declare what to train on and how."""
    parser.add_argument(
        "--source", default="sample", metavar="URI",
        help="images and boxes: sample (drawn by the program), coco:URI, coco:2017, voc:URI, openimages:, or "
        "the path of a COCO or VOC folder (default: sample)",
    )  # fmt: skip
    parser.add_argument(
        "--recipe",
        default="debug",
        metavar="NAME",
        help="a whole configuration, see `kubedet recipes` (default: debug)",
    )
    add_overrides(parser)
    parser.add_argument(
        "--gate", default="", metavar="RULE",
        help="what a model must reach to be exported, e.g. 'coco/AP50 >= 0.5' (default: the recipe's)",
    )  # fmt: skip


def add_published(parser: argparse.ArgumentParser) -> None:
    """Declare where published models are."""
    parser.add_argument(
        "--data-root", default="./data_root", metavar="URI",
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
