"""Layouts for model servers, generated from a bundle: Triton's repository, KServe's service."""

import json
import re

from trainer import storage
from trainer.base.errors import ConfigError, ExportError
from trainer.export.bundle import Bundle, Metadata
from trainer.model.deployment import INPUT

_TRITON = {
    "onnx": ('platform: "onnxruntime_onnx"', ("model.onnx",)),
    "onnx-int8": ('platform: "onnxruntime_onnx"', ("model.onnx",)),
}
"""Backend of each format, and the names of its files in a repository."""


def write_triton(source: Bundle, uri: str, *, kind: str = "onnx", max_batch: int = 8) -> str:
    """Write a model into a Triton repository, whose other models are unchanged; returns its folder.

    `kind` is onnx or onnx-int8; `max_batch` the largest number of images in a batch.
    """
    if kind not in _TRITON or kind not in source.metadata.formats:
        usable = [name for name in _TRITON if name in source.metadata.formats]
        raise ExportError(
            f"the bundle {source.uri} has no format {kind} that Triton serves",
            fix=f"formats that Triton serves: {', '.join(usable) or 'none; export onnx'}",
        )
    if max_batch < 1:
        raise ConfigError(f"--max-batch must be 1 or more, not {max_batch}", fix="use 8")
    metadata = source.metadata
    size, rows = metadata.square.size, metadata.rows
    image = _tensor(INPUT, "TYPE_UINT8", f"dims: [ 3, {size}, {size} ]")
    outputs = [
        _tensor("boxes", "TYPE_FP32", f"dims: [ {rows}, 4 ]"),
        _tensor("scores", "TYPE_FP32", f"dims: [ {rows} ]"),
        _tensor("labels", "TYPE_INT64", f'dims: [ {rows} ]\n    label_filename: "labels.txt"'),
        # A number for each image: Triton's shapes need one dimension more than the model's.
        _tensor("num", "TYPE_INT64", "dims: [ 1 ]\n    reshape { shape: [ ] }"),
    ]
    config = (
        f"name: {json.dumps(metadata.name)}\n{_TRITON[kind][0]}\nmax_batch_size: {max_batch}\n"
        f"input [\n{image}\n]\noutput [\n" + ",\n".join(outputs) + "\n]\ndynamic_batching { }\n"
    )
    folder = storage.join(uri, metadata.name)
    names = metadata.formats[kind]
    with source.files(names) as local:
        for name, served in zip(names, _TRITON[kind][1], strict=True):
            storage.upload(local / name, storage.join(folder, "1", served), confirm=True)
    for served in {name for _, files in _TRITON.values() for name in files} - set(_TRITON[kind][1]):
        storage.delete(storage.join(folder, "1", served))  # Of another format, written here before.
    labels = "".join(f"{item['name']}\n" for item in metadata.classes)
    storage.write_bytes(storage.join(folder, "labels.txt"), labels.encode())
    # Last: without it Triton does not see the model.
    storage.write_bytes(storage.join(folder, "config.pbtxt"), config.encode())
    return folder


def _tensor(name: str, kind: str, rest: str) -> str:
    return f"  {{\n    name: {json.dumps(name)}\n    data_type: {kind}\n    {rest}\n  }}"


def kserve_service(metadata: Metadata, storage_uri: str, service_account: str = "") -> dict[str, object]:
    """Return a KServe InferenceService that serves a Triton repository by the v2 protocol.

    `storage_uri` is the repository: s3://, gs://, https:// or pvc://; minio:// becomes s3://. The Secret of
    `service_account` has the store's credentials.
    """
    uri = re.sub("^minio:", "s3:", storage_uri)
    if storage.scheme(uri) not in ("s3", "gs", "http", "https", "pvc"):
        raise ConfigError(
            f"KServe cannot read models from {storage_uri}",
            fix="copy the repository to a bucket or a volume and pass its URI as --storage-uri "
            "(s3://bucket/triton, pvc://claim/triton)",
        )
    model = {
        "modelFormat": {"name": "triton"},  # The URI is a Triton repository, whatever the model's format.
        "runtime": "kserve-tritonserver",
        "protocolVersion": "v2",
        "storageUri": uri,
    }
    account = {"serviceAccountName": service_account} if service_account else {}
    name = re.sub(r"[^a-z0-9-]+", "-", metadata.name.lower()).strip("-")[:50].strip("-")
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": name,
            "labels": {"app.kubernetes.io/managed-by": "kubedet"},
            "annotations": {"kubedet/model-version": metadata.model_version},
        },
        "spec": {"predictor": {"model": model, **account}},
    }
