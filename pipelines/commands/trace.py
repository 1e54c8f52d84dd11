"""`kubedet model trace`: what something was made from, and who saw an image."""

import argparse
import json
from typing import Any

from pipelines.commands import Commands
from pipelines.commands.options import add_prices, add_published, use_prices


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "trace",
        help="tell what a model or run was made from, and who saw an image",
        description="From a model or a run: run, checkpoint, configuration, code, images, shards, raw data, "
        "source, and what the run used and cost. From an image: every set of shards that had it, in which "
        "split, and the runs and versions that were made of it, also where the data are gone. Exit code: 0; "
        "2 where nothing of that name is known.",
    )
    parser.add_argument(
        "what", metavar="MODEL|RUN|IMAGE",
        help="NAME, NAME@VERSION or the folder of a model; name, id or folder of a run; key, file name or "
        "digest (16 hex digits) of an image or its annotations",
    )  # fmt: skip
    add_published(parser)
    add_prices(parser)
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(command=_trace)


def _trace(options: argparse.Namespace) -> int:
    from operations import costs, tracing

    use_prices(options)
    lineage_of = tracing.trace(options.what, options.data_root)
    used = costs.of_run(options.data_root, lineage_of.get("run_id", ""), lineage_of.get("run", ""))
    if options.json:
        print(json.dumps(lineage_of | ({"used": used.fields()} if used else {}), indent=2))
    elif lineage_of["kind"] == "image":
        _show_image(lineage_of)
    else:
        _show(lineage_of)
        if used:
            print(f"\nwhat the run used\n{used.text()}")
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
        models = [f"{name} (freed)" if name in item["freed"] else name for name in item["models"]]
        print(f"  models  {', '.join(models) or 'none'}")
