"""`kubedet data prune`: frees the space of what nothing needs any more."""

import argparse
import json
from typing import TYPE_CHECKING

from pipelines.commands import Commands
from pipelines.commands.options import add_published
from trainer.base.errors import ConfigError

if TYPE_CHECKING:
    from operations.retention.pruning import Pruned


_SHOWN = 2
"""Reasons to keep a thing that the table shows; JSON has all."""


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "prune", help="free the space of runs, versions and data that nothing needs any more",
        description="Delete runs with their checkpoints, versions of models, shards, raw tables and images "
        "of a data root that nothing needs. Kept is what the newest runs, current versions, those that "
        "`model rollback` goes to, signed, registered and pinned ones and runs that have not ended need, "
        "and what was written a short time ago. Exit code: 0; 2 for a mistake, or while another one goes on.",
    )  # fmt: skip
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--dry-run", action="store_true", help="say what would go and why the rest is kept")
    what.add_argument("--yes", action="store_true", help="do it")
    what.add_argument("--pin", metavar="NAME", help="keep a run, or what the table calls NAME, from now on")
    what.add_argument("--unpin", metavar="NAME", help="let it go again when nothing else needs it")
    parser.add_argument(
        "--keep", type=int, default=0, metavar="N",
        help="how many of the newest runs, and versions to go back to, are kept; must be given",
    )  # fmt: skip
    parser.add_argument(
        "--grace", type=float, default=24.0, metavar="HOURS",
        help="keep what was written in the last so many hours (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--runs", default="", metavar="DIR",
        help="where runs are that do not lie below the data root, e.g. ./runs of `kubedet run`",
    )  # fmt: skip
    parser.add_argument("-o", "--output", default="", choices=("json",), help="print JSON")
    add_published(parser, "where data is kept")
    parser.set_defaults(command=_prune)


def _prune(options: argparse.Namespace) -> int:
    from operations.retention import pins, pruning
    from trainer import storage

    runs = storage.absolute(options.runs) if options.runs else ""
    root = storage.absolute(options.data_root)
    if options.pin or options.unpin:
        name = pins.pin(root, options.pin, runs) if options.pin else pins.unpin(root, options.unpin)
        print(
            f"{name} is {'pinned: it is kept, and what it needs' if options.pin else 'not pinned any more'}"
        )
        return 0
    if options.grace < 0:
        raise ConfigError(f"--grace {options.grace:g} is less than zero", fix="leave it out")
    do = pruning.prune if options.yes else pruning.plan
    pruned = do(root, options.keep, grace=options.grace * 3600, runs=runs)
    if options.output:
        print(json.dumps(_tree(pruned, freed=options.yes), indent=2))
        return 0
    print(_table(pruned, "freed" if options.yes else "would go"))
    print(f"{'freed' if options.yes else 'would free'} {pruned.told}")
    if options.dry_run:
        print("nothing was deleted; --yes does it")
    return 0


def _tree(pruned: "Pruned", *, freed: bool) -> dict[str, object]:
    things = [
        {
            "name": thing.name, "bytes": thing.size, "kept": bool(thing.why), "why": thing.why,
            "freed_bytes": thing.freed, "freed_images": len(thing.spare) if thing.why else None,
        }
        for thing in pruned.things.values()
    ]  # fmt: skip
    return {"kind": "prune", "version": 1, "done": freed, "freed_bytes": pruned.size, "things": things}


def _table(pruned: "Pruned", word: str) -> str:
    """Return a line for each thing: its name, its megabytes, and why it is kept."""
    rows = []
    for thing in sorted(pruned.things.values(), key=lambda thing: (bool(thing.why), thing.name)):
        why = "; ".join(thing.why[:_SHOWN]) or word
        if more := len(thing.why[_SHOWN:]):
            why += f"; and {more} more"
        if thing.why and thing.spare:
            why += f"; {len(thing.spare):,} images that nothing refers to: {word}"
        rows.append((thing.name, f"{thing.size / 1e6:,.1f} MB", why))
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    return "\n".join(f"{name:<{widths[0]}}  {size:>{widths[1]}}  {why}" for name, size, why in rows)
