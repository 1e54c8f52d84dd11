"""`kubedet data`: inspect, verify and compare data, merge corrections, free space."""

import argparse
import json
import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.commands import Commands, columns, option, verb
from pipelines.commands.options import add_overrides, add_published
from trainer.base.errors import ConfigError
from trainer.base.safe_text import one_line

if TYPE_CHECKING:
    from trainer.config.schema import Config
    from trainer.data.statistics import SplitStatistics

_STORED_HELP = "a folder DATA_ROOT/shards/FINGERPRINT or DATA_ROOT/raw/FINGERPRINT, also on s3://"
_SHOWN_CLASSES = 20
_RECIPE = "small"  # Its settings say how a source is read, unless --set does.
_MAX_SHOWN = 10
_REASONS = 2  # Reasons to keep an artifact that the table of a pruning shows; JSON has all.


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "data", description="Inspect, verify, preview and compare data; merge corrections; free space."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    inspect = verb(
        verbs,
        "inspect",
        _inspect,
        "count images, boxes, classes and problems",
        "Count images, boxes, classes and problems of shards, raw images or a source. The format of a path "
        "without a scheme is detected, and the --source to use is printed.",
    )
    inspect.add_argument(
        "uri", metavar="URI", help=f"{_STORED_HELP}, or a source: PATH, sample, coco:PATH, voc:PATH, ..."
    )
    add_overrides(inspect)
    option(
        inspect,
        "--images N",
        "number of images per split to check for damage, depth, rotation and near "
        "duplicates (default: 2000 on this machine, 100 in an object store, 0 on the web)",
        None,
        type=int,
        least=0,
    )
    option(inspect, "--pairs FILE", "write pictures of near duplicates across splits to a PNG file")
    option(inspect, "--all", f"show all classes, not only the first {_SHOWN_CLASSES}")
    option(inspect, "-o --output text|json", "default: text", "text")
    verify = verb(
        verbs,
        "verify",
        _verify,
        "compare all hashes and decode every image",
        "Read all shards or raw images, compare sizes and hashes with the recorded ones, and decode every "
        "image. Exit code 2 if anything is damaged or missing.",
    )
    verify.add_argument("uri", metavar="URI", help=_STORED_HELP)
    text = "rebuild missing or damaged files: shards from raw images, raw images from their source"
    option(verify, "--repair", text)
    option(verify, "--threads N", "default: one for each core", 0, least=0)
    option(verify, "-o --output text|json", "default: text", "text")
    preview = verb(
        verbs,
        "preview",
        _preview,
        "draw a contact sheet of images with their boxes",
        "Draw random images of a split with their boxes on one PNG; with --recipe the first images of a "
        "training's epoch, as the training sees them.",
    )
    preview.add_argument("uri", metavar="URI", help=f"{_STORED_HELP}, or a source")
    option(preview, "-n N", "images", 16, least=1, dest="count")
    option(preview, "--split NAME", "train, val or test (default: the first)")
    option(preview, "--seed N", "seed of the random selection", 0)
    option(preview, "--recipe NAME", "show the inputs of a training with this recipe (only for shards)")
    add_overrides(preview)
    option(preview, "--epoch N", "with --recipe: epoch, from 0 (default: 0)", 0, least=0)
    option(preview, "-o --output FILE", "the PNG", "preview.png")
    _add_changing(verbs)


def _add_changing(verbs: Commands) -> None:
    merge = verb(
        verbs,
        "merge",
        _merge,
        "merge a set with corrections of it",
        "Write a new COCO set of a set and of corrections of it, as a labelling tool exports them. Classes "
        "are matched by name. An image in both (with the same bytes) gets the boxes of the correction and "
        "stays in its split; new images are added to train.",
    )
    merge.add_argument("set", metavar="SET", help="the data set, in the format of --source of `kubedet run`")
    text = "more sets, e.g. corrections.zip; if several have an image, the last one wins"
    merge.add_argument("corrections", nargs="+", metavar="CORRECTIONS", help=text)
    text = "folder of the new set; its last part names the models"
    option(merge, "-o --output DIR", text, required=True)
    text = "accept corrected images with boxes of different classes in the same place"
    option(merge, "--keep-overlaps", text)
    prune = verb(
        verbs,
        "prune",
        _prune,
        "delete old runs, versions and data that nothing needs",
        "Delete runs with their checkpoints, versions of models, shards, raw tables and images of a data "
        "root. The newest and the unfinished runs are kept, current, signed and registered versions, targets "
        "of `model rollback`, what these need, and young files.",
    )
    action = prune.add_mutually_exclusive_group(required=True)
    option(action, "--dry-run", "show what would be deleted and why the rest is kept")
    option(action, "--yes", "delete it")
    text = "how many of the newest runs, and of previous versions, are kept"
    option(prune, "--keep N", text, 0, required=True)
    option(prune, "--older-than DAYS", "delete only what is older (default: 7)", 7.0, least=0)
    option(prune, "-o --output OUTPUT", "print JSON", choices=["json"], metavar=None)
    add_published(prune, "where data is kept")


def _config(texts: list[str], recipe: str = _RECIPE, **further: Any) -> "Config":
    from trainer.config.parsing import parse_overrides
    from trainer.model import recipes

    return recipes.load(recipe, parse_overrides(texts) | further)


def _inspect(options: argparse.Namespace) -> int:
    from trainer.data.inspection import check, inspect
    from trainer.data.problem_counts import BAD_BOXES, BAD_IMAGES, EXAMPLES

    config = _config(options.overrides).data
    report = inspect(options.uri, config, options.images, options.pairs)
    if options.output == "json":
        print(json.dumps(asdict(report), indent=2))
        check(report, config)
        return 0
    fingerprint = f" (fingerprint {report.fingerprint})" if report.fingerprint else ""
    print(f"{report.kind} {report.uri}{fingerprint}")
    if report.read_as:
        print(f"read as {report.read_as}")
    stored = report.kind == "shards"
    rows = []
    for split, counts in report.splits.items():
        statistics = report.statistics[split]
        row = [split, counts.images, counts.boxes, statistics.images_without_boxes, statistics.crowds]
        row += [_median(statistics, "box_side"), _median(statistics, "image_side")]
        rows.append([*row, counts.shards, _size(counts.bytes)] if stored else row)
    heads = ["split", "images", "boxes", "without boxes", "crowds", "median box, px", "median image, px"]
    print(f"\n{_table([*heads, 'shards', 'size'] if stored else heads, rows)}\n")
    first = next(iter(report.statistics))
    boxes_of_class = report.statistics[first].boxes_of_class
    order = sorted(range(len(report.classes)), key=lambda label: -boxes_of_class[label])
    rows = []
    for label in order[: None if options.all else _SHOWN_CLASSES]:
        boxes = [counts.boxes_of_class[label] for counts in report.statistics.values()]
        images = [counts.images_of_class[label] for counts in report.statistics.values()]
        rows.append([report.classes[label], *boxes, *images])
    heads = [f"{item} in {split}" for item in ("boxes", "images") for split in report.statistics]
    print(f"{_table(['class', *heads], rows)}\n")
    if len(rows) < len(order):
        print(f"... and {len(order) - len(rows)} more classes: --all shows them\n")
    pairs = zip(report.classes, boxes_of_class, strict=True)
    empty = [one_line(name) for name, boxes in pairs if not boxes]
    _list(f"classes without a box in {first}", empty)
    print(f"images that were read: {report.looked_at.images:,}\n")
    for warning in report.warnings:
        print(f"warning: {warning}")
    if report.problems:
        print("problems")
    elif not report.warnings and not report.errors:
        print("no problems")
    for reason, count in report.problems.items():
        print(f"  {count:,} {reason}")
        shown = EXAMPLES if reason in (*BAD_IMAGES, *BAD_BOXES) else 3
        for example in report.examples.get(reason, [])[:shown]:
            print(f"      {example}")
    check(report, config)
    if report.read_as:
        words = ["kubedet", "run", "--source", report.uri, "--recipe", _RECIPE]
        words += [word for text in options.overrides for word in ("--set", text)]
        print(f"\nto train on it: {shlex.join(words)}")
    return 0


def _median(statistics: "SplitStatistics", name: str) -> str:
    """Return the bin of the median in a histogram as text."""
    from trainer.data.statistics import BINS

    counts, edges = statistics.histogram(name), BINS[name]
    counted, half = 0, sum(counts) / 2
    for index, count in enumerate(counts):
        counted += count
        if counted >= half > 0:
            return f"{edges[index]:g} to {edges[index + 1]:g}"
    return "-"


def _table(heads: list[str], rows: list[list[Any]]) -> str:
    cells = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    return columns([heads, *cells], right={*range(1, len(heads))})


def _size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _verify(options: argparse.Namespace) -> int:
    from trainer.data.verification import check, repair, verify

    result = (repair if options.repair else verify)(options.uri, options.threads)
    if options.output == "json":
        print(json.dumps(asdict(result), indent=2))
    check(result)
    if options.output == "text":
        files = f"{result.files:,} shard{'s' * (result.files != 1)}, " if result.kind == "shards" else ""
        counts = f"{files}{result.images:,} images, {_size(result.bytes)}"
        print(f"all is well: {counts}; every hash agrees, and every image can be decoded")
    return 0


def _preview(options: argparse.Namespace) -> int:
    from trainer import storage
    from trainer.data import preview
    from trainer.storage import outputs

    if Path(options.output).suffix.lower() != ".png":
        raise ConfigError(f"--output {options.output} must be a PNG file", fix="use -o preview.png")
    if options.recipe:
        if options.split not in ("", "train"):
            problem = f"--recipe shows only training samples, not --split {options.split}"
            raise ConfigError(problem, fix="omit --split")
        seed = {"train.seed": options.seed} if options.seed else {}
        config = _config(options.overrides, options.recipe, **seed)
        sheet, pictures, split = preview.training_sheet(options.uri, config, options.count, options.epoch)
    elif options.epoch or any(not text.startswith("data.") for text in options.overrides):
        raise ConfigError(
            "--epoch, and --set of keys other than data...., need a recipe",
            fix="add --recipe NAME, e.g. --recipe small",
        )
    else:
        given = options.uri, options.count, options.split, options.seed
        sheet, pictures, split = preview.contact_sheet(*given, _config(options.overrides).data)
    outputs.claim_file(options.output)
    with storage.new_file(options.output, sync=False) as path:
        sheet.save(path, "PNG")
    bad = [f"{picture.file_name}: {picture.fault}" for picture in pictures if picture.fault]
    boxes = sum(len(picture.boxes) for picture in pictures)
    print(f"{len(pictures) - len(bad)} images of {split} with {boxes} boxes in {options.output}")
    _list("cannot be read", bad)
    return 0


def _merge(options: argparse.Namespace) -> int:
    from trainer.data.merging import merge

    merged = merge(options.set, options.corrections, options.output, keep_overlaps=options.keep_overlaps)
    for split, count in merged.images.items():
        boxes, corrected = merged.boxes[split], merged.corrected[split]
        print(f"{split}: {count:,} images, {boxes:,} boxes, {corrected} corrected")
    print(f"{merged.added:,} images of the corrections added to train")
    _list("new classes", merged.new_classes)
    _list("images with different boxes in several corrections; the last is used", merged.contested)
    _list("images renamed because another one has their name", merged.renamed)
    _list("images of the set that cannot be read, left out", merged.left_out)
    if merged.boxes_left_out:
        print(f"{merged.boxes_left_out} boxes of the set that cannot be used, left out")
    if merged.boxes_kept:
        kept = "boxes of corrected images kept: crowds, or of classes that the corrections do not have"
        print(f"{merged.boxes_kept:,} {kept}")
    place = shlex.quote(f"coco:{os.path.relpath(merged.folder)}")
    print(f"\nto train on it: kubedet run --source {place} --recipe small")
    return 0


def _list(title: str, items: list[str]) -> None:
    if items:
        more = f"\n  and {len(items) - _MAX_SHOWN} more" if len(items) > _MAX_SHOWN else ""
        print(f"{title} ({len(items)}):\n" + "\n".join(f"  {item}" for item in items[:_MAX_SHOWN]) + more)


def _prune(options: argparse.Namespace) -> int:
    from operations import retention
    from trainer import storage

    judge = retention.prune if options.yes else retention.Pruning
    pruning = judge(storage.absolute(options.data_root), options.keep, options.older_than)
    if options.output:
        artifacts = [
            {"name": artifact.name, "bytes": artifact.size, "kept": artifact.reasons}
            for artifact in pruning.artifacts.values()
        ]
        head = {"kind": "prune", "version": 1, "done": options.yes}
        print(json.dumps(head | {"artifacts": artifacts}, indent=2))
        return 0
    rows = []
    for artifact in sorted(pruning.artifacts.values(), key=lambda item: (bool(item.reasons), item.name)):
        reasons = "; ".join(artifact.reasons[:_REASONS]) or ("deleted" if options.yes else "would be deleted")
        if more := len(artifact.reasons[_REASONS:]):
            reasons += f"; and {more} more"
        rows.append((artifact.name, f"{artifact.size / 1e6:,.1f} MB", reasons))
    print(columns(rows, right={1}))
    print(f"{'deleted' if options.yes else 'would delete'} {pruning.summary}")
    if options.dry_run:
        print("nothing was deleted; --yes deletes it")
    return 0
