"""The model card: what a person must know before using a model, written from its metadata."""

from typing import Any

from trainer.evaluation.coco import METRICS, number

_MOST_CLASSES = 100


def model_card(metadata: dict[str, Any]) -> str:
    """Markdown from the content of model_metadata.json."""
    parts = [
        f"# {metadata['name']} {metadata['model_version']}",
        _what(metadata),
        "## How good it is\n\n" + _metrics(metadata),
        "## Files and their checks\n\n" + _formats(metadata),
        "## Input and output\n\n" + _interface(metadata),
        "## Where it comes from\n\n" + _origin(metadata),
        "## Limits\n\n" + _limits(metadata),
        "## Classes\n\n" + _classes(metadata["classes"]),
    ]
    return "\n\n".join(parts) + "\n"


def _what(metadata: dict[str, Any]) -> str:
    model = metadata["config"]["model"]
    return (
        f"An object detector: RetinaNet {model['version']} on {model['backbone']}, "
        f"{len(metadata['classes'])} classes, input {metadata['input']['input_size']} x "
        f"{metadata['input']['input_size']} pixels. Exported {metadata['created']}."
    )


def _metrics(metadata: dict[str, Any]) -> str:
    found = metadata["metrics"]
    values = {name: value for name, value in found["values"].items() if name in METRICS}
    lines = [f"On the split `{found['split']}`, {found['images']} images.", ""] if found["split"] else []
    lines += ["| metric | value | meaning |", "| --- | --- | --- |"]
    lines += [f"| {name} | {number(values[name])} | {METRICS[name]} |" for name in METRICS if name in values]
    return "\n".join(lines) if values else "It was not scored."


def _formats(metadata: dict[str, Any]) -> str:
    lines = [
        "| format | file | MB | runtime | images | change in AP | matched | p50 / p95 ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, made in metadata["formats"].items():
        check = made["check"]
        time = check["latency"]
        size = sum(made["bytes"].values()) / 1e6
        lines.append(
            f"| {name} | `{made['files'][0]}` | {size:.1f} | {check['runtime']} | {check['images']} "
            f"| {check['ap_change']:+.4f} | {check['matches']['matched']:.1%} "
            f"| {time['p50_ms']:.1f} / {time['p95_ms']:.1f} |"
        )
    times = next(iter(metadata["formats"].values()))["check"]["latency"]
    lines += ["", f"Times: one image, {times['threads']} threads, {times['cpu']}."]
    return "\n".join(lines)


def _interface(metadata: dict[str, Any]) -> str:
    given, outputs, limits = metadata["input"], metadata["outputs"], metadata["thresholds"]
    lines = [
        f"- `{given['name']}`: {given['dtype']} {given['shape']}. {given['preprocessing']}.",
        *(f"- `{name}`: {outputs[name]}." for name in outputs["names"]),
        f"- Detections below a score of {limits['score']:g} are dropped, overlaps of a class above an IoU of "
        f"{limits['nms']:g} are suppressed, at most {limits['detections_per_image']} remain.",
    ]
    return "\n".join(lines)


def _origin(metadata: dict[str, Any]) -> str:
    made, train = metadata["trained_on"], metadata["config"]["train"]
    versions = metadata["versions"]
    rows = {
        "shards": f"`{made['shards']}`",
        "checkpoint": f"`{made['checkpoint']}`, step {made['step']}, epoch {made['epoch']}",
        "recipe": f"{metadata['config']['recipe']}, {train['epochs']} epochs, {train['optimizer']}, "
        f"learning rate {train['lr']:g}, seed {train['seed']}",
        "starting weights": f"`{metadata['config']['model']['weights'] or 'none, from scratch'}`",
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


def _classes(classes: list[dict[str, Any]]) -> str:
    shown = classes[:_MOST_CLASSES]
    lines = ["| label | name | original id |", "| --- | --- | --- |"]
    lines += [f"| {item['id']} | {item['name']} | {item.get('original_id', '')} |" for item in shown]
    if len(classes) > len(shown):
        lines += ["", f"... and {len(classes) - len(shown)} more in model_metadata.json."]
    return "\n".join(lines)
