"""`kubedet data`: look at data, check it, see it, compare it, and merge corrections."""

import argparse
import json
import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.commands import Commands, data_forget, prune
from pipelines.commands.options import add_overrides
from pipelines.tables import columns
from trainer.base.errors import ConfigError
from trainer.base.visible_text import one_line

if TYPE_CHECKING:
    from PIL.Image import Image

    from trainer.config.schema import DataConfig
    from trainer.data.data_views import Picture
    from trainer.data.inspection import Report
    from trainer.data.merging import Merged
    from trainer.data.statistics import SplitStatistics

_WHAT = "a folder DATA_ROOT/shards/FINGERPRINT or DATA_ROOT/raw/FINGERPRINT, also on s3://"
_SHOWN_CLASSES = 20
_RECIPE = "small"
"""Says how a source is read where --set does not."""
_SHOWN = 10


def add(commands: Commands) -> None:
    """Declare the command and what it can do."""
    parser = commands.add_parser(
        "data",
        description="Look at shards, raw images or a source: what they hold, whether they are whole, and "
        "what they look like; and put a set and corrections of it together.",
    )  # fmt: skip
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    inspect = verbs.add_parser(
        "inspect", help="count images, boxes, classes and problems",
        description="Count images, boxes, classes and problems of shards, raw images or a source, and show "
        "how large they are. The format of a path without a scheme is detected; the --source to use is "
        "printed. Up to 2000 local images per split are read too. Exit code: 0; 2 if the data cannot "
        "be used.",
    )  # fmt: skip
    inspect.add_argument(
        "uri",
        metavar="URI",
        help=f"{_WHAT}, or a source: PATH, sample, coco:PATH, voc:PATH, ...",
    )
    add_overrides(inspect)
    inspect.add_argument(
        "--images", type=int, metavar="N",
        help="images of each split to read, for damage, depth, rotation and near duplicates (default: 2000 "
        "on this machine, 100 in an object store, 0 on the web)",
    )  # fmt: skip
    inspect.add_argument(
        "--pairs", default="", metavar="FILE", help="write near duplicates across splits as pictures to a PNG"
    )
    inspect.add_argument("--all", action="store_true", help=f"all classes, not the first {_SHOWN_CLASSES}")
    inspect.add_argument("-o", "--output", choices=["text", "json"], default="text", help="default: text")
    inspect.set_defaults(command=_inspect)
    verify = verbs.add_parser(
        "verify", help="compare all hashes and decode every image",
        description="Read all of the shards or raw images: compare sizes and hashes with those that were "
        "written down, and decode every image. Exit code: 0 if all is well; 2 if anything is damaged or "
        "missing, each thing named.",
    )  # fmt: skip
    verify.add_argument("uri", metavar="URI", help=_WHAT)
    verify.add_argument(
        "--repair",
        action="store_true",
        help="make anew what is missing or damaged: shards from the raw images, these from their source",
    )
    verify.add_argument("--threads", type=int, default=0, metavar="N", help="default: one for each core")
    verify.add_argument("-o", "--output", choices=["text", "json"], default="text", help="default: text")
    verify.set_defaults(command=_verify)
    preview = verbs.add_parser(
        "preview", help="draw a contact sheet of images with their boxes",
        description="Draw images of a split, chosen at random, with their boxes on one PNG; with --recipe "
        "the first images of a training's epoch, as it sees them.",
    )  # fmt: skip
    preview.add_argument("uri", metavar="URI", help=f"{_WHAT}, or a source")
    preview.add_argument("-n", type=int, default=16, metavar="N", dest="count", help="images (default: 16)")
    preview.add_argument(
        "--split", default="", metavar="NAME", help="train, val or test (default: the first)"
    )
    preview.add_argument("--seed", type=int, default=0, metavar="N", help="another one shows other images")
    preview.add_argument(
        "--recipe",
        default="",
        metavar="NAME",
        help="show what a training with this recipe sees: of shards only",
    )
    add_overrides(preview)
    preview.add_argument(
        "--epoch", type=int, default=0, metavar="N", help="with --recipe: of this epoch, from 0 (default: 0)"
    )
    preview.add_argument("-o", "--output", default="preview.png", metavar="FILE", help="default: %(default)s")
    preview.set_defaults(command=_preview)
    _add_compare(verbs)
    _add_merge(verbs)
    data_forget.add(verbs)
    prune.add(verbs)


def _inspect(options: argparse.Namespace) -> int:
    from trainer.config.parsing import parse_overrides
    from trainer.data.inspection import check, inspect
    from trainer.model import recipes

    config = recipes.load(_RECIPE, parse_overrides(options.overrides)).data
    if options.images is not None and options.images < 0:
        raise ConfigError(f"--images {options.images} is less than zero", fix="use --images 0 to read none")
    report = inspect(options.uri, config, options.images, options.pairs)
    if options.output == "json":
        print(json.dumps(asdict(report), indent=2))
    else:
        _show(report, options.all)
    check(report, config)
    if report.read_as and options.output == "text":
        words = ["kubedet", "run", "--source", report.uri, "--recipe", _RECIPE]
        words += [word for text in options.overrides for word in ("--set", text)]
        print(f"\nto train on it: {shlex.join(words)}")
    return 0


def _show(report: "Report", all_classes: bool) -> None:
    """Print a report."""
    fingerprint = f" (fingerprint {report.fingerprint})" if report.fingerprint else ""
    print(f"{report.kind} {report.uri}{fingerprint}")
    if report.read_as:
        print(f"read as {report.read_as}")
    print()
    _show_splits(report)
    _show_classes(report, None if all_classes else _SHOWN_CLASSES)
    _show_problems(report)


def _show_splits(report: "Report") -> None:
    stored = report.kind == "shards"
    rows = []
    for split, counts in report.splits.items():
        statistics = report.statistics[split]
        row = [split, counts.images, counts.boxes, statistics.images_without_boxes, statistics.crowds]
        row += [_median(statistics, "box_side"), _median(statistics, "image_side")]
        rows.append([*row, counts.shards, _size(counts.bytes)] if stored else row)
    heads = ["split", "images", "boxes", "without boxes", "crowds", "median box, px", "median image, px"]
    print(_table([*heads, "shards", "size"] if stored else heads, rows))
    print()


def _median(statistics: "SplitStatistics", name: str) -> str:
    """Return the bin that holds the median of a histogram, as text."""
    from trainer.data.statistics import BINS

    counts, edges = statistics.histogram(name), BINS[name]
    half = sum(counts) / 2
    if not half:
        return "-"
    counted = 0
    for index, count in enumerate(counts):
        counted += count
        if counted >= half:
            return f"{edges[index]:g} to {edges[index + 1]:g}"
    raise AssertionError("unreachable")


def _show_classes(report: "Report", most: int | None) -> None:
    of_split = report.statistics
    first = next(iter(of_split))
    order = sorted(range(len(report.classes)), key=lambda label: -of_split[first].boxes_of_class[label])
    rows = [
        [report.classes[label], *(counts.boxes_of_class[label] for counts in of_split.values()),
         *(counts.images_of_class[label] for counts in of_split.values())]
        for label in order[:most]
    ]  # fmt: skip
    heads = [f"{what} in {split}" for what in ("boxes", "images") for split in of_split]
    print(_table(["class", *heads], rows))
    print()
    if len(rows) < len(order):
        print(f"... and {len(order) - len(rows)} more classes: --all shows them\n")
    empty = [
        name for name, boxes in zip(report.classes, of_split[first].boxes_of_class, strict=True) if not boxes
    ]
    if empty:
        names = ", ".join(map(one_line, empty[:_SHOWN_CLASSES])) + (
            ", ..." if len(empty) > _SHOWN_CLASSES else ""
        )
        have = "class has" if len(empty) == 1 else "classes have"
        print(f"{len(empty)} {have} no box in {first}: {names}\n")


def _show_problems(report: "Report") -> None:
    if report.looked_at.images:
        print(f"images that were read: {report.looked_at.images:,}\n")
    for warning in report.warnings:
        print(f"warning: {warning}")
    if not report.problems:
        if not report.warnings and not report.errors:
            print("no problems")
        return
    print("problems")
    for reason, count in report.problems.items():
        print(f"  {count:,} {reason}")
        for example in report.examples.get(reason, [])[:3]:
            print(f"      {example}")


def _table(heads: list[str], rows: list[list[Any]]) -> str:
    cells = [[f"{cell:,}" if isinstance(cell, int) else one_line(str(cell)) for cell in row] for row in rows]
    return columns([heads, *cells], right={*range(1, len(heads))})


def _size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _verify(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from trainer.data.verification import check, repair, verify

    if options.threads < 0:
        raise ConfigError(f"--threads {options.threads} is less than zero", fix="use 0 for one for each core")
    result = (repair if options.repair else verify)(options.uri, options.threads)
    if options.output == "json":
        print(json.dumps(asdict(result), indent=2))
    check(result)
    if options.output == "text":
        files = f"{result.files:,} shard{'s' * (result.files != 1)}, " if result.kind == "shards" else ""
        proof = "every hash agrees"
        counts = f"{files}{result.images:,} images, {_size(result.bytes)}"
        print(f"all is well: {counts}; {proof}, and every image can be decoded")
    return 0


def _training_sheet(options: argparse.Namespace) -> "tuple[Image, list[Picture], str]":
    """What a training sees; another --seed is another seed of the training."""
    from trainer.config import parsing
    from trainer.data.preview import training_sheet
    from trainer.model import recipes

    if options.split not in ("", "train") or options.epoch < 0:
        raise ConfigError(
            f"--recipe shows training samples: not --split {options.split}"
            if options.epoch >= 0
            else f"--epoch {options.epoch} is less than zero",
            fix="leave --split out, and count epochs from 0",
        )
    overrides = parsing.parse_overrides(options.overrides)
    if options.seed:
        overrides["train.seed"] = options.seed
    config = recipes.load(options.recipe, overrides)
    return training_sheet(options.uri, config, options.count, options.epoch)


def _reading(options: argparse.Namespace) -> "DataConfig":
    """How a source is read; what else --set may change, and --epoch, are of a training."""
    from trainer.config.parsing import parse_overrides
    from trainer.model import recipes

    overrides = parse_overrides(options.overrides)
    if options.epoch or any(not key.startswith("data.") for key in overrides):
        raise ConfigError(
            "--set of other keys than data.... and --epoch are of a training",
            fix="add --recipe NAME, e.g. --recipe small",
        )
    return recipes.load(_RECIPE, overrides).data


def _preview(options: argparse.Namespace) -> int:
    from trainer import storage
    from trainer.data.preview import contact_sheet

    if options.count < 1:
        raise ConfigError(f"-n {options.count} is less than one", fix="use -n 16")
    if Path(options.output).suffix.lower() != ".png":
        raise ConfigError(f"--output {options.output} is no PNG", fix="use -o preview.png")
    if options.recipe:
        sheet, pictures, split = _training_sheet(options)
    else:
        sheet, pictures, split = contact_sheet(
            options.uri, options.count, options.split, options.seed, _reading(options)
        )
    with storage.new_file(options.output, sync=False) as path:
        sheet.save(path, "PNG")
    bad = [f"  {picture.file_name}: {picture.fault}" for picture in pictures if picture.fault]
    boxes = sum(len(picture.boxes) for picture in pictures)
    print(f"{len(pictures) - len(bad)} images of {split} with {boxes} boxes in {options.output}")
    if bad:
        more = f"\n  and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        print(f"{len(bad)} cannot be read:\n" + "\n".join(bad[:_SHOWN]) + more)
    return 0


def _add_compare(verbs: Commands) -> None:
    parser = verbs.add_parser(
        "compare",
        help="tell how far two sets are apart: classes, sizes, brightness, sharpness, features",
        description="Tell how far two sets are apart: frequencies of classes, boxes in an image, sizes of "
        "boxes and images, brightness, sharpness and, with --model, features of its backbone; each as a "
        "distance from 0 to 1 with a 95 % interval and a p-value. Exit code: 0; 1 where a rule of --gate "
        "does not hold; 2 for a mistake in what was asked or given.",
    )
    parser.add_argument("one", metavar="A", help="shards, raw images or a source, e.g. of the last model")
    parser.add_argument("other", metavar="B", help="likewise, e.g. of today")
    parser.add_argument("--split", default="", metavar="NAME", help="default: train where both have it")
    parser.add_argument(
        "--images", type=int, default=200, metavar="N",
        help="images of each whose pixels are looked at (default: %(default)s; 0: annotations only)",
    )  # fmt: skip
    parser.add_argument("--model", default="", metavar="URI", help="checkpoint whose backbone gives features")
    parser.add_argument(
        "--samples", type=int, default=200, metavar="N",
        help="bootstrap samples and permutations (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn at random")
    parser.add_argument(
        "--gate", default="", metavar="RULES", help="rules parted by commas, e.g. 'drift/classes <= 0.2'"
    )
    add_overrides(parser)
    parser.add_argument(
        "-o", "--output", default="", metavar="URI", help="folder for drift.html and drift.json"
    )
    parser.set_defaults(command=_compare)


def _compare(options: argparse.Namespace) -> int:
    from operations import drift as drifts
    from trainer import storage
    from trainer.config.parsing import parse_overrides
    from trainer.evaluation import gate
    from trainer.model import recipes

    if options.images < 0 or options.samples < 1:
        raise ConfigError("--images must be 0 or more, --samples 1 or more", fix="leave them out")
    rules = gate.split_rules(options.gate)
    gate.check(rules, [])
    drift = drifts.compare_data(
        options.one, options.other, split=options.split, pictures=options.images, samples=options.samples,
        seed=options.seed, model_uri=options.model,
        data=recipes.load("small", parse_overrides(options.overrides)).data,
    )  # fmt: skip
    print("\n".join(_drift_lines(drift)))
    if options.output:
        drifts.write(drift, options.output)
        print(f"page: {storage.join(options.output, drifts.PAGE)}")
    if not rules:
        return 0
    verdict = gate.decide(gate.Evidence(drift.metrics), rules)
    print(f"gate: {'passed' if verdict.passed else 'failed'}")
    print("".join(f"  {line}\n" for line in verdict.reason.splitlines()), end="")
    return int(not verdict.passed)


def _drift_lines(drift: Any) -> list[str]:
    """What the terminal shows."""
    lines = [
        f"{letter}  {part.uri}: {part.images:,} images of {part.split}"
        for letter, part in (("A", drift.one), ("B", drift.other))
    ]
    lines += ["", f"{'':<22}{'distance':>9}   {'95 % interval':<15}{'p':>7}"]
    for name, shift in drift.shifts.items():
        interval = f"{shift.low:.3f} to {shift.high:.3f}"
        word = "moved" if shift.sure else "may be chance"
        lines.append(f"{name:<22}{shift.value:>9.3f}   {interval:<15}{shift.p:>7.3f}  {word}")
    return lines


def _add_merge(verbs: Commands) -> None:
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
