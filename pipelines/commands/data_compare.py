"""`kubedet data compare`: how far two sets of data are apart."""

import argparse
from typing import Any

from pipelines.commands import Commands
from pipelines.commands.options import add_overrides
from trainer.base.errors import ConfigError


def add(verbs: Commands) -> None:
    """Declare the verb."""
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
    from trainer import storage
    from trainer.config.parsing import parse_overrides
    from trainer.evaluation import data_comparison, gate
    from trainer.model import recipes

    if options.images < 0 or options.samples < 1:
        raise ConfigError("--images must be 0 or more, --samples 1 or more", fix="leave them out")
    rules = gate.split_rules(options.gate)
    gate.check(rules, [])
    drift = data_comparison.compare_data(
        options.one, options.other, split=options.split, pictures=options.images, samples=options.samples,
        seed=options.seed, model_uri=options.model,
        data=recipes.load("small", parse_overrides(options.overrides)).data,
    )  # fmt: skip
    print("\n".join(_lines(drift)))
    if options.output:
        data_comparison.write(drift, options.output)
        print(f"page: {storage.join(options.output, data_comparison.PAGE)}")
    if not rules:
        return 0
    verdict = gate.decide(gate.Evidence(drift.metrics), rules)
    print(f"gate: {'passed' if verdict.passed else 'failed'}")
    print("".join(f"  {line}\n" for line in verdict.reason.splitlines()), end="")
    return int(not verdict.passed)


def _lines(drift: Any) -> list[str]:
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
