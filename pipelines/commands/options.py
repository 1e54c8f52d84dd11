"""Options that several commands share."""

import argparse


def add_training(parser: argparse.ArgumentParser) -> None:
    """Declare what to train on and how."""
    parser.add_argument(
        "--source", default="sample", metavar="URI",
        help="sample (drawn by the program), coco:URI, coco:2017, voc:URI, openimages: (default: sample)",
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
