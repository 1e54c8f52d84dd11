"""Exports a checkpoint: writes, checks, and only then publishes."""

import hashlib
import json
import logging
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from trainer import checkpoint, storage
from trainer.config import Config
from trainer.data.shard_index import ShardDataset
from trainer.errors import ExportError
from trainer.export import parity
from trainer.export.graph import INPUT, OUTPUTS, DeploymentGraph
from trainer.export.onnx import write_onnx
from trainer.export.preprocess import RULE
from trainer.model.detector import Detector

METADATA = "model_metadata.json"
MODEL = "model.onnx"
WEIGHTS = "model.safetensors"
_LOG = logging.getLogger("export")


def export(checkpoint_uri: str, shards_uri: str, output_uri: str, config: Config) -> dict[str, Any]:
    """Write a model for serving: model.onnx, model.safetensors, model_metadata.json.

    Everything is made and checked in a temporary folder first; the metadata is published
    last, so that a folder with metadata is whole.

    Args:
        checkpoint_uri: best.pt of a run.
        shards_uri: shards whose validation images (else test, else train) check the export.
        output_uri: folder to publish to.
        config: image size and the export section.

    Returns:
        files (name -> URI), bytes (name -> size), parity (see parity.Parity).

    Raises:
        ExportError: the exported model does not match the trained one; nothing is published.
    """
    detector, meta = checkpoint.load_model(checkpoint_uri)
    size = meta["config"]["loader"]["image_size"]
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        _LOG.info("writing %s, opset %d, input %dx%d", MODEL, config.export.opset, size, size)
        write_onnx(DeploymentGraph(detector, size), made / MODEL, config.export.opset)
        figures = parity.check(
            made / MODEL, detector, _check_set(shards_uri), image_size=size,
            images=config.export.check_images, least=config.export.min_match,
        )  # fmt: skip
        if figures.detections:
            _LOG.info(
                "%.1f%% of %d detections match the trained model's", figures.matched * 100, figures.detections
            )
        else:
            _LOG.warning(
                "the model detects nothing in %d images, so the check says little; train longer",
                figures.images,
            )
        weights = {name: tensor.contiguous() for name, tensor in detector.state_dict().items()}
        safetensors.torch.save_file(weights, made / WEIGHTS)
        described = _metadata(detector, meta, size, parity.describe(figures), made)
        (made / METADATA).write_text(json.dumps(described, indent=2) + "\n")
        files = {name: storage.join(output_uri, name) for name in (MODEL, WEIGHTS, METADATA)}
        if storage.exists(files[METADATA]):
            # A model that is replaced must not be described by the metadata of the one before.
            storage.delete(files[METADATA])
        for name, uri in files.items():
            storage.upload(made / name, uri)
        sizes = {name: (made / name).stat().st_size for name in files}
    return {"files": files, "bytes": sizes, "parity": described["parity"]}


def _check_set(shards_uri: str) -> ShardDataset:
    index = storage.read_json(storage.join(shards_uri, "index.json"))
    for split in ("val", "test", "train"):
        if index["splits"].get(split, {}).get("samples"):
            return ShardDataset(shards_uri, split)
    raise ExportError(f"the shards {shards_uri} have no images to check the export on", fix="shard a source")


def _metadata(
    detector: Detector, meta: dict[str, Any], size: int, figures: dict[str, Any], folder: Path
) -> dict[str, Any]:
    return {
        "kind": "model",
        "version": 1,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "classes": meta["categories"],
        "input": {
            "name": INPUT, "dtype": "uint8", "shape": ["batch", 3, size, size], "input_size": size,
            "preprocessing": RULE,
        },
        "outputs": {
            "names": list(OUTPUTS),
            "boxes": "float32 [batch, K, 4], x1 y1 x2 y2 in pixels of the input square, best first",
            "scores": "float32 [batch, K]",
            "labels": "int64 [batch, K], the id of `classes`; -1 where padded",
            "num": "int64 [batch], rows that are not padding",
        },
        "thresholds": {
            "score": detector.config.score_threshold,
            "nms": detector.config.nms_threshold,
            "detections_per_image": detector.config.detections_per_image,
        },
        "trained_on": {"shards": meta["fingerprint"], "step": meta["step"], "epoch": meta["epoch"]},
        "validation": meta["metrics"],
        "parity": figures,
        "sha256": {name: _sha256(folder / name) for name in (MODEL, WEIGHTS)},
        "versions": {
            "kubedet": version("kubedet"), "torch": torch.__version__, "onnx": version("onnx"),
            "onnxruntime": version("onnxruntime"),
        },
        "config": meta["config"],
    }  # fmt: skip


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
