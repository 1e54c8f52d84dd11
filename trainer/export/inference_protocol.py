"""Tensors in the Open Inference Protocol v2 (KServe, Triton): as JSON and as binary data.

Formats: https://github.com/kserve/open-inference-protocol and Triton's binary tensor data extension.
"""

import json
import math
from typing import Any

import numpy as np

from trainer.base.errors import DataError
from trainer.export.bundle import Metadata
from trainer.model.deployment import INPUT, OUTPUTS

TYPES = {"UINT8": np.uint8, "FP32": np.float32, "INT64": np.int64}
_OUTPUT_TYPES = dict(zip(OUTPUTS, ("FP32", "FP32", "INT64", "INT64"), strict=True))


def describe_tensors(metadata: Metadata) -> dict[str, list[dict[str, Any]]]:
    """Describe inputs and outputs in the protocol's model metadata; -1 is the batch."""
    size, rows = metadata.input_size, metadata.rows
    shapes = dict(zip(OUTPUTS, ([-1, rows, 4], [-1, rows], [-1, rows], [-1]), strict=True))
    return {
        "inputs": [{"name": INPUT, "datatype": "UINT8", "shape": [-1, 3, size, size]}],
        "outputs": [
            {"name": name, "datatype": _OUTPUT_TYPES[name], "shape": shape} for name, shape in shapes.items()
        ],
    }


def read_request(body: bytes, json_length: int | None, size: int) -> tuple[dict[str, Any], np.ndarray]:
    """Read an inference request.

    Args:
        body: body of the request.
        json_length: bytes of JSON at its start, before binary tensors; None if all is JSON.
        size: side of the model's square.

    Returns:
        The request's JSON, and the images uint8 [B, 3, size, size].

    Raises:
        DataError: the request is malformed; the message is for its sender.
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
    length = _parameters(tensor).get("binary_data_size")
    if length is None:
        return request, _from_json(tensor.get("data"), shape)
    data = body[json_length:] if json_length is not None else b""
    if length != math.prod(shape) or len(data) < length:
        received = min(length, len(data)) if isinstance(length, int) else repr(length)
        raise DataError(f"input {INPUT!r} needs {math.prod(shape)} bytes, {received} are given")
    return request, np.frombuffer(data[:length], np.uint8).reshape(shape)


def _parameters(holder: dict[str, Any]) -> dict[str, Any]:
    parameters = holder.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise DataError("parameters must be an object of names and values")
    return parameters


def _from_json(data: Any, shape: list[int]) -> np.ndarray:
    try:
        values = np.asarray(data)
        if values.dtype.kind not in "iu" or values.size != math.prod(shape):
            raise ValueError
    except ValueError:
        raise DataError(f"input {INPUT!r} must hold {math.prod(shape)} integers") from None
    if values.min() < 0 or values.max() > 255:
        raise DataError(f"input {INPUT!r} must hold values from 0 to 255")
    return values.astype(np.uint8).reshape(shape)


def write_response(
    header: dict[str, Any], request: dict[str, Any], outputs: list[np.ndarray]
) -> tuple[bytes, int | None]:
    """Write the response to a request."""
    binary = bool(_parameters(request).get("binary_data_output"))
    requested = request.get("outputs") or [{"name": name} for name in OUTPUTS]
    if not isinstance(requested, list):
        raise DataError("outputs must be a list of objects with a name")
    by_name = dict(zip(OUTPUTS, outputs, strict=True))
    described, blobs = [], []
    for item in requested:
        if not isinstance(item, dict) or item.get("name") not in list(by_name):
            raise DataError(f"there is no such output; outputs are: {', '.join(OUTPUTS)}")
        name = item["name"]
        datatype = _OUTPUT_TYPES[name]
        values = np.ascontiguousarray(by_name[name], TYPES[datatype])
        tensor = {"name": name, "datatype": datatype, "shape": list(values.shape)}
        if _parameters(item).get("binary_data", binary):
            blobs.append(values.tobytes())
            tensor["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            tensor["data"] = values.flatten().tolist()
        described.append(tensor)
    response = {**header, "outputs": described}
    if request.get("id"):
        response["id"] = request["id"]
    text = json.dumps(response).encode()
    return b"".join([text, *blobs]), len(text) if blobs else None
