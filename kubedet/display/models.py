"""Output of the commands for models, recipes and weights."""

import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubedet.display import format_columns, print_json, print_safe
from kubedet.results import Evaluation, PublishedModel

if TYPE_CHECKING:
    from trainer.config.explanations import Explanation
    from trainer.config.schema import Config
    from trainer.export.bundle import Bundle
    from trainer.export.predict_files import PredictedFiles
    from trainer.weights.weights_mirror import PublishedFile

_INDENT = "    "
_MAX_WIDTH = 110


def show_evaluation(evaluation: Evaluation) -> int:
    """Print scores, comparison and verdict; return 1 if the command's gate rules failed."""
    from trainer import storage
    from trainer.evaluation.metrics import Change

    print_safe(storage.read_bytes(storage.join(evaluation.folder, "table.txt")).decode())
    if comparison := evaluation.comparison:
        text = comparison["obstacle"]
        if not text:
            change = Change(*comparison["changes"]["coco/AP"])
            interval = f"with 95 % confidence from {change.low:+.4f} to {change.high:+.4f}"
            text = f"coco/AP {change.delta:+.4f}, {interval}: {change.verdict}"
        print_safe(f"\nagainst {comparison['baseline']}: {text}")
    print(f"\ngate: {'passed' if evaluation.passed else 'failed'}")
    print_safe(
        "".join(f"  {line}\n" for line in evaluation.reason.splitlines()) + f"report: {evaluation.report}"
    )
    return int(bool(evaluation.rules) and not evaluation.passed)


def show_predictions(files: "PredictedFiles") -> None:
    """Print the number of detections by class of each image."""
    print_safe(f"{files.model}, {files.runtime}")
    for path, detections in files.detections.items():
        counts = Counter(detection.name for detection in detections)
        text = ", ".join(f"{count} {name}" for name, count in counts.items())
        print_safe(f"{path}: {text or 'nothing found'}")
    files.raise_for_unreadable()
    print_safe(f"results in {files.folder}")


def show_models(
    models: Sequence[PublishedModel], arguments: Mapping[str, Any], *, json: bool = False
) -> None:
    """Print models and their versions."""
    if json:
        return print_json(models)
    if not models:
        print_safe(f"no models are published under {arguments['data_root']}")
    for model in models:
        if model.problem:
            print(f"error: {model.problem}", file=sys.stderr)
        print_safe(model.name)
        for version, metadata in model.versions.items():
            mark = "*" if version == model.current else " "
            ap = metadata.metrics.values.get("coco/AP")
            score = "-" if ap is None else f"{ap:.3f}"
            print_safe(f"{mark} {version}  {metadata.created}  AP {score}  {', '.join(metadata.formats)}")
        for version, reason in model.damaged.items():
            print_safe(f"  {version}  damaged: {reason.splitlines()[-1].strip()}")


def show_model_card(model: "Bundle") -> None:
    """Print a model's card."""
    from trainer.export.bundle import CARD

    with model.verified_files([CARD]) as folder:
        print_safe((Path(folder) / CARD).read_text().rstrip("\n"))
    print_safe(f"\nIn `{model.uri}`")


def show_verification(model: "Bundle", arguments: Mapping[str, Any]) -> None:
    """Print what was verified."""
    print_safe(f"{model.uri}: {len(model.checksums)} files match their checksums; there are no other files")
    print_safe(f"{model.metadata.name} {model.metadata.model_version}, sha256 of SHA256SUMS {model.digest}")
    if arguments["public_key"]:
        print_safe(f"signed by the key of {arguments['public_key']}")
    if arguments["at_least"]:
        print_safe(f"not older than version {arguments['at_least']}")


def show_recipes(recipes: Mapping[str, str]) -> None:
    """Print the names and purposes of recipes."""
    print(format_columns([*recipes.items()]))


def show_config(config: "Config") -> None:
    """Print a configuration as JSON."""
    from trainer.config.parsing import to_json

    print(to_json(config), end="")


def show_explanations(items: "Sequence[Explanation]") -> None:
    """Print a paragraph for each field."""
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
    for item in items:
        print(f"{item.name} = {item.value}" + (f"  ({item.variant})" if item.variant else ""))
        lines = textwrap.wrap(item.meaning, width, initial_indent=_INDENT, subsequent_indent=_INDENT)
        print("\n".join(lines))


def show_weights(
    weights: "Mapping[str, PublishedFile]", arguments: Mapping[str, Any], *, json: bool = False
) -> None:
    """Print a table of the fetched weights."""
    from trainer.weights.weights_mirror import mirror_uri

    if json:
        return print_json(weights)
    rows = [(uri, file.sha256[:8]) for uri, file in weights.items()]
    table = format_columns([("weights", "SHA-256"), *rows])
    print_safe(f"{mirror_uri(arguments['data_root'])}\n\n{table}")
