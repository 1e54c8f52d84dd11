"""Static quantisation to int8: convolutions alone, weights by channel, calibrated on training images.

Convolutions are nearly all of the arithmetic; quantised box decoding and scores cost far more
precision than they save time.
"""

import contextlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from trainer.base.errors import ExportError, first_line
from trainer.data.decoding import read_sample
from trainer.data.shard_index import ShardDataset
from trainer.data.transforms import letterbox
from trainer.model.deployment import INPUT

_LONG, _WIDE = 512, 128
"""Products per output and output channels from which a convolution is faster as a matrix product."""


def evenly_spread(count: int, limit: int) -> np.ndarray:
    """Indices of at most `wanted` of `count` samples, evenly evenly_spread, int64."""
    return np.linspace(0, count - 1, min(count, limit)).round().astype(np.int64)


class CalibrationImages:
    """Training images one by one, through the interface of onnxruntime's calibration."""

    def __init__(self, shards_uri: str, image_size: int, count: int) -> None:
        """Choose images evenly over the training split.

        Args:
            shards_uri: shards of the training.
            image_size: side of the input square.
            count: how many at most.
        """
        dataset = ShardDataset(shards_uri, "train")
        self.count = min(count, len(dataset))
        self._images = _squares(dataset, image_size, count)

    def get_next(self) -> dict[str, np.ndarray] | None:
        """Return the next input, or None after the last."""
        image = next(self._images, None)
        return None if image is None else {INPUT: image[None]}


def _squares(dataset: ShardDataset, image_size: int, count: int) -> Iterator[np.ndarray]:
    for index in evenly_spread(len(dataset), count):
        yield letterbox(read_sample(dataset, int(index))[0], image_size)[0].numpy()


def quantize(source: Path, target: Path, images: CalibrationImages) -> None:
    """Write the int8 form of an ONNX file, as pairs of QuantizeLinear and DequantizeLinear.

    Args:
        source: the fp32 file.
        target: the file to write.
        images: what activations are calibrated on.

    Raises:
        ExportError: onnxruntime cannot quantise it.
    """
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    fused = target.with_suffix(".fused.onnx")
    try:
        with _quiet():
            # Folds each BatchNorm into its convolution, which otherwise would be quantised without it.
            quant_pre_process(str(source), str(fused), skip_symbolic_shape=True)
            quantize_static(
                str(fused), str(target), images,
                # A Relu behind a convolution becomes the lower end of its output's range: without this
                # the values it cuts away would take half of the range, and be converted twice.
                quant_format=QuantFormat.QDQ, op_types_to_quantize=["Conv", "Relu"], per_channel=True,
                # Weights of 7 bits: with 8, onnxruntime's sums overflow on x86 CPUs without VNNI.
                activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, reduce_range=True,
            )  # fmt: skip
        model = onnx.load(target)
        as_matrices(model.graph)
        onnx.save(model, target)
        onnx.checker.check_model(str(target), full_check=True)
    except Exception as error:  # onnxruntime has no common error of its own
        reason = first_line(error)
        raise ExportError(
            f"the model cannot be quantised: {reason}",
            fix="use the versions of onnx and onnxruntime in constraints.txt, or leave out onnx-int8",
        ) from error
    finally:
        fused.unlink(missing_ok=True)


def as_matrices(graph: onnx.GraphProto) -> int:
    """Let onnxruntime compute large int8 convolutions as matrix products; the function stays the same.

    For weights whose zero point is 0 it uses direct convolution kernels with a CPU's vector
    instructions; for all others a matrix product, which uses the matrix unit of a CPU that has one (AMX)
    and takes half the time there. So the weights and their zero point are shifted by -1.

    Args:
        graph: with pairs of QuantizeLinear and DequantizeLinear; changed in place.

    Returns:
        How many weights were shifted.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer}
    sources = {node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear"}
    convolutions = [node for node in graph.node if node.op_type == "Conv" and node.input[1] in sources]
    # By name: the heads' convolutions share their weights between the levels.
    stored = {tuple(sources[node.input[1]].input) for node in convolutions}
    shifted = 0
    for weight, _, zero in stored:
        values, zeros = numpy_helper.to_array(constants[weight]), numpy_helper.to_array(constants[zero])
        long, wide = values[0].size >= _LONG, len(values) >= _WIDE
        if not (long and wide) or zeros.any() or values.min() == -128:
            continue
        constants[weight].CopyFrom(numpy_helper.from_array(values - np.int8(1), weight))
        constants[zero].CopyFrom(numpy_helper.from_array(zeros - np.int8(1), zero))
        shifted += 1
    return shifted


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep onnxruntime's advice about preprocessing, which is done here, off the terminal."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        root.setLevel(level)
