"""Loads a model for prediction: a checkpoint or an exported model."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from trainer import storage
from trainer.base.errors import CheckpointError, EvaluationError, install_command, wrap_exceptions
from trainer.config import parsing
from trainer.evaluation.inference import LoadedModel
from trainer.evaluation.truth_and_predictions import MAX_EXAMPLES
from trainer.export import bundle
from trainer.export.bundle import METADATA, WEIGHTS, Bundle
from trainer.model.architecture import Architecture, Detections, build
from trainer.training import checkpoint

_Predict = Callable[[Tensor], Detections]
_PREFERRED = ("onnx", "onnx-int8", "raw")
"""Formats in order of preference; the weights come last."""
_TORCH = f"torch {torch.__version__}"


def load_model(uri: str, device: torch.device) -> LoadedModel:
    """Load a checkpoint (.pt), the folder of an exported model, or one of its files.

    A file is .safetensors (weights) or .onnx. `device` applies to checkpoints and weights; ONNX runs on the
    CPU.
    """
    exported = _find_exported(uri)
    if exported:
        return load_bundle_file(*exported, device)
    detector, meta = checkpoint.load_model(uri, device)
    predict = _make_predict(detector, device, uri)
    return LoadedModel(
        uri,
        predict,
        True,
        meta["categories"],
        meta["network_input"],
        meta["sha256"],
        meta["step"],
        meta["config"],
        f"{meta['config']['recipe']} step {meta['step']}",
        "checkpoint",
        _TORCH,
    )


def load_bundle_file(source: Bundle, name: str, device: torch.device) -> LoadedModel:
    """Load a file of a bundle after verifying its checksum; see `load_model`."""
    metadata, file, reentrant = source.metadata, storage.join(source.uri, name), name == WEIGHTS
    if reentrant:
        trained = parsing.from_tree(metadata.config, where=storage.join(source.uri, METADATA))
        detector = build(trained.model, len(metadata.classes))
        problem = f"{file} does not match its configuration"
        with (
            source.verified_files([WEIGHTS]) as folder,
            wrap_exceptions(CheckpointError, problem, fix="export the model again"),
        ):
            detector.load_state_dict(safetensors.torch.load_file(folder / WEIGHTS))
        predict = _make_predict(detector.to(device).eval(), device, file)
        kind, runtime = "weights", _TORCH
    else:
        predict, kind, runtime = _load_exported(source, name)
    return LoadedModel(
        file,
        predict,
        reentrant,
        metadata.classes,
        metadata.network_input,
        source.checksums[name],
        metadata.trained_on.step,
        metadata.config,
        f"{metadata.name} {metadata.model_version}",
        kind,
        runtime,
        metadata,
    )


def select_file(source: Bundle, kind: str = "") -> str:
    """Return the file name of a format; by default of the preferred available format, else the weights."""
    formats = source.metadata.formats
    if kind and kind not in formats:
        fix = f"use one of: {', '.join(formats)}" if formats else "export the model as onnx"
        raise EvaluationError(f"the bundle {source.uri} has no format {kind}", fix=fix)
    kind = kind or next((name for name in _PREFERRED if name in formats), "")
    return formats[kind].files[0] if kind else WEIGHTS


def read_training_config(uri: str) -> Mapping[str, Any]:
    """Return the configuration of a model's training without loading the model."""
    exported = _find_exported(uri)
    if exported:
        return exported[0].metadata.config
    text = checkpoint.read(uri)["config"]
    return asdict(parsing.from_json(text, where=f"the configuration in {uri}"))


def _find_exported(uri: str) -> tuple[Bundle, str] | None:
    if uri.endswith(".pt"):
        return None
    if storage.exists(storage.join(uri, METADATA)):
        source = bundle.load(uri)
        return source, select_file(source)
    folder, _, name = uri.rpartition("/")
    if storage.exists(storage.join(folder or ".", METADATA)):
        source = bundle.load(folder or ".")
        files = [WEIGHTS, *(entry.files[0] for entry in source.metadata.formats.values())]
        if name in files:
            return source, name
        raise EvaluationError(
            f"{uri} is not one of the model files in its folder",
            fix=f"use the folder, or one of: {', '.join(files)}",
        )
    raise EvaluationError(
        f"{uri} is neither a checkpoint nor an exported model",
        fix="use RUN/train/best.pt from the training, or RUN/model from the export",
    )


def _make_predict(detector: Architecture, device: torch.device, uri: str) -> _Predict:
    bad = [name for name, value in detector.state_dict().items() if not value.isfinite().all()]
    if bad:
        raise CheckpointError(
            f"{len(bad)} tensors of the model {uri} contain values that are not finite: "
            + ", ".join(bad[:MAX_EXAMPLES]),
            fix="use a checkpoint from before the training diverged",
        )
    detector = detector.fold_batchnorm()
    predict = (detector.to(memory_format=torch.channels_last) if device.type == "cpu" else detector).predict
    return lambda images: predict(images.to(device))


def _load_exported(source: Bundle, name: str) -> tuple[_Predict, str, str]:
    uri = storage.join(source.uri, name)
    try:
        from trainer.export.formats import FORMATS, ExportedModel
    except ImportError as error:
        raise EvaluationError(
            f"{uri} cannot be run: {error}", fix=f"{install_command('export')}, or score the checkpoint"
        ) from None
    kind, form = next(item for item in FORMATS.items() if item[1].file == name)
    failing = wrap_exceptions(EvaluationError, f"{uri} cannot be run", fix="export the model again")
    with source.verified_files(source.metadata.formats[kind].files) as folder, failing:
        served = ExportedModel(form, folder / name, source.metadata.thresholds)
    size, classes = source.metadata.network_input.size, len(source.metadata.classes)
    if served.runtime.size != size:
        raise EvaluationError(
            f"{uri} expects images of {served.runtime.size} pixels, but {METADATA} says {size}",
            fix="export the model again",
        )

    def predict(images: Tensor) -> Detections:
        found = served.predict(images.cpu().numpy())
        if found.labels.numel() and (label := int(found.labels.max())) >= classes:
            raise EvaluationError(
                f"{uri} detects class {label}, but {METADATA} has {classes}", fix="export the model again"
            )
        return found

    return predict, kind, served.runtime.name
