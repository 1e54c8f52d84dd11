"""The model card for people, written from a model's metadata."""

from collections.abc import Iterable
from typing import Any

from trainer.evaluation.coco_metrics import METRICS, number

_MOST_CLASSES = 100


def model_card(metadata: dict[str, Any]) -> str:
    """Markdown from the content of model_metadata.json."""
    parts = [
        f"# {metadata['name']} {metadata['model_version']}",
        _what(metadata),
        "## Try it\n\n" + _use(metadata),
        "## How good it is\n\n" + _metrics(metadata),
        "## Files and their checks\n\n" + _formats(metadata),
        "## Input and output\n\n" + _interface(metadata),
        "## Where it comes from\n\n" + _origin(metadata),
        "## Limits\n\n" + _limits(metadata),
        "## Classes\n\n" + _classes(metadata["classes"], metadata["metrics"].get("per_class", {})),
    ]
    return "\n\n".join(parts) + "\n"


def _what(metadata: dict[str, Any]) -> str:
    return (
        f"An object detector: {metadata['architecture']['title']}, "
        f"{len(metadata['classes'])} classes, input {metadata['input']['input_size']} x "
        f"{metadata['input']['input_size']} pixels. Exported {metadata['created']}."
    )


def _use(metadata: dict[str, Any]) -> str:
    name = metadata["name"]
    return (
        f"    kubedet predict {name} IMAGES... -o DIR\n    kubedet serve {name}\n\n"
        "`--data-root` says where the published models are; instead of the name, this card's folder does "
        "as well. What other programs must know to call it stands in `model_metadata.json`."
    )


def _metrics(metadata: dict[str, Any]) -> str:
    scores = metadata["metrics"]
    values = {name: value for name, value in scores["values"].items() if name in METRICS}
    lines = [f"On the split `{scores['split']}`, {scores['images']} images.", ""] if scores["split"] else []
    lines += ["| metric | value | meaning |", "| --- | --- | --- |"]
    lines += [f"| {name} | {number(values[name])} | {METRICS[name]} |" for name in METRICS if name in values]
    if scores.get("gate"):
        lines += [
            "",
            "The gate, before the export:",
            "",
            *(f"- {rule}" for rule in scores["gate"].splitlines()),
        ]
    return "\n".join(lines) if values else "It was not scored."


def _formats(metadata: dict[str, Any]) -> str:
    lines = [
        "| format | file | MB | runtime | images | change in AP | matched | p50 / p95 ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, entry in metadata["formats"].items():
        check = entry["check"]
        time = check["latency"]
        size = sum(entry["bytes"].values()) / 1e6
        lines.append(
            f"| {name} | `{entry['files'][0]}` | {size:.1f} | {check['runtime']} | {check['images']} "
            f"| {check['ap_change']:+.4f} | {check['matches']['matched']:.1%} "
            f"| {time['p50_ms']:.1f} / {time['p95_ms']:.1f} |"
        )
    times = next(iter(metadata["formats"].values()))["check"]["latency"]
    threads = f"{times['threads']} thread{'' if times['threads'] == 1 else 's'}"
    lines += [
        "",
        "Each file was run by its runtime on images held out from the training; the change in AP and the "
        "matched detections are against the trained model. "
        f"Times: one image, {threads}, {times['cpu']}.",
    ]
    return "\n".join(lines)


def _interface(metadata: dict[str, Any]) -> str:
    tensor, outputs, limits = metadata["input"], metadata["outputs"], metadata["thresholds"]
    shape = ", ".join(map(str, tensor["shape"]))
    # A detector that finds each object once has no suppression.
    overlaps = (
        f"overlaps of a class above an IoU of {limits['nms']:g} are suppressed, " if "nms" in limits else ""
    )
    lines = [
        f"- `{tensor['name']}`: {tensor['dtype']} [{shape}]. {tensor['preprocessing']}.",
        *(f"- `{name}`: {outputs[name]}." for name in outputs["names"]),
        f"- Detections below a score of {limits['score']:g} are dropped, {overlaps}"
        f"at most {limits['detections_per_image']} remain.",
    ]
    return "\n".join(lines)


def _origin(metadata: dict[str, Any]) -> str:
    origin, train = metadata["trained_on"], metadata["config"]["train"]
    versions, weights = metadata["versions"], metadata["config"]["model"]["weights"]
    counts = [
        f"{name} {split['images']} images with {split['boxes']} boxes"
        for name, split in origin.get("splits", {}).items()
    ]
    source = [f"`{origin['source']}`"] if origin.get("source") else []
    rows = {
        "data": "; ".join([*source, *counts, f"shards `{origin['shards']}`"]),
        "checkpoint": f"`{origin['checkpoint']}`, step {origin['step']}, epoch {origin['epoch']}",
        "recipe": f"{metadata['config']['recipe']}, {train['epochs']} epochs, {train['optimizer']}, "
        f"learning rate {train['lr']:g}, seed {train['seed']}",
        "starting weights": f"`{weights}`" if weights else "none, from scratch",
        "code": f"kubedet {versions['kubedet']}, sources `{versions['sources'][:16]}`",
    }
    return "\n".join(f"- {name}: {value}" for name, value in rows.items())


def _limits(metadata: dict[str, Any]) -> str:
    size = metadata["input"]["input_size"]
    return (
        f"- Images are resized to {size} pixels: objects of a few pixels after that are not found.\n"
        "- It knows the classes below and nothing else, in images like those it was trained on.\n"
        "- The figures hold for the split named above; other cameras, places and light need a test of "
        "their own.\n"
        "- Licence and consent of the training images are those of their source."
    )


def _classes(classes: list[dict[str, Any]], scored: dict[str, dict[str, Any]]) -> str:
    shown = classes[:_MOST_CLASSES]
    titles = ["label", "name", "original id"]
    titles += ["boxes scored on", "AP", "AP50", "score of best F1"] if scored else []
    lines = [_row(titles), _row("---" for _ in titles)]
    for item in shown:
        cells = [item["id"], item["name"], item.get("original_id", "")]
        if scored:
            scores = scored.get(item["name"], {})
            cells += [
                scores.get("boxes", 0),
                *(_number_or_dash(scores.get(key)) for key in ("AP", "AP50", "threshold")),
            ]
        lines.append(_row(cells))
    if len(classes) > len(shown):
        lines += ["", f"... and {len(classes) - len(shown)} more in model_metadata.json."]
    return "\n".join(lines)


def _row(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _number_or_dash(value: float | None) -> str:
    return "-" if value is None else number(value)
