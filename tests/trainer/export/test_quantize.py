"""The int8 form: its calibration images and its arithmetic."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from trainer.base.errors import ExportError
from trainer.config.types import NetworkInput
from trainer.data.decoding import read_sample
from trainer.data.shard_index import ShardDataset
from trainer.data.transforms import fit_image
from trainer.export import quantize
from trainer.export.quantize import CalibrationImages

SIZE = 96


@pytest.mark.parametrize(("count", "rows"), [(100, None), (2, [0, -1])])
def test_calibration_images_are_spread_over_the_training_split(shards, count, rows):
    images, train = CalibrationImages(shards, NetworkInput(SIZE), count), ShardDataset(shards, "train")
    inputs = list(iter(images.get_next, None))
    chosen = range(len(train)) if rows is None else [row % len(train) for row in rows]
    assert images.count == len(inputs) == len(chosen)  # All, if there are fewer than asked for.
    for index, item in zip(chosen, inputs, strict=True):
        expected = fit_image(read_sample(train, index)[0], NetworkInput(SIZE))[0]
        assert torch.equal(torch.from_numpy(item["images"]), expected[None])


class _Given:
    """Images to calibrate on."""

    def __init__(self, images):
        self._images = iter(images)

    def get_next(self):
        image = next(self._images, None)
        return None if image is None else {"images": image}


def _network(path):
    """Write a network: two convolutions, then a large one (576 products, 128 channels) on two levels."""
    random = np.random.default_rng(0)
    weights = {
        "first": random.normal(0, 0.2, (64, 3, 3, 3)),
        "narrow": random.normal(0, 0.06, (64, 64, 3, 3)),
        "large": random.normal(0, 0.06, (128, 64, 3, 3)),
    }

    def convolution(given, weight, out):
        return helper.make_node("Conv", [given, weight], [out], pads=[1] * 4, name=out)

    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["images"], ["float"], to=TensorProto.FLOAT),
            convolution("float", "first", "a"),
            helper.make_node("Relu", ["a"], ["b"]),
            convolution("b", "narrow", "c"),
            helper.make_node("Relu", ["c"], ["d"]),
            helper.make_node("MaxPool", ["d"], ["e"], kernel_shape=[2, 2], strides=[2, 2]),
            convolution("d", "large", "fine"),
            convolution("e", "large", "coarse"),
        ],
        "network",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["batch", 3, 16, 16])],
        [
            helper.make_tensor_value_info("fine", TensorProto.FLOAT, ["batch", 128, 16, 16]),
            helper.make_tensor_value_info("coarse", TensorProto.FLOAT, ["batch", 128, 8, 8]),
        ],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)


@pytest.fixture
def networks(tmp_path, monkeypatch):
    """The int8 graph of a network, and the outputs of fp32, int8, and int8 with unmoved weights."""
    images = np.random.default_rng(1).integers(0, 256, (6, 1, 3, 16, 16), dtype=np.uint8)
    _network(tmp_path / "fp32.onnx")
    quantize.quantize(tmp_path / "fp32.onnx", tmp_path / "int8.onnx", _Given(images))
    monkeypatch.setattr(quantize, "prefer_matrix_products", lambda graph: 0)
    quantize.quantize(tmp_path / "fp32.onnx", tmp_path / "plain.onnx", _Given(images))
    outputs = [
        onnxruntime.InferenceSession(str(tmp_path / f"{name}.onnx")).run(None, {"images": images[0]})
        for name in ("fp32", "int8", "plain")
    ]
    return onnx.load(tmp_path / "int8.onnx").graph, outputs


def test_int8_is_near_the_network(networks):
    _, (exact, quantized, _) = networks
    for one, other in zip(exact, quantized, strict=True):
        assert np.abs(one - other).mean() < 0.04 * np.abs(one).mean()


def test_large_convolutions_are_products_of_matrices_and_equal(networks):
    graph, (_, moved, plain) = networks
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    sources = {node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear"}
    zeros, smallest = {}, {}
    for node in graph.node:
        if node.op_type == "Conv":
            weight, _, zero = sources[node.input[1]].input
            zeros[node.name], smallest[node.name] = np.unique(values[zero]).tolist(), values[weight].min()
    # The levels share one weight, which is moved once. Small convolutions are not moved.
    assert zeros == {"a": [0], "c": [0], "fine": [-1], "coarse": [-1]}
    assert smallest["fine"] == smallest["coarse"] < smallest["c"]
    for one, other in zip(moved, plain, strict=True):
        assert np.array_equal(one, other)


def test_a_failed_quantization_leaves_no_file(tmp_path):
    (tmp_path / "fp32.onnx").write_bytes(b"no model")
    with pytest.raises(ExportError, match="the model cannot be quantized") as caught:
        quantize.quantize(tmp_path / "fp32.onnx", tmp_path / "int8.onnx", _Given([]))
    assert "remove onnx-int8" in caught.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["fp32.onnx"]
