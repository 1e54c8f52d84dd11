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

from trainer.data.decoding import read_sample
from trainer.data.shard_index import ShardDataset
from trainer.data.transforms import letterbox
from trainer.errors import ExportError
from trainer.export.graph import INPUT


def spread(count: int, wanted: int) -> np.ndarray:
    """Indices of at most `wanted` of `count` samples, evenly spread, int64."""
    return np.linspace(0, count - 1, min(count, wanted)).round().astype(np.int64)


class CalibrationImages:
    """Training images one by one, as onnxruntime's calibration asks for them."""

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
    for index in spread(len(dataset), count):
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
                quant_format=QuantFormat.QDQ, op_types_to_quantize=["Conv"], per_channel=True,
                activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
            )  # fmt: skip
        onnx.checker.check_model(str(target), full_check=True)
    except Exception as error:  # onnxruntime has no common error of its own
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise ExportError(
            f"the model cannot be quantised: {reason}",
            fix="use the versions of onnx and onnxruntime in constraints.txt, or leave out onnx-int8",
        ) from error
    finally:
        fused.unlink(missing_ok=True)


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
