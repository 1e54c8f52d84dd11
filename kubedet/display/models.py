"""What the commands about models, recipes and weights print."""

import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubedet.display import columns, print_json, show
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

    show(storage.read_bytes(storage.join(evaluation.folder, "table.txt")).decode())
    if comparison := evaluation.comparison:
        text = comparison["obstacle"]
        if not text:
            change = Change(*comparison["changes"]["coco/AP"])
            interval = f"with 95 % confidence from {change.low:+.4f} to {change.high:+.4f}"
            text = f"coco/AP {change.delta:+.4f}, {interval}: {change.verdict}"
        show(f"\nagainst {comparison['baseline']}: {text}")
    print(f"\ngate: {'passed' if evaluation.passed else 'failed'}")
    show("".join(f"  {line}\n" for line in evaluation.reason.splitlines()) + f"report: {evaluation.report}")
    return int(bool(evaluation.rules) and not evaluation.passed)


def show_predictions(files: "PredictedFiles") -> None:
    """Print the number of detections by class of each image."""
    show(f"{files.model}, {files.runtime}")
    for path, detections in files.detections.items():
        counts = Counter(detection.name for detection in detections)
        text = ", ".join(f"{count} {name}" for name, count in counts.items())
        show(f"{path}: {text or 'nothing found'}")
    files.check()
    show(f"results in {files.folder}")


def show_published(
    models: Sequence[PublishedModel], arguments: Mapping[str, Any], *, json: bool = False
) -> None:
    """Print models and their versions."""
    if json:
        return print_json(models)
    if not models:
        show(f"no models are published under {arguments['data_root']}")
    for model in models:
        if model.problem:
            print(f"error: {model.problem}", file=sys.stderr)
        show(model.name)
        for version, metadata in model.versions.items():
            mark = "*" if version == model.current else " "
            ap = metadata.metrics.values.get("coco/AP")
            score = "-" if ap is None else f"{ap:.3f}"
            show(f"{mark} {version}  {metadata.created}  AP {score}  {', '.join(metadata.formats)}")
        for version, reason in model.damaged.items():
            show(f"  {version}  damaged: {reason.splitlines()[-1].strip()}")


def show_card(model: "Bundle") -> None:
    """Print the card of a model."""
    from trainer.export.bundle import CARD

    with model.files([CARD]) as folder:
        show((Path(folder) / CARD).read_text().rstrip("\n"))
    show(f"\nIn `{model.uri}`")


def show_verified(model: "Bundle", arguments: Mapping[str, Any]) -> None:
    """Print what was verified."""
    show(f"{model.uri}: {len(model.checksums)} files are as they were written, and no others are there")
    show(f"{model.metadata.name} {model.metadata.model_version}, sha256 of SHA256SUMS {model.digest}")
    if arguments["public_key"]:
        show(f"signed by the key of {arguments['public_key']}")
    if arguments["at_least"]:
        show(f"not older than version {arguments['at_least']}")


def show_recipes(recipes: Mapping[str, str]) -> None:
    """Print the names and purposes of recipes."""
    print(columns([*recipes.items()]))


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
    """Print a table of weights that were fetched."""
    from trainer.weights.weights_mirror import mirror_uri

    if json:
        return print_json(weights)
    rows = [(uri, file.sha256[:8]) for uri, file in weights.items()]
    table = columns([("weights", "SHA-256"), *rows])
    show(f"{mirror_uri(arguments['data_root'])}\n\n{table}")
