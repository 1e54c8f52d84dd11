"""`kubedet data merge`: a data set with corrections of it, as a new one."""

import argparse
import os
import shlex
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.data.merging import Merged

_SHOWN = 10


def add(verbs: "argparse._SubParsersAction[Any]") -> None:
    """Declare the verb."""
    parser = verbs.add_parser(
        "merge",
        help="put a set and corrections of it together",
        description="Write a new COCO set of a set and of corrections, such as the page of `kubedet serve` "
        "gives, or of any other set. Classes are matched by name. An image that is in both, by its bytes, "
        "has the boxes of the correction and stays in its split; others are added to train. The new set is "
        "there whole or not at all. Exit code: 0; 2 where something cannot be used.",
    )
    parser.add_argument("set", metavar="SET", help="the set, as --source of `kubedet run` takes it")
    parser.add_argument(
        "corrections", nargs="+", metavar="CORRECTIONS",
        help="sets likewise, e.g. corrections.zip; the later before the earlier where both have an image",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", required=True, metavar="DIR",
        help="folder of the new set; its models are called after its last part",
    )  # fmt: skip
    parser.add_argument(
        "--keep-overlaps", action="store_true",
        help="accept corrected images that have boxes of different classes in the same place",
    )  # fmt: skip
    parser.set_defaults(command=_merge)


def _merge(options: argparse.Namespace) -> int:
    from trainer.data.merging import merge

    merged = merge(options.set, options.corrections, options.output, keep_overlaps=options.keep_overlaps)
    for split, count in merged.images.items():
        boxes, corrected = _count(merged.boxes[split], "box"), merged.corrected[split]
        print(f"{split}: {_count(count, 'image')} with {boxes}, {corrected} corrected")
    print(f"{_count(merged.added, 'image')} of the corrections added to train")
    _tell(merged)
    place = shlex.quote(f"coco:{os.path.relpath(merged.folder)}")
    print(f"\nto train on it: kubedet run --source {place} --recipe small")
    return 0


def _tell(merged: "Merged") -> None:
    """Print what somebody should know before a training."""
    _list("classes that the set did not have", merged.new_classes)
    _list("images with other boxes in more than one of the corrections; the last is taken", merged.contested)
    _list("images whose name another one has", merged.renamed)
    _list("images of the set that cannot be had, left out", merged.left_out)
    if merged.boxes_left_out:
        print(f"{merged.boxes_left_out} boxes of the set that cannot be used, left out")
    if merged.boxes_kept:
        kept = f"{_count(merged.boxes_kept, 'box')} of corrected images kept"
        print(f"{kept}: crowds, or of classes that the corrections do not have")


def _list(title: str, items: list[str]) -> None:
    if items:
        more = f"\n  and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
        print(f"{len(items)} {title}:\n" + "\n".join(f"  {item}" for item in items[:_SHOWN]) + more)


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("x") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"
