"""`kubedet weights`: fetch and list the published weights that recipes start from."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from pipelines.commands import Commands, columns, option, verb
from pipelines.commands.options import add_published
from trainer.base.errors import ConfigError
from trainer.model import recipes

if TYPE_CHECKING:
    from trainer.weights.weights_mirror import MirroredWeights

_NAMES = "recipes, or weights: torchvision:NAME, hf:ORG/NAME, https://... (default: those of all recipes)"
_ROOT = "where data is kept: a folder or e.g. s3://bucket/prefix; weights are in weights/"


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "weights",
        description="Fetch published weights into a data root, e.g. for a cluster without internet, or list "
        "them.",
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    fetch = verb(
        verbs, "fetch", _fetch, "fetch weights into DATA_ROOT/weights",
        "Fetch weights into DATA_ROOT/weights and check their hashes; damaged files are fetched again. For a "
        "cluster, fetch into a folder and copy its weights/ into the cluster's data root.",
    )  # fmt: skip
    listing = verb(
        verbs, "list", _list, "list the weights of recipes",
        "List weights with their size, hash, recipes, and whether DATA_ROOT/weights has them.",
    )  # fmt: skip
    for parser in (fetch, listing):
        parser.add_argument("names", nargs="*", metavar="NAME", help=_NAMES)
        add_published(parser, _ROOT)
        option(parser, "-o --output text|json", "default: text", "text")


def _fetch(options: argparse.Namespace) -> int:
    from trainer.base import log
    from trainer.weights import weights_mirror

    log.setup()
    rows = []
    for uri, needed_by in _choose(options.names).items():
        weights_mirror.obtain(uri, options.data_root)
        mirrored = weights_mirror.look_up(uri, options.data_root)
        rows.append(_row(mirrored, needed_by))
        if options.output == "text":
            print(f"{uri}: {_size(mirrored)} in {weights_mirror.place_of(uri, options.data_root)}")
    if options.output == "json":
        print(json.dumps(rows, indent=2))
    elif not rows:
        print("these recipes start from random weights")
    return 0


def _list(options: argparse.Namespace) -> int:
    from trainer.weights import weights_mirror

    weights = [
        (weights_mirror.look_up(uri, options.data_root), needed_by)
        for uri, needed_by in _choose(options.names).items()
    ]
    if options.output == "json":
        print(json.dumps([_row(*one) for one in weights], indent=2))
        return 0
    rows = [("weights", "recipes", "size", "SHA-256", "state")]
    for mirrored, needed_by in weights:
        digits = mirrored.file.sha256[:8] if mirrored.file else "-"
        state = "there" if mirrored.complete else "missing"
        rows.append((mirrored.uri, ", ".join(needed_by), _size(mirrored), digits, state))
    print(f"{weights_mirror.mirror_of(options.data_root)}\n\n{columns(rows, right={2})}")
    return 0


def _choose(names: list[str]) -> dict[str, list[str]]:
    from trainer.weights.weights_mirror import is_published

    needed: dict[str, list[str]] = {}
    for recipe in recipes.RECIPES:
        uri = recipes.load(recipe, recipes.WITH_WEIGHTS.get(recipe)).model.weights
        if uri and (not names or recipe in names or uri in names):
            needed.setdefault(uri, []).append(recipe)
    for name in names:
        if is_published(name):
            needed.setdefault(name, [])
        elif name not in recipes.RECIPES:
            raise ConfigError(
                f"{name!r} is neither a recipe nor the name of published weights",
                fix=f"use one of {', '.join(recipes.RECIPES)}, torchvision:NAME, hf:ORG/NAME or https://...",
            )
    return needed


def _row(mirrored: "MirroredWeights", needed_by: list[str]) -> dict[str, Any]:
    file, files = mirrored.file, []
    if file:
        there = mirrored.complete
        files = [{"name": file.name, "bytes": file.size or None, "sha256": file.sha256, "there": there}]
    return {"weights": mirrored.uri, "recipes": needed_by, "complete": mirrored.complete, "files": files}


def _size(mirrored: "MirroredWeights") -> str:
    size = mirrored.file.size if mirrored.file else 0
    return f"{size / 1e6:,.1f} MB" if size else "-"
