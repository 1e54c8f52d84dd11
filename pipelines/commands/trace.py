"""`kubedet trace`: what something was made from, and who saw an image."""

import argparse
import json
from typing import Any

from pipelines.commands import Commands
from pipelines.commands.options import add_published


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "trace",
        help="tell what a model or run was made from, and who saw an image",
        description="From a model or a run: run, checkpoint, configuration, code, shards, raw data, source. "
        "From an image: every set of shards that had it, in which split, and the runs and versions that were "
        "made of it, also where the data are gone. Exit code: 0; 2 where nothing of that name is known.",
    )
    parser.add_argument(
        "what", metavar="MODEL|RUN|IMAGE",
        help="NAME, NAME@VERSION or the folder of a model; name, id or folder of a run; key, file name or "
        "digest (16 hex digits) of an image or its annotations",
    )  # fmt: skip
    add_published(parser)
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(command=_trace)


def _trace(options: argparse.Namespace) -> int:
    from components import lineage

    lineage_of = lineage.trace(options.what, options.data_root)
    if options.json:
        print(json.dumps(lineage_of, indent=2))
    elif lineage_of["kind"] == "image":
        _show_image(lineage_of)
    else:
        _show(lineage_of)
    return 0


def _show(lineage_of: dict[str, Any]) -> None:
    for key, value in lineage_of.items():
        if key == "kind" or value in ("", None, [], {}):
            continue
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        text = json.dumps(shown) if isinstance(shown, dict | bool) else str(shown)
        print(f"{key.replace('_', ' '):<13} {text}")


def _show_image(lineage_of: dict[str, Any]) -> None:
    for item in lineage_of["seen"]:
        print(f"{item['shards']}  of {item['source']}")
        for row in item["images"]:
            in_split = f"in {row['split']}" if row["seen"] else f"listed in {row['split']}, but not usable"
            mark = ", to be forgotten" if row["forgotten"] else ""
            print(f"  {row['key']} ({row['file_name']}) {in_split}{mark}")
            print(f"    image {row['image']}, annotations {row['annotations']}")
        print(f"  runs    {', '.join(item['runs']) or 'none known'}")
        print(f"  models  {', '.join(item['models']) or 'none'}")
