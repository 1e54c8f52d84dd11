"""Static int8 quantization of the convolutions, by channel, calibrated on training images.

Only convolutions are quantized: they dominate the run time, and box decoding and scores need more precision.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from trainer.base.errors import ExportError, wrap_exceptions
from trainer.config.types import NetworkInput
from trainer.data.decoding import read_sample
from trainer.data.shard_index import ShardDataset
from trainer.data.transforms import fit_image
from trainer.model.architecture import INPUT

# Minimum products per output, and output channels, for a convolution that is faster as a matrix product.
_MIN_LENGTH, _MIN_WIDTH = 512, 128


def evenly_spaced_indices(count: int, limit: int) -> np.ndarray:
    """Return at most `limit` evenly spaced indices of `count` samples, int64."""
    return np.linspace(0, count - 1, min(count, limit)).round().astype(np.int64)


class CalibrationImages:
    """Evenly spaced training images, in the interface of onnxruntime's calibration."""

    def __init__(self, shards_uri: str, network_input: NetworkInput, count: int) -> None:
        self._dataset, self._network_input = ShardDataset(shards_uri, "train"), network_input
        self._rows = evenly_spaced_indices(len(self._dataset), count).tolist()
        self.count = len(self._rows)

    def get_next(self) -> dict[str, np.ndarray] | None:
        if not self._rows:
            return None
        image, _ = read_sample(self._dataset, self._rows.pop(0))
        return {INPUT: fit_image(image, self._network_input)[0].numpy()[None]}


def quantize(source: Path, target: Path, images: CalibrationImages) -> None:
    """Quantize an ONNX file to int8, with pairs of QuantizeLinear and DequantizeLinear."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    fused = target.with_suffix(".fused.onnx")
    fix = (
        "use the versions of onnx and onnxruntime in constraints.txt, or remove onnx-int8 from export.formats"
    )
    try:
        with wrap_exceptions(ExportError, "the model cannot be quantized", fix=fix), suppress_output():
            # Folds each BatchNorm into its convolution.
            quant_pre_process(str(source), str(fused), skip_symbolic_shape=True)
            quantize_static(
                str(fused),
                str(target),
                images,
                # Includes Relu; otherwise negative values, which it removes, would take half of the range.
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=["Conv", "Relu"],
                per_channel=True,
                # Weights have 7 bits: with 8, onnxruntime's sums overflow on x86 CPUs without VNNI.
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                reduce_range=True,
            )
            model = onnx.load(target)
            prefer_matrix_products(model.graph)
            onnx.save(model, target)
            onnx.checker.check_model(str(target), full_check=True)
    finally:
        fused.unlink(missing_ok=True)


def prefer_matrix_products(graph: onnx.GraphProto) -> int:
    """Make onnxruntime compute large int8 convolutions as matrix products; return how many were changed.

    If the zero point of the weights is 0, onnxruntime uses direct convolution with vector instructions.
    Otherwise it uses a matrix product, which takes half the time on a CPU with a matrix unit (AMX). So this
    shifts the weights and their zero point by -1, in place; the outputs stay the same.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer}
    sources = {node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear"}
    convolutions = [node for node in graph.node if node.op_type == "Conv" and node.input[1] in sources]
    # A set of names, because the convolutions of a head share weights between levels.
    stored = {tuple(sources[node.input[1]].input) for node in convolutions}
    shifted = 0
    for weight, _, zero in stored:
        values, zeros = numpy_helper.to_array(constants[weight]), numpy_helper.to_array(constants[zero])
        long, wide = values[0].size >= _MIN_LENGTH, len(values) >= _MIN_WIDTH
        if not (long and wide) or zeros.any() or values.min() == -128:
            continue
        constants[weight].CopyFrom(numpy_helper.from_array(values - np.int8(1), weight))
        constants[zero].CopyFrom(numpy_helper.from_array(zeros - np.int8(1), zero))
        shifted += 1
    return shifted


@contextlib.contextmanager
def suppress_output() -> Iterator[None]:
    """Suppress the messages of exporters and quantizers."""
    levels = {logger: logger.level for logger in (logging.getLogger(), logging.getLogger("torch.onnx"))}
    try:
        for logger in levels:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
