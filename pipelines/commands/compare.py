"""`kubedet compare`: whether one model is better than another on the same images."""

import argparse
import shutil
from typing import Any

from pipelines.commands import Commands
from pipelines.commands.parser import option
from trainer.base.errors import ConfigError

_SHOWN_CLASSES = 10


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "compare",
        description="Compare two evaluations of the same images with 95 % confidence by a paired bootstrap.",
    )
    parser.add_argument("one", metavar="A", help="a run, an evaluation, or a file of detections")
    parser.add_argument("other", metavar="B", help="likewise")
    option(parser, "--truth FILE", "ground truth in COCO's JSON form (default: that of an evaluation)")
    option(parser, "--clip", "clip boxes that leave their image, instead of refusing a file")
    option(parser, "--samples N", "bootstrap samples", 200)
    option(parser, "-o --output URI", "folder for comparison.json and report.html")
    parser.set_defaults(command=_compare)


def _compare(options: argparse.Namespace) -> int:
    from trainer import storage
    from trainer.evaluation import scored_files

    if options.samples < 1:
        raise ConfigError(f"--samples must be 1 or more, not {options.samples}", fix="leave it out")
    comparison = scored_files.compare(
        options.one, options.other, truth_uri=options.truth, output_uri=options.output,
        samples=options.samples, clip=options.clip,
    )  # fmt: skip
    print("\n".join(_lines(comparison)))
    if options.output:
        print(f"report: {storage.join(options.output, 'report.html')}")
    return 0


def _lines(comparison: dict[str, Any]) -> list[str]:
    from trainer.evaluation import metrics
    from trainer.evaluation.coco import number

    one, other = comparison["names"]
    lines = [f"A  {one}", f"B  {other}", f"{comparison['images']:,} images", ""]
    lines.append(f"{'':<12}{'A':>8}{'B':>8}{'change':>9}   with 95 % confidence")
    changes = {name: metrics.Change(*values) for name, values in comparison["changes"].items()}
    for name, (before, after) in comparison["metrics"].items():
        line = f"{name:<12}{number(before):>8}{number(after):>8}"
        if name in changes:
            line += _interval(changes[name])
        elif min(before, after) >= 0:
            line += f"{after - before:>+9.3f}"
        lines.append(line)
    of_classes = {name: change for name, change in changes.items() if name.startswith("AP[")}
    lines += ["", f"{len(of_classes)} classes: {metrics.count_verdicts(of_classes)}"]
    clear = (metrics.BETTER, metrics.WORSE)
    sure = [(name[3:-1], change) for name, change in of_classes.items() if change.verdict in clear]
    sure.sort(key=lambda item: -abs(item[1].delta))
    width = min(max((len(name) for name, _ in sure), default=0), shutil.get_terminal_size().columns - 60)
    for name, change in sure[:_SHOWN_CLASSES]:
        values = f"{number(change.base):>8}{number(change.new):>8}"
        lines.append(f"  {name:<{max(width, 10)}}{values}{_interval(change)}")
    verdicts = {
        metrics.BETTER: "B is better", metrics.WORSE: "B is worse",
        metrics.NOT_SURE: "neither is clearly better",
    }  # fmt: skip
    few = f"fewer than {metrics.LEAST_IMAGES} images have boxes: {metrics.TOO_FEW}"
    return [*lines, "", f"{verdicts.get(comparison['verdict'], few)}, by coco/AP"]


def _interval(change: Any) -> str:
    return f"{change.delta:>+9.3f}   {change.low:+.3f} to {change.high:+.3f}: {change.verdict}"
