"""Output of `kubedet data`."""

import os
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kubedet.display import format_bytes, format_columns, format_table, print_json, print_list, print_safe
from kubedet.results import Preview
from trainer.base.safe_text import to_one_line

if TYPE_CHECKING:
    from operations.retention import Pruning
    from trainer.data.inspection import Report
    from trainer.data.merging import MergeResult
    from trainer.data.verification import VerificationResult

_MAX_CLASSES = 20
_MAX_REASONS = 2  # Maximum number of reasons to print per artifact; JSON contains all of them.


def show_report(report: "Report", arguments: Mapping[str, Any], *, json: bool = False) -> None:
    """Print the counts and problems of data."""
    from trainer.config.parsing import format_override
    from trainer.data.inspection import check

    if json:
        print_json(report)
        check(report)
        return
    fingerprint = f" (fingerprint {report.fingerprint})" if report.fingerprint else ""
    print_safe(f"{report.kind} {report.uri}{fingerprint}")
    if report.read_as:
        print_safe(f"read as {report.read_as}")
    print(f"\n{_format_splits(report)}\n\n{_format_classes(report)}\n")
    first = next(iter(report.statistics))
    pairs = zip(report.classes, report.statistics[first].boxes_of_class, strict=True)
    print_list(f"classes without a box in {first}", [to_one_line(name) for name, boxes in pairs if not boxes])
    print(f"images that were read: {report.sampled.images:,}\n")
    for warning in report.warnings:
        print_safe(f"warning: {warning}")
    _show_problems(report)
    check(report)
    if report.read_as:
        words = ["kubedet", "run", "--source", report.uri, "--recipe", "small"]
        words += [
            word for item in arguments["overrides"].items() for word in ("--set", format_override(*item))
        ]
        print_safe(f"\nto train on it: {shlex.join(words)}")


def _format_splits(report: "Report") -> str:
    is_stored = report.kind == "shards"
    heads = ["split", "images", "boxes", "without boxes", "crowds"]
    rows = []
    for split, counts in report.splits.items():
        statistics = report.statistics[split]
        row = [split, counts.images, counts.boxes, statistics.images_without_boxes, statistics.crowds]
        rows.append([*row, counts.shards, format_bytes(counts.bytes)] if is_stored else row)
    return format_table([*heads, "shards", "size"] if is_stored else heads, rows)


def _format_classes(report: "Report") -> str:
    boxes_of_class = next(iter(report.statistics.values())).boxes_of_class
    order = sorted(range(len(report.classes)), key=lambda label: -boxes_of_class[label])
    rows = []
    for label in order[:_MAX_CLASSES]:
        boxes = [counts.boxes_of_class[label] for counts in report.statistics.values()]
        images = [counts.images_of_class[label] for counts in report.statistics.values()]
        rows.append([report.classes[label], *boxes, *images])
    heads = [f"{item} in {split}" for item in ("boxes", "images") for split in report.statistics]
    more = len(order) - len(rows)
    hint = f"\n... and {more} more classes: --json shows all" if more else ""
    return format_table(["class", *heads], rows) + hint


def _show_problems(report: "Report") -> None:
    from trainer.data.problem_counts import BAD_BOXES, BAD_IMAGES, EXAMPLES

    if report.problems:
        print("problems")
    elif not report.warnings and not report.errors:
        print("no problems")
    for reason, count in report.problems.items():
        print_safe(f"  {count:,} {reason}")
        limit = EXAMPLES if reason in (*BAD_IMAGES, *BAD_BOXES) else 3
        for example in report.examples.get(reason, [])[:limit]:
            print_safe(f"      {example}")


def show_verification(result: "VerificationResult", *, json: bool = False) -> None:
    """Print the result of a verification."""
    from trainer.data.verification import check

    if json:
        print_json(result)
    check(result)
    if not json:
        files = f"{result.files:,} shard{'s' * (result.files != 1)}, " if result.kind == "shards" else ""
        counts = f"{files}{result.images:,} images, {format_bytes(result.bytes)}"
        print(f"ok: {counts}; all hashes match, and all images can be decoded")


def show_preview(preview: Preview) -> None:
    """Print what is on a contact sheet."""
    print_safe(f"{preview.images} images of {preview.split} with {preview.boxes} boxes in {preview.file}")
    print_list("cannot be read", preview.unreadable)


def show_pruning(pruning: "Pruning", arguments: Mapping[str, Any], *, json: bool = False) -> None:
    """Print what was or would be deleted, and why the rest is kept."""
    artifacts = sorted(pruning.artifacts.values(), key=lambda item: (bool(item.reasons), item.name))
    if json:
        kept = [{"name": item.name, "bytes": item.size, "kept": item.reasons} for item in artifacts]
        print_json({"done": arguments["yes"], "artifacts": kept})
        return
    rows, done = [], "deleted" if arguments["yes"] else "would be deleted"
    for item in artifacts:
        reasons = "; ".join(item.reasons[:_MAX_REASONS]) or done
        if more := len(item.reasons[_MAX_REASONS:]):
            reasons += f"; and {more} more"
        rows.append((item.name, f"{item.size / 1e6:,.1f} MB", reasons))
    print_safe(format_columns(rows, right={1}))
    print(f"{'deleted' if arguments['yes'] else 'would delete'} {pruning.summary}")
    if not arguments["yes"]:
        print("nothing was deleted; repeat the command with --yes to delete it")


def show_merge_result(merged: "MergeResult") -> None:
    """Print the counts of a merged set."""
    for split, count in merged.images.items():
        boxes, corrected = merged.boxes[split], merged.corrected[split]
        print(f"{split}: {count:,} images, {boxes:,} boxes, {corrected} corrected")
    print(f"{merged.added:,} images of the corrections added to train")
    print_list("new classes", merged.new_classes)
    print_list("images with conflicting corrections (the last one is used)", merged.contested)
    print_list("images renamed because their name is already used", merged.renamed)
    print_list("unreadable images of the set, omitted", merged.left_out)
    if merged.boxes_left_out:
        print(f"{merged.boxes_left_out} invalid boxes of the set, omitted")
    if merged.boxes_kept:
        kept = "original boxes of corrected images kept: crowds, or classes that the corrections lack"
        print(f"{merged.boxes_kept:,} {kept}")
    place = shlex.quote(f"coco:{os.path.relpath(merged.folder)}")
    print_safe(f"\nto train on it: kubedet run --source {place} --recipe small")
