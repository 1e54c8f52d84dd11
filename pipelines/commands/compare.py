"""`kubedet compare`: whether one model is better than another on the same images."""

import argparse
import shutil
from typing import Any

from pipelines.commands import Commands
from trainer.errors import ConfigError

_SHOWN_CLASSES = 10


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "compare",
        help="compare two evaluations of the same images, with confidence",
        description="Compare two evaluations of the same images: what B changes against A, with 95 % "
        "confidence by a paired bootstrap over the images. A and B are folders of evaluations or runs, or "
        "files of detections. Exit code: 0, whichever is better; 2 for a mistake in what was asked or given.",
    )
    parser.add_argument("one", metavar="A", help="a run, an evaluation, or a file of detections")
    parser.add_argument("other", metavar="B", help="likewise")
    parser.add_argument(
        "--truth", default="", metavar="FILE",
        help="ground truth in COCO's JSON form (default: what an evaluation was scored on)",
    )  # fmt: skip
    parser.add_argument(
        "--samples", type=int, default=200, metavar="N", help="bootstrap samples (default: %(default)s)"
    )
    parser.add_argument(
        "-o", "--output", default="", metavar="URI",
        help="folder for comparison.json, and for B's report.html beside A",
    )  # fmt: skip
    parser.set_defaults(command=_compare)


def _compare(options: argparse.Namespace) -> int:
    from trainer import scored_files, storage

    if options.samples < 1:
        raise ConfigError(f"--samples must be 1 or more, not {options.samples}", fix="leave it out")
    comparison = scored_files.compare(
        options.one, options.other, truth_uri=options.truth, output_uri=options.output,
        samples=options.samples,
    )  # fmt: skip
    print("\n".join(_lines(comparison)))
    if options.output:
        print(f"report: {storage.join(options.output, 'report.html')}")
    return 0


def _lines(comparison: dict[str, Any]) -> list[str]:
    """What the terminal shows."""
    from trainer.evaluation.coco_metrics import number
    from trainer.evaluation.metric_change import Change

    one, other = comparison["names"]
    lines = [f"A  {one}", f"B  {other}", f"{comparison['images']:,} images", ""]
    lines.append(f"{'':<12}{'A':>8}{'B':>8}{'change':>9}   with 95 % confidence")
    for name, (before, after) in comparison["metrics"].items():
        line = f"{name:<12}{number(before):>8}{number(after):>8}"
        if name in comparison["changes"]:
            line += _interval(Change(*comparison["changes"][name]))
        elif min(before, after) >= 0:
            line += f"{after - before:>+9.3f}"
        lines.append(line)
    changes = {key[3:-1]: Change(*v) for key, v in comparison["changes"].items() if key.startswith("AP[")}
    sure = sorted((item for item in changes.items() if item[1].sure), key=lambda item: -abs(item[1].delta))
    better = sum(change.sure > 0 for _, change in sure)
    lines += ["", f"{len(changes)} classes: {better} surely better, {len(sure) - better} surely worse"]
    width = min(max((len(name) for name, _ in sure), default=0), shutil.get_terminal_size().columns - 60)
    for name, change in sure[:_SHOWN_CLASSES]:
        lines.append(
            f"  {name:<{max(width, 10)}}{number(change.base):>8}{number(change.new):>8}{_interval(change)}"
        )
    verdict = {"better": "B is better", "worse": "B is worse", "not sure": "neither is surely better"}
    return [*lines, "", f"{verdict[comparison['verdict']]}, by coco/AP"]


def _interval(change: Any) -> str:
    word = {1: "better", -1: "worse", 0: "not sure"}[change.sure]
    return f"{change.delta:>+9.3f}   {change.low:+.3f} to {change.high:+.3f}: {word}"
