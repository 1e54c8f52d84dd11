"""`kubedet evaluate`: score any model on any shards, or a file of detections against one of ground truth."""

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from typing import Any

from pipelines import checks
from pipelines.commands import Commands
from pipelines.commands.options import add_overrides
from trainer.base.errors import ConfigError, Interrupted
from trainer.config.parsing import parse_overrides

_CONFIG = "config.json"
_OPTIONS = ("shards", "truth", "predictions", "split", "nproc")
_GRACE_SECONDS = 10.0
"""How long processes that are stopped may take to end; there is nothing for them to save."""


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "evaluate",
        description="Score a checkpoint or an exported model on shards, or with --truth and --predictions "
        "detections of whatever model that stand in a file; compare it with a baseline, hold it "
        "against the gate, and write report.html, metrics.json and the predictions. Exit code: 0; 1 where "
        "the rules of --gate do not hold; 2 for a mistake in what was asked or given.",
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default="",
        help="URI of best.pt, or of an exported folder or a file in it",
    )  # fmt: skip
    parser.add_argument("--shards", default="", metavar="URI", help="folder that the shard step wrote")
    parser.add_argument(
        "--truth", default="", metavar="FILE", help="in place of a model: ground truth in COCO's JSON form"
    )
    parser.add_argument(
        "--predictions", default="", metavar="FILE",
        help="with --truth: detections in COCO's results form, or predictions.parquet",
    )  # fmt: skip
    parser.add_argument(
        "--images", default="", metavar="DIR", help="with --truth: the images, to show the worst of them"
    )
    parser.add_argument(
        "--clip", action="store_true",
        help="with --truth: clip boxes that leave their image, instead of refusing the file",
    )  # fmt: skip
    parser.add_argument("-o", "--output", required=True, metavar="URI", help="folder for the evaluation")
    parser.add_argument(
        "--split", choices=("train", "val", "test"), default="",
        help="what to score (default: test, or val where there is no test)",
    )  # fmt: skip
    parser.add_argument(
        "--baseline", default="", metavar="URI",
        help="what to compare with: a run, an evaluation or a model; with --truth an evaluation or another "
        "file of detections; none compares with nothing (default: the model of that name that passed last)",
    )  # fmt: skip
    parser.add_argument(
        "--gate", default="", metavar="RULES",
        help="rules parted by commas, e.g. 'coco/AP >= 0.3, AP[person] >= 0.2, coco/AP >= baseline - 0.01'",
    )  # fmt: skip
    parser.add_argument(
        "--nproc", type=int, metavar="N",
        help="processes that share the images (default: one for each GPU; without GPUs one, which uses all "
        "cores)",
    )  # fmt: skip
    add_overrides(parser)
    parser.set_defaults(command=_evaluate)


def _evaluate(options: argparse.Namespace) -> int:
    from operations import drift
    from trainer import storage
    from trainer.base import log
    from trainer.config import parsing
    from trainer.evaluation.baseline import SUMMARY
    from trainer.evaluation.evaluate import evaluate
    from trainer.evaluation.gate import check, split_rules
    from trainer.export import loading

    rules = split_rules(options.gate)
    if options.truth or options.predictions or options.images or options.clip:
        return _evaluate_files(options, rules)
    _check_given(options, ("model", "shards"), ())
    checks.make_all([partial(_check_processes, options.nproc), partial(check, rules)])
    trained = parsing.from_json(json.dumps(loading.trained_with(options.model)), where=options.model)
    config = parsing.with_overrides(trained, _overrides(options, rules), where="--set")
    if _processes(options) == 1:
        log.setup()
        summary = evaluate(options.model, options.shards, options.output, config, drift=drift.for_gate)
    else:
        uri = storage.join(options.output, _CONFIG)
        parsing.write(uri, config)
        if code := _share(options, uri):
            return code
        summary = storage.read_json(storage.join(options.output, SUMMARY))
    _show(summary, options.output)
    return int(bool(rules) and not summary["verdict"]["passed"])


def _evaluate_files(options: argparse.Namespace, rules: list[str]) -> int:
    from trainer.base import log
    from trainer.config import parsing
    from trainer.config.schema import Config
    from trainer.evaluation import scored_files

    _check_given(options, ("truth", "predictions"), ("model", "shards", "split", "nproc"))
    config = parsing.with_overrides(Config(), _overrides(options, rules), where="--set").evaluation
    log.setup()
    summary = scored_files.evaluate(
        options.truth,
        options.predictions,
        options.output,
        config,
        rules=rules,
        images_uri=options.images,
        clip=options.clip,
    )
    _show(summary, options.output)
    return int(bool(rules) and not summary["verdict"]["passed"])


def _check_given(options: argparse.Namespace, needed: tuple[str, ...], others: tuple[str, ...]) -> None:
    """Refuse what is neither a model on shards nor a file of detections and its ground truth."""
    names = {"model": "MODEL", **{name: f"--{name}" for name in _OPTIONS}}
    missing = [names[name] for name in needed if not getattr(options, name)]
    strange = [names[name] for name in others if getattr(options, name)]
    if missing or strange:
        what = "must be given" if missing else "cannot be given with --truth"
        raise ConfigError(
            f"{', '.join(missing or strange)} {what}",
            fix="score a model: kubedet evaluate MODEL --shards URI -o DIR; or a file of detections: "
            "kubedet evaluate --truth GT.json --predictions DT.json -o DIR",
        )


def _overrides(options: argparse.Namespace, rules: list[str]) -> dict[str, object]:
    values = {"split": options.split, "baseline": options.baseline, "gate": rules}
    return {f"evaluation.{key}": value for key, value in values.items() if value} | parse_overrides(
        options.overrides
    )


def _check_processes(count: int | None) -> None:
    if count is not None and count < 1:
        raise ConfigError(f"--nproc must be 1 or more, not {count}", fix="leave it out, or use --nproc 1")


def _processes(options: argparse.Namespace) -> int:
    import torch

    return options.nproc or torch.cuda.device_count() or 1


def _share(options: argparse.Namespace, config_uri: str) -> int:
    """Score in several processes; returns the exit code.

    Raises:
        Interrupted: asked to stop by SIGTERM or SIGINT; the processes have ended.
    """
    from components.launchers.guarded_process import GuardedProcess
    from trainer.launching.stop_signals import stop_request

    count = _processes(options)
    command = [sys.executable, "-m", "trainer", "launch", "--nproc", str(count), "--"]
    command += ["evaluate", "--checkpoint", options.model, "--shards", options.shards]
    command += ["--output", options.output, "--config", config_uri]
    with (
        stop_request() as stop,
        GuardedProcess(
            command,
            env=dict(os.environ),
            grace_seconds=_GRACE_SECONDS,
            stdout=subprocess.DEVNULL,
            stderr=None,
        ) as process,
        stop.at_once(lambda: Interrupted("the evaluation was stopped", fix="run it again")),
    ):
        return process.wait()


def _show(summary: dict[str, Any], output: str) -> None:
    from trainer import storage

    print(storage.read_bytes(storage.join(output, "table.txt")).decode())
    if summary["comparison"]:
        print(f"\nagainst {_compared(summary['comparison'])}")
    verdict = summary["verdict"]
    print(f"\ngate: {'passed' if verdict['passed'] else 'failed'}")
    print("".join(f"  {line}\n" for line in verdict["reason"].splitlines()), end="")
    print(f"report: {storage.join(output, 'report.html')}")


def _compared(comparison: dict[str, Any]) -> str:
    from trainer.evaluation.metrics import Change

    if comparison["obstacle"]:
        return f"{comparison['baseline']}: {comparison['obstacle']}"
    change = Change(*comparison["changes"]["coco/AP"])
    return (
        f"{comparison['baseline']}: coco/AP {change.delta:+.4f}, with 95 % confidence from {change.low:+.4f} "
        f"to {change.high:+.4f}: {change.verdict}"
    )
