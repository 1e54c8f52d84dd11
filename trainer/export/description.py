"""Writes the description of a bundle: model_metadata.json and the model card."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jinja2
import torch

from trainer import storage
from trainer.base.errors import ExportError
from trainer.data.shard_folder import ShardIndex
from trainer.evaluation.coco import format_metric
from trainer.evaluation.metrics import METRICS, SUMMARY
from trainer.export import bundle
from trainer.export.formats import FORMATS
from trainer.export.metadata import Check, Evaluation, ExportedFormat, Input, Metadata, Origin, Outputs
from trainer.export.preprocess import BOX_DESCRIPTION, RESIZE_DESCRIPTIONS
from trainer.model.architecture import INPUT, OUTPUTS, RAW_OUTPUTS, Architecture

_MAX_CLASSES = 100


def read_results(evaluation_uri: str, sha256: str) -> Evaluation:
    """Return the section `metrics` of the metadata: the results of the evaluation, if there is one.

    Raises ExportError if the evaluated model has a different sha256.
    """
    uri = storage.join(evaluation_uri, SUMMARY) if evaluation_uri else ""
    scored = storage.read_json(uri) if uri and storage.exists(uri) else {}
    if scored and scored.get("sha256") != sha256:
        raise ExportError(f"{uri} is the evaluation of a different model", fix="evaluate this model again")
    thresholds = scored.get("thresholds", {})
    return Evaluation(
        split=scored.get("split", ""),
        images=scored.get("images", 0),
        evaluation=storage.absolute(evaluation_uri) if scored else "",
        values=scored.get("metrics") or {},
        gate=(scored.get("verdict") or {}).get("reason", ""),
        per_class={
            name: {key: row.get(key) for key in ("AP", "AP50", "boxes")} | {"threshold": thresholds.get(name)}
            for name, row in scored.get("per_class", {}).items()
        },
    )


def write_description(
    folder: Path,
    detector: Architecture,
    meta: Mapping[str, Any],
    *,
    name: str,
    checkpoint_uri: str,
    index: ShardIndex,
    checks: dict[str, Check],
    rows: int,
    scores: Evaluation,
    made_from: str,
) -> None:
    """Write the metadata and the model card for the files in a folder.

    `meta` is the checkpoint's metadata, `rows` the number of detections per image, `scores` the result of
    `read_results`, and `made_from` a hash of all inputs.
    """
    size, resize, fill = meta["network_input"]
    hashes = {path.name: bundle.file_sha256(path) for path in sorted(folder.iterdir())}
    data_root = storage.parent(storage.parent(index.uri))
    raw = storage.join(data_root, "raw", index.raw_fingerprint, "manifest.json")
    source = storage.read_json(raw)["source"] if storage.exists(raw) else ""
    described = Metadata(
        name=name,
        # derived from the files: the same files have the same version
        model_version=hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()[:12],
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        classes=meta["categories"],
        input=Input(
            name=INPUT,
            dtype="uint8",
            shape=["batch", 3, size, size],
            input_size=size,
            resize=resize,
            fill=fill,
            preprocessing=RESIZE_DESCRIPTIONS[resize].format(fill=fill) + BOX_DESCRIPTION,
        ),
        outputs=Outputs(
            names=list(OUTPUTS),
            rows=rows,
            boxes="float32 [batch, K, 4], x1 y1 x2 y2 in pixels of the input square, best first",
            scores="float32 [batch, K]",
            labels="int64 [batch, K], the id of `classes`; -1 where padded",
            num="int64 [batch], rows that are not padding",
        ),
        architecture={"name": detector.config.architecture, "title": detector.title},
        thresholds=detector.thresholds,
        formats={
            kind: ExportedFormat(
                files=[FORMATS[kind].file],
                outputs=list(RAW_OUTPUTS if FORMATS[kind].raw else OUTPUTS),
                bytes={FORMATS[kind].file: (folder / FORMATS[kind].file).stat().st_size},
                check=check,
            )
            for kind, check in checks.items()
        },
        sha256=hashes,
        versions=collect_versions(),
        config=meta["config"],
        trained_on=Origin(
            shards=meta["fingerprint"],
            checkpoint=storage.absolute(checkpoint_uri),
            step=meta["step"],
            epoch=meta["epoch"],
            # Remove credentials: user name and password, signed query.
            source=re.sub("//[^/@]*@", "//", source.partition("?")[0]),
            splits={
                split: {"images": counts.samples, "boxes": counts.boxes}
                for split, counts in index.splits.items()
            },
        ),
        metrics=replace(scores, values=scores.values or meta["metrics"] or {}),
        made_from=made_from,
    )
    text = json.dumps(asdict(described), indent=2, ensure_ascii=False) + "\n"
    (folder / bundle.METADATA).write_text(text)
    (folder / bundle.CARD).write_text(render_card(described))


def collect_versions() -> dict[str, str]:
    """Return the versions of kubedet and of the packages used for export, and a hash of the sources."""
    found = {"kubedet": version("kubedet"), "sources": _source_digest(), "torch": torch.__version__}
    for package in ("onnx", "onnxruntime"):
        with suppress(PackageNotFoundError):  # the extra is not installed
            found[package] = version(package)
    return found


@cache
def _source_digest() -> str:
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def render_card(metadata: Metadata) -> str:
    """Return the model card in Markdown."""
    values, scores = metadata.metrics.values, metadata.metrics.per_class
    titles = ["label", "name", "original id"]
    titles += ["scored boxes", "AP", "AP50", "threshold (best F1)"] if scores else []
    class_rows = []
    for item in metadata.classes[:_MAX_CLASSES]:
        cells = [item["id"], item["name"], item.get("original_id", "")]
        if scores:
            row = scores.get(item["name"], {})
            shown = [row.get(key) for key in ("AP", "AP50", "threshold")]
            cells += [
                row.get("boxes", 0),
                *("-" if value is None else format_metric(value) for value in shown),
            ]
        class_rows.append(cells)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  (Markdown)
    )
    return environment.get_template("model_card.md.jinja").render(
        asdict(metadata),
        values={name: values[name] for name in METRICS if name in values},
        meanings=METRICS,
        number=format_metric,
        titles=titles,
        class_rows=class_rows,
        class_row=_table_row,
    )


def _table_row(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
