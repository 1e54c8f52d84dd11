"""`kubedet evaluate` scores a model or a file of detections; `kubedet compare` compares two evaluations."""

import argparse
import json
import shutil
import subprocess
import sys
from typing import Any

from pipelines.commands import Commands, option
from pipelines.commands.options import TILE, add_overrides
from trainer.base.errors import ConfigError, Interrupted
from trainer.config.parsing import parse_overrides

_CONFIG = "config.json"
_GRACE_SECONDS = 10.0  # Time for stopped processes to end; they have nothing to save.

_SHOWN_CLASSES = 10


def add(commands: Commands) -> None:
    """Declare `kubedet evaluate`."""
    parser = commands.add_parser(
        "evaluate",
        description="Score a checkpoint or an exported model on shards, or with --truth and --predictions a "
        "file of detections; compare it with a baseline, check the gate, and write report.html, metrics.json "
        "and the predictions. Exit code 1 if the rules of --gate fail.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default="",
        help="URI of best.pt, of an exported model's folder, or of a file in it",
    )
    option(parser, "--shards URI", "folder that the shard step wrote")
    option(parser, "--truth FILE", "instead of a model: ground truth in COCO's JSON format")
    text = "with --truth: detections in COCO's results format, or predictions.parquet"
    option(parser, "--predictions FILE", text)
    option(parser, "--images DIR", "with --truth: the images, to show the worst of them")
    option(
        parser,
        "--clip",
        "with --truth: clip boxes that extend beyond their image, instead of rejecting the file",
    )
    option(parser, "-o --output URI", "folder for the evaluation", required=True)
    option(parser, "--split train|val|test", "split to score (default: test, or val if there is no test)")
    option(parser, "--tile SIDE", TILE, -1)
    option(
        parser,
        "--baseline URI",
        "a run, an evaluation or a model to compare with; with --truth an "
        "evaluation or another file of detections; none: no comparison (default: the last model of that "
        "name that passed)",
    )
    text = "rules separated by commas, e.g. 'coco/AP >= 0.3, AP[person] >= 0.2, coco/AP >= baseline - 0.01'"
    option(parser, "--gate RULES", text)
    option(
        parser,
        "--nproc N",
        "processes that share the images (default: one for each GPU; without GPUs one, which uses all cores)",
        None,
        type=int,
        least=1,
    )
    add_overrides(parser)
    parser.set_defaults(command=_evaluate)


def _evaluate(options: argparse.Namespace) -> int:
    from trainer import storage
    from trainer.base import log
    from trainer.evaluation.gate import split_rules
    from trainer.evaluation.metrics import Change

    rules = split_rules(options.gate)
    log.setup()
    of_files = options.truth or options.predictions or options.images or options.clip
    summary = (_of_files if of_files else score_model)(options, rules)
    if isinstance(summary, int):
        return summary
    print(storage.read_bytes(storage.join(options.output, "table.txt")).decode())
    if comparison := summary["comparison"]:
        found = comparison["obstacle"]
        if not found:
            change = Change(*comparison["changes"]["coco/AP"])
            found = (
                f"coco/AP {change.delta:+.4f}, with 95 % confidence from {change.low:+.4f} to "
                f"{change.high:+.4f}: {change.verdict}"
            )
        print(f"\nagainst {comparison['baseline']}: {found}")
    verdict = summary["verdict"]
    print(f"\ngate: {'passed' if verdict['passed'] else 'failed'}")
    print("".join(f"  {line}\n" for line in verdict["reason"].splitlines()), end="")
    print(f"report: {storage.join(options.output, 'report.html')}")
    return int(bool(rules) and not summary["verdict"]["passed"])


def score_model(options: argparse.Namespace, rules: list[str]) -> dict[str, Any] | int:
    """Return the summary of a model's evaluation, or the exit code of failed processes."""
    from components.launchers.guarded_process import GuardedProcess
    from trainer import storage
    from trainer.config import parsing
    from trainer.data.shard_index import data_root_of
    from trainer.evaluation.gate import check
    from trainer.evaluation.metrics import SUMMARY
    from trainer.evaluators.shards import evaluate, result_files
    from trainer.export import loading
    from trainer.launching.stop_signals import stop_request
    from trainer.storage import outputs

    _check_given(options, ("model", "shards"), ())
    check(rules)
    trained = parsing.from_json(json.dumps(loading.trained_with(options.model)), where=options.model)
    config = parsing.with_overrides(trained, _overrides(options, rules), where="--set")
    files = [*result_files(config.evaluation.predictions), _CONFIG]
    outputs.claim(options.output, files, [options.model, config.evaluation.baseline])
    import torch

    data_root = data_root_of(options.shards)
    count = options.nproc or torch.cuda.device_count() or 1
    if count == 1:
        return evaluate(options.model, options.shards, options.output, config, data_root=data_root)
    uri = storage.join(options.output, _CONFIG)
    parsing.write(uri, config)
    command = [sys.executable, "-m", "trainer", "launch", "--nproc", str(count), "--"]
    command += ["evaluate", "--checkpoint", options.model, "--shards", options.shards]
    command += ["--data-root", data_root, "--output", options.output, "--config", uri]
    with (
        stop_request() as stop,
        GuardedProcess(
            command, grace_seconds=_GRACE_SECONDS, stdout=subprocess.DEVNULL, stderr=None
        ) as process,
        stop.at_once(lambda: Interrupted("the evaluation was stopped", fix="run it again")),
    ):
        code = process.wait()
    if code:
        return code
    summary: dict[str, Any] = storage.read_json(storage.join(options.output, SUMMARY))
    return summary


def _of_files(options: argparse.Namespace, rules: list[str]) -> dict[str, Any] | int:
    from trainer.config import parsing
    from trainer.config.schema import Config
    from trainer.evaluators import files as detection_files
    from trainer.evaluators.shards import result_files
    from trainer.storage import outputs

    _check_given(options, ("truth", "predictions"), ("model", "shards", "split", "nproc"))
    config = parsing.with_overrides(Config(), _overrides(options, rules), where="--set").evaluation
    read = [options.truth, options.predictions, config.baseline]
    outputs.claim(options.output, result_files(config.predictions), read)
    return detection_files.evaluate(
        options.truth,
        options.predictions,
        options.output,
        config,
        rules=rules,
        images_uri=options.images,
        clip=options.clip,
    )


def _check_given(options: argparse.Namespace, needed: tuple[str, ...], others: tuple[str, ...]) -> None:
    """Require a model and shards, or detections and their ground truth, but not both."""
    missing = [name for name in needed if not getattr(options, name)]
    extra = [name for name in others if getattr(options, name)]
    if missing or extra:
        problem = "required" if missing else "cannot be given with --truth"
        names = ", ".join("MODEL" if name == "model" else f"--{name}" for name in missing or extra)
        raise ConfigError(
            f"{names} {problem}",
            fix="score a model: kubedet evaluate MODEL --shards URI -o DIR; or a file of detections: "
            "kubedet evaluate --truth GT.json --predictions DT.json -o DIR",
        )


def _overrides(options: argparse.Namespace, rules: list[str]) -> dict[str, object]:
    values = {"split": options.split, "baseline": options.baseline, "gate": rules}
    given = {f"evaluation.{key}": value for key, value in values.items() if value}
    tile = {"evaluation.tile": options.tile} if options.tile != -1 else {}
    return given | tile | parse_overrides(options.overrides)


def add_compare(commands: Commands) -> None:
    """Declare `kubedet compare`."""
    parser = commands.add_parser(
        "compare",
        description="Compare two evaluations of the same images with 95 % confidence by a paired bootstrap.",
    )
    parser.add_argument("one", metavar="A", help="a run, an evaluation, or a file of detections")
    parser.add_argument("other", metavar="B", help="likewise")
    option(parser, "--truth FILE", "ground truth in COCO's JSON format (default: that of an evaluation)")
    option(parser, "--clip", "clip boxes that extend beyond their image, instead of rejecting a file")
    option(parser, "--samples N", "bootstrap samples", 200, least=1)
    option(parser, "-o --output URI", "folder for comparison.json and report.html")
    parser.set_defaults(command=_compare)


def _compare(options: argparse.Namespace) -> int:
    from trainer import storage
    from trainer.evaluation import metrics
    from trainer.evaluation.coco import number
    from trainer.evaluators import files as detection_files
    from trainer.report.evaluation_page import FILES
    from trainer.storage import outputs

    if options.output:
        outputs.claim(options.output, [*FILES, detection_files.COMPARISON], [options.one, options.other])
    comparison = detection_files.compare(
        options.one,
        options.other,
        truth_uri=options.truth,
        output_uri=options.output,
        samples=options.samples,
        clip=options.clip,
    )
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
        metrics.BETTER: "B is better",
        metrics.WORSE: "B is worse",
        metrics.NOT_SURE: "neither is clearly better",
    }
    few = f"fewer than {metrics.MIN_IMAGES} images have boxes: {metrics.TOO_FEW}"
    print("\n".join(lines))
    print(f"\n{verdicts.get(comparison['verdict'], few)}, by coco/AP")
    if options.output:
        print(f"report: {storage.join(options.output, 'report.html')}")
    return 0


def _interval(change: Any) -> str:
    return f"{change.delta:>+9.3f}   {change.low:+.3f} to {change.high:+.3f}: {change.verdict}"
