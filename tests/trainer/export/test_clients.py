"""Triton's own client and its own schema, as a check of what is ours: tests of choice, where it is installed.

pip install 'tritonclient[http]'
"""

import numpy as np
import pytest

from trainer.export import bundle, server_layouts

http = pytest.importorskip("tritonclient.http")

SIZE = 96


@pytest.fixture
def client(address):
    """A client of a running server of the small model."""
    with http.InferenceServerClient("{}:{}".format(*address)) as it:
        yield it


def test_health_and_metadata(client):
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("pets") and client.is_model_ready("pets", "v1")
    assert not client.is_model_ready("dogs")
    assert client.get_server_metadata()["name"] == "kubedet"
    model = client.get_model_metadata("pets", "v1")
    assert model["inputs"] == [{"name": "images", "datatype": "UINT8", "shape": [-1, 3, SIZE, SIZE]}]


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("names", [None, ["num", "scores"]])
def test_inference(client, binary, names):
    images = np.stack([np.zeros((3, SIZE, SIZE), np.uint8), np.full((3, SIZE, SIZE), 51, np.uint8)])
    infer_input = http.InferInput("images", [2, 3, SIZE, SIZE], "UINT8")
    infer_input.set_data_from_numpy(images, binary_data=binary)
    outputs = names and [http.InferRequestedOutput(name, binary_data=binary) for name in names]
    answer = client.infer("pets", [infer_input], outputs=outputs, request_id="a7")
    assert answer.get_response()["id"] == "a7"
    scores = answer.as_numpy("scores")
    assert scores.dtype == np.float32 and scores.shape == (2, 5)
    assert scores[:, 0] == pytest.approx([0, 0.2]) and answer.as_numpy("num").tolist() == [1, 1]
    if names:
        assert answer.as_numpy("boxes") is None
    else:
        assert answer.as_numpy("boxes")[1, 0].tolist() == [12, 6, 48, 30]
        assert answer.as_numpy("labels").dtype == np.int64


def test_a_refusal_is_told(client):
    infer_input = http.InferInput("images", [1, 3, 8, 8], "UINT8")
    infer_input.set_data_from_numpy(np.zeros((1, 3, 8, 8), np.uint8))
    with pytest.raises(Exception, match=r"must have the shape \[1\.\.64, 3, 96, 96\]"):
        client.infer("pets", [infer_input])


@pytest.mark.parametrize("kind", ["onnx", "openvino"])
def test_triton_reads_the_configuration(bundle_uri, kind):
    schema = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    from google.protobuf import text_format

    text = server_layouts.triton_config(bundle.load(bundle_uri).metadata, kind, 4)
    config = text_format.Parse(text, schema.ModelConfig())
    assert config.name == "pets" and config.max_batch_size == 4 and config.HasField("dynamic_batching")
    assert (config.platform, config.backend) == (("onnxruntime_onnx", ""), ("", "openvino"))[kind != "onnx"]
    (image,) = config.input
    assert image.data_type == schema.TYPE_UINT8 and list(image.dims) == [3, SIZE, SIZE]
    outputs = {item.name: item for item in config.output}
    assert {name: list(item.dims) for name, item in outputs.items()} == {
        "boxes": [5, 4], "scores": [5], "labels": [5], "num": [1],
    }  # fmt: skip
    assert outputs["labels"].label_filename == "labels.txt" and outputs["num"].HasField("reshape")
