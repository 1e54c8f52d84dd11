"""Exports a checkpoint: writes the files, checks them in the runtimes that serve them, and publishes."""

import hashlib
import json
import logging
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from trainer import storage
from trainer.base.errors import ExportError, StorageError
from trainer.base.temporary_folders import temporary_folder
from trainer.config.schema import Config
from trainer.data.shard_folder import ShardIndex, read_index
from trainer.data.shard_index import ShardDataset
from trainer.evaluation.truth_and_predictions import name_difference
from trainer.export import bundle, bundle_signing, sbom
from trainer.export.formats import FORMATS, Maker, check_formats
from trainer.export.model_card import model_card
from trainer.export.preprocess import RULE
from trainer.export.published_models import name_for
from trainer.export.verify import Check, verify
from trainer.model.architecture import Architecture
from trainer.model.deployment import INPUT, OUTPUTS, RAW_OUTPUTS
from trainer.storage import check_writable
from trainer.training import checkpoint

SIGNING_KEY = "KUBEDET_SIGNING_KEY"
"""Environment variable: path of the PEM file that signs bundles."""
_LOG = logging.getLogger("export")


@dataclass(frozen=True)
class _Scores:
    """The section `metrics` of the metadata: results of the evaluation, if there was one."""

    split: str = ""
    images: int = 0
    evaluation: str = ""
    values: dict[str, float] = field(default_factory=dict)
    gate: str = ""
    per_class: dict[str, dict[str, float | None]] = field(default_factory=dict)


def export(
    checkpoint_uri: str, shards_uri: str, output_uri: str, config: Config, *,
    evaluation_uri: str = "", signing_key: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Write a bundle of the formats in config.export.

    Args:
        checkpoint_uri: best.pt of a run.
        shards_uri: shards whose validation images (else test, else train) check the export, and
            whose training images calibrate int8.
        output_uri: folder to publish to.
        config: the export section is used.
        evaluation_uri: folder of the run's evaluation, or "".
        signing_key: path of the PEM file that signs the bundle; "" means that of KUBEDET_SIGNING_KEY.

    Returns:
        model (the bundle's URI), name, model_version, files (name -> URI), bytes (name -> size),
        formats (name -> check), metrics and fingerprint.

    Raises:
        ExportError: a format cannot be made, the key cannot sign, the checkpoint's classes are not the
            shards', or an exported model does not match the trained one; nothing is published.
        CheckpointError: the checkpoint cannot be read.
        StorageError: the target cannot be written; raised before any work.
    """
    names = list(dict.fromkeys(config.export.formats))
    check_formats(names)
    key = signing_key or os.environ.get(SIGNING_KEY, "")
    if key:
        bundle_signing.check_key(key)
    check_writable(output_uri)
    scores = _read_scores(evaluation_uri)
    inputs_hash = _inputs_hash(checkpoint_uri, scores, config)
    # With a key it is exported and signed again: the previous signature may be by another key.
    if not key and _is_exported(output_uri, inputs_hash):
        _LOG.info("the model has been exported and checked already: %s", output_uri)
        return _result(output_uri)
    detector, meta = checkpoint.load_model(checkpoint_uri)
    index = read_index(shards_uri)
    config = replace(config, export=replace(config.export, name=name_for(config.export.name, shards_uri)))
    classes = [category["name"] for category in meta["categories"]]
    dataset = _check_set(shards_uri, index, classes, checkpoint_uri)
    size = meta["config"]["loader"]["image_size"]
    with temporary_folder() as folder, temporary_folder() as scratch:
        maker = Maker(detector, size, config, shards_uri, scratch)
        for each in names:
            _LOG.info("writing %s, input %dx%d", FORMATS[each].files[0], size, size)
            FORMATS[each].write(maker, folder / FORMATS[each].files[0])
        weights = {key: tensor.contiguous() for key, tensor in detector.state_dict().items()}
        safetensors.torch.save_file(weights, folder / bundle.WEIGHTS)
        checks = verify(folder, names, detector, dataset, config, size)
        for name, check in checks.items():
            _log_check(name, check)
        described = {
            **_metadata(detector, meta, config.export.name, checks, folder, maker.graph.rows),
            "trained_on": {
                "shards": meta["fingerprint"], "checkpoint": storage.absolute(checkpoint_uri),
                "step": meta["step"], "epoch": meta["epoch"], "source": _source(index, shards_uri),
                "splits": {
                    split: {"images": counts.samples, "boxes": counts.boxes}
                    for split, counts in index.splits.items()
                },
            },
            "metrics": asdict(replace(scores, values=scores.values or meta["metrics"] or {})),
            "made_from": inputs_hash,
        }  # fmt: skip
        (folder / bundle.METADATA).write_text(json.dumps(described, indent=2, ensure_ascii=False) + "\n")
        (folder / bundle.CARD).write_text(model_card(described))
        sbom.write_sbom(folder, folder / bundle.SBOM, described["name"], described["model_version"])
        bundle.seal(folder)
        if key:
            bundle_signing.sign(folder, key)
            _LOG.info("signed")
        bundle.publish(folder, output_uri)
    return _result(output_uri)


def _result(output_uri: str) -> dict[str, Any]:
    made = bundle.load(output_uri)
    names = [*made.checksums, bundle.CHECKSUMS, bundle.SIGNATURE]
    files = {name: storage.join(output_uri, name) for name in sorted(names)}
    sizes = {name: state.size for name, uri in files.items() if (state := storage.state(uri))}
    return {
        "model": output_uri,
        "name": made.metadata.name,
        "model_version": made.metadata.model_version,
        "files": {name: files[name] for name in sizes},
        "bytes": sizes,
        "formats": {name: entry["check"] for name, entry in made.metadata.record["formats"].items()},
        "metrics": made.metadata.metrics,
        "fingerprint": made.metadata.shards,
    }


def _inputs_hash(checkpoint_uri: str, scores: _Scores, config: Config) -> str:
    sha256 = bundle.file_sha256(storage.local_copy(checkpoint_uri))
    parts = [sha256, asdict(config.export), asdict(scores), _versions()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _is_exported(output_uri: str, inputs_hash: str) -> bool:
    signed = storage.exists(storage.join(output_uri, bundle.SIGNATURE))
    if signed or not bundle.exists(output_uri):
        return False
    try:
        earlier = bundle.load(output_uri)
        earlier.check()
    except StorageError:
        return False  # Damaged: it is exported again.
    return earlier.metadata.record.get("made_from") == inputs_hash


def _check_set(shards_uri: str, index: ShardIndex, classes: list[str], checkpoint_uri: str) -> ShardDataset:
    split = next((name for name in ("val", "test", "train") if index.samples.get(name)), "")
    if not split:
        raise ExportError(
            f"the shards {shards_uri} have no images to check the export on", fix="shard a source"
        )
    dataset = ShardDataset(shards_uri, split)
    of_data = [category["name"] for category in dataset.categories]
    if difference := name_difference(of_data, classes, "the data", "the model"):
        raise ExportError(
            f"the classes of the checkpoint {checkpoint_uri} are not those of the shards {shards_uri}: "
            f"{difference}",
            fix="export with the shards that the model was trained on",
        )
    return dataset


def _read_scores(evaluation_uri: str) -> _Scores:
    uri = storage.join(evaluation_uri, "metrics.json") if evaluation_uri else ""
    if not uri or not storage.exists(uri):
        return _Scores()
    scored = storage.read_json(uri)
    thresholds = scored.get("thresholds", {})
    return _Scores(
        split=scored.get("split", ""),
        images=scored.get("images", 0),
        evaluation=storage.absolute(evaluation_uri),
        values=scored.get("metrics") or {},
        gate=(scored.get("verdict") or {}).get("reason", ""),
        per_class={
            name: {key: row.get(key) for key in ("AP", "AP50", "boxes")} | {"threshold": thresholds.get(name)}
            for name, row in scored.get("per_class", {}).items()
        },
    )


def _source(index: ShardIndex, shards_uri: str) -> str:
    data_root = storage.parent(storage.parent(shards_uri))
    raw = storage.join(data_root, "raw", index.raw_fingerprint, "manifest.json")
    source = storage.read_json(raw)["source"] if storage.exists(raw) else ""
    # Without credentials: user name and password, signed query.
    return re.sub("//[^/@]*@", "//", source.partition("?")[0])


def _log_check(name: str, check: Check) -> None:
    matches = check.matches
    if not matches.detections:
        text = "%s: the model detects nothing in %d images, so the check says little; train longer"
        _LOG.warning(text, name, check.images)
        return
    _LOG.info(
        "%s in %s: AP %+.4f, %.1f%% of %d detections match, %.1f ms an image",
        name, check.runtime, check.ap_change, matches.matched * 100, matches.detections, check.latency.p50_ms,
    )  # fmt: skip


def _metadata(
    detector: Architecture, meta: dict[str, Any], name: str, checks: dict[str, Check], folder: Path, rows: int
) -> dict[str, Any]:
    size = meta["config"]["loader"]["image_size"]
    shas = {path.name: bundle.file_sha256(path) for path in sorted(folder.iterdir())}
    return {
        "kind": "model",
        "version": 2,
        "name": name,
        # The same files always have the same version.
        "model_version": hashlib.sha256(json.dumps(shas, sort_keys=True).encode()).hexdigest()[:12],
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "classes": meta["categories"],
        "input": {
            "name": INPUT, "dtype": "uint8", "shape": ["batch", 3, size, size], "input_size": size,
            "preprocessing": RULE,
        },
        "outputs": {
            "names": list(OUTPUTS),
            "rows": rows,
            "boxes": "float32 [batch, K, 4], x1 y1 x2 y2 in pixels of the input square, best first",
            "scores": "float32 [batch, K]",
            "labels": "int64 [batch, K], the id of `classes`; -1 where padded",
            "num": "int64 [batch], rows that are not padding",
        },
        "architecture": {"name": detector.config.architecture, "title": detector.title},
        "thresholds": detector.thresholds,
        "formats": {
            each: {
                "files": list(FORMATS[each].files),
                "outputs": list(RAW_OUTPUTS if FORMATS[each].raw else OUTPUTS),
                "bytes": {file: (folder / file).stat().st_size for file in FORMATS[each].files},
                "check": asdict(check),
            }
            for each, check in checks.items()
        },
        "sha256": shas,
        "versions": _versions(),
        "config": meta["config"],
    }  # fmt: skip


def _versions() -> dict[str, str]:
    versions = {"kubedet": version("kubedet"), "sources": _sources(), "torch": torch.__version__}
    for package in ("onnx", "onnxruntime", "openvino"):
        with suppress(PackageNotFoundError):  # An extra that is not installed.
            versions[package] = version(package)
    return versions


@cache
def _sources() -> str:
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
