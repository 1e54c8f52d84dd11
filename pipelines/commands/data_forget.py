"""`kubedet data forget`: images that must go."""

import argparse
from typing import Any

from pipelines.commands import Commands
from pipelines.commands.options import add_published


def add(verbs: Commands) -> None:
    """Declare the command."""
    parser = verbs.add_parser(
        "forget", help="take images out of the data root and of all later runs",
        description="Delete images, the raw tables and shards that hold them, and leave them out of every "
        "later download of their sources. Says which runs and models saw them; with --min-new-images the "
        "next run of such a model trains. Models are not deleted. Exit code: 0; 2 where an image is not "
        "known or a run still trains with it.",
    )  # fmt: skip
    parser.add_argument("keys", nargs="+", metavar="KEY", help="key or file name of an image")
    add_published(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--dry-run", action="store_true", help="say what would be deleted, and delete nothing")
    what.add_argument("--yes", action="store_true", help="do it")
    parser.set_defaults(command=_forget)


def _forget(options: argparse.Namespace) -> int:
    from operations import forgetting

    planned = forgetting.plan(options.data_root, options.keys)
    _show(planned)
    if options.dry_run:
        print("nothing was deleted; --yes does it")
        return 0
    forgetting.forget(options.data_root, planned)
    print("done; the next download of each source is made without them")
    return 0


def _show(planned: dict[str, Any]) -> None:
    names = sorted({image.file_name for image in planned["images"]})
    print(f"to be forgotten: {', '.join(names)}")
    for folder in planned["folders"]:
        print(f"  delete {folder}, which holds them; it is made again without them")
    for uri in planned["files"]:
        print(f"  delete {uri}")
    print(f"  seen by the runs    {', '.join(planned['runs']) or 'none known'}")
    print(f"  seen by the models  {', '.join(planned['models']) or 'none'}")
