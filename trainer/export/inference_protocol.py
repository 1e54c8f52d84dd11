"""Tensors in the Open Inference Protocol v2 (KServe, Triton): as JSON and as binary data.

Formats: https://github.com/kserve/open-inference-protocol and Triton's binary tensor data extension.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.base.errors import DataError
from trainer.export.bundle import Metadata
from trainer.model.deployment import INPUT, OUTPUTS

_TYPES = {"FP32": np.float32, "INT64": np.int64}
_OUTPUT_TYPES = dict(zip(OUTPUTS, ("FP32", "FP32", "INT64", "INT64"), strict=True))


def describe_tensors(metadata: Metadata) -> dict[str, list[dict[str, object]]]:
    """Describe inputs and outputs in the protocol's model metadata; -1 is the batch."""
    size, rows = metadata.square.size, metadata.rows
    shapes = ([-1, rows, 4], [-1, rows], [-1, rows], [-1])
    return {
        "inputs": [{"name": INPUT, "datatype": "UINT8", "shape": [-1, 3, size, size]}],
        "outputs": [
            {"name": name, "datatype": _OUTPUT_TYPES[name], "shape": shape}
            for name, shape in zip(OUTPUTS, shapes, strict=True)
        ],
    }


@dataclass(frozen=True)
class InferenceRequest:
    """A request that was read."""

    images: np.ndarray  # uint8 [B, 3, S, S]
    id: Any
    outputs: dict[str, bool]  # requested outputs, and whether each is sent as binary data


def read_request(body: bytes, json_length: int | None, size: int) -> InferenceRequest:
    """Read a request for a model whose input has `size` pixels a side.

    `json_length` is the number of bytes of JSON at its start, before binary tensors; None if all is JSON.
    """
    try:
        request = json.loads(body[:json_length])
        (tensor,) = [item for item in request["inputs"] if item["name"] == INPUT]
        shape = [int(side) for side in tensor["shape"]]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise DataError(f"the request must be JSON with one input named {INPUT!r} and its shape") from None
    if tensor.get("datatype") != "UINT8":
        raise DataError(f"input {INPUT!r} must be UINT8, not {tensor.get('datatype')}")
    if len(shape) != 4 or shape[1:] != [3, size, size] or not 1 <= shape[0] <= 64:
        raise DataError(f"input {INPUT!r} must have the shape [1..64, 3, {size}, {size}], not {shape}")
    binary = _parameter(request, "binary_data_output", False)
    requested = request.get("outputs") or [{"name": name} for name in OUTPUTS]
    if not isinstance(requested, list):
        raise DataError("outputs must be a list of objects with a name")
    if not all(isinstance(item, dict) and item.get("name") in list(OUTPUTS) for item in requested):
        raise DataError(f"there is no such output; outputs are: {', '.join(OUTPUTS)}")
    outputs = {item["name"]: bool(_parameter(item, "binary_data", binary)) for item in requested}
    length = _parameter(tensor, "binary_data_size", None)
    if length is None:
        try:
            values = np.asarray(tensor.get("data"))
        except ValueError:
            values = np.zeros(0)
        if values.dtype.kind not in "iu" or values.size != math.prod(shape):
            raise DataError(f"input {INPUT!r} must contain {math.prod(shape)} integers")
        if values.min() < 0 or values.max() > 255:
            raise DataError(f"input {INPUT!r} must contain values from 0 to 255")
        return InferenceRequest(values.astype(np.uint8).reshape(shape), request.get("id"), outputs)
    data = body[json_length:] if json_length is not None else b""
    if type(length) is not int or length != math.prod(shape) or len(data) < length:
        received = min(length, len(data)) if isinstance(length, int) else repr(length)
        raise DataError(f"input {INPUT!r} needs {math.prod(shape)} bytes, not {received}")
    return InferenceRequest(np.frombuffer(data[:length], np.uint8).reshape(shape), request.get("id"), outputs)


def _parameter(holder: Mapping[str, Any], key: str, default: Any) -> Any:
    parameters = holder.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise DataError("parameters must be an object of names and values")
    return parameters.get(key, default)


def write_response(
    name: str, version: str, request: InferenceRequest, outputs: list[np.ndarray]
) -> tuple[bytes, int | None]:
    """Return the body of a response, and the bytes of JSON at its start (None if all is JSON)."""
    by_name = dict(zip(OUTPUTS, outputs, strict=True))
    tensors, blobs = [], []
    for output, binary in request.outputs.items():
        datatype = _OUTPUT_TYPES[output]
        values = np.ascontiguousarray(by_name[output], _TYPES[datatype])
        tensor: dict[str, object] = {"name": output, "datatype": datatype, "shape": list(values.shape)}
        if binary:
            blobs.append(values.tobytes())
            tensor["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            tensor["data"] = values.flatten().tolist()
        tensors.append(tensor)
    response = {"model_name": name, "model_version": version, "outputs": tensors}
    if request.id:
        response["id"] = request.id
    text = json.dumps(response).encode()
    return b"".join([text, *blobs]), len(text) if blobs else None
