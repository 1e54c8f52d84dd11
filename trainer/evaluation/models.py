"""A model to score: a checkpoint, or what was exported of one."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer import checkpoint, storage
from trainer.errors import EvaluationError
from trainer.export.bundle import METADATA, file_sha256
from trainer.model.postprocess import Detections


@dataclass(frozen=True)
class Model:
    """A model, and what is known of it."""

    uri: str
    predict: Callable[[Tensor], Detections]
    """Detections in uint8 squares [B, 3, S, S]."""
    categories: list[dict[str, Any]]
    """Classes in the order of its labels."""
    image_size: int
    """S, pixels."""
    sha256: str
    """Of the file."""
    step: int | None
    """Optimiser steps it was trained for."""
    config: dict[str, Any]
    """Configuration of its training."""


def load(uri: str, device: torch.device) -> Model:
    """Load a checkpoint (.pt), or an exported model: its .onnx file or the folder with it.

    Raises:
        EvaluationError: it is neither, or the runtime for it is not installed.
        CheckpointError: the checkpoint is damaged or does not fit.
        StorageError: it cannot be read.
    """
    metadata_uri = _metadata(uri)
    if metadata_uri:
        return _exported(uri, metadata_uri)
    detector, meta = checkpoint.load_model(uri, device)
    if device.type == "cpu":
        detector = detector.to(memory_format=torch.channels_last)
    return Model(
        uri, detector.predict, meta["categories"], meta["config"]["loader"]["image_size"],
        file_sha256(storage.local_copy(uri)), meta["step"], meta["config"],
    )  # fmt: skip


def trained_with(uri: str) -> dict[str, Any]:
    """Return the configuration of a model's training, without loading the model.

    Raises:
        CheckpointError, StorageError: as `load`.
    """
    metadata_uri = _metadata(uri)
    if metadata_uri:
        return storage.read_json(metadata_uri).get("config", {})
    return json.loads(checkpoint.read(uri)["config"])


def _metadata(uri: str) -> str:
    """URI of the file that describes an exported model; empty for a checkpoint."""
    if uri.endswith(".onnx"):
        return storage.join(storage.parent(uri), METADATA)
    beside = storage.join(uri, METADATA)
    return beside if not uri.endswith(".pt") and storage.exists(beside) else ""


def _exported(uri: str, metadata_uri: str) -> Model:
    from trainer.export.runtimes import OnnxRuntime

    uri = uri if uri.endswith(".onnx") else storage.join(uri, "model.onnx")
    known, path = storage.read_json(metadata_uri), storage.local_copy(uri)
    try:
        runtime = OnnxRuntime(path)
    except ImportError as error:
        raise EvaluationError(
            f"{uri} cannot be run: {error}", fix="install kubedet[export], or score the checkpoint"
        ) from None
    except Exception as error:  # onnxruntime has no common error of its own
        raise EvaluationError(
            f"{uri} cannot be run: {str(error).splitlines()[0]}", fix="export the model again"
        ) from None

    def predict(images: Tensor) -> Detections:
        return Detections(*map(torch.from_numpy, runtime.run(images.cpu().numpy())))

    trained = known.get("trained_on", {})
    return Model(
        uri, predict, known["classes"], known["input"]["input_size"], file_sha256(path), trained.get("step"),
        known.get("config", {}),
    )  # fmt: skip
