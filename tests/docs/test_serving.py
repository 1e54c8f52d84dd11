"""The guide to serving: its commands and its code work, and what it names is there."""

import re
import shlex
from pathlib import Path

import numpy as np
import onnx
import pytest
from bundles import make_bundle
from PIL import Image

from pipelines import cli
from trainer.export import published_models

GUIDE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for version, run in (("v1", "a"), ("v2", "b")):
        artefact = make_bundle(tmp_path / "runs" / run / "model", version=version, name="cards")
        published_models.publish(artefact, str(tmp_path / "data_root"), "cards")
    (tmp_path / "images").mkdir()
    Image.new("RGB", (192, 96), "white").save(tmp_path / "images" / "a.jpg")
    return tmp_path


def test_its_commands_work(folder, capsys):
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines()]
    assert len(commands) >= 8
    for command in commands:
        assert cli.main(shlex.split(command)[1:]) == 0, command
    assert (folder / "serving" / "kserve.yaml").is_file()


def test_its_code_works(folder, capsys):
    _, code = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    exec(compile(code, "docs/serving.md", "exec"), {"__name__": "guide"})
    assert re.match(r"dog <b> 0\.72\d* \[24\. 12\. 96\. 60\.\]", capsys.readouterr().out.strip())


def test_its_plugin_gets_what_its_documentation_wants(folder):
    """Names, types and values: TensorRT's plugin/efficientNMSPlugin/README.md."""
    real = onnx.TensorProto.FLOAT
    helper = onnx.helper
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["images"], ["float"], to=real),
            helper.make_node("Reshape", ["float", "rows"], ["boxes"]),
            helper.make_node("Sigmoid", ["boxes"], ["scores"]),
        ],
        "raw", [helper.make_tensor_value_info("images", onnx.TensorProto.UINT8, ["batch", 3, 96, 96])],
        [helper.make_tensor_value_info(name, real, ["batch", 6912, 4]) for name in ("boxes", "scores")],
        [onnx.numpy_helper.from_array(np.array([0, -1, 4]), "rows")],
    )  # fmt: skip
    onnx.save(helper.make_model(graph), "runs/a/model/model.raw.onnx")
    code, _ = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    exec(compile(code, "docs/serving.md", "exec"), {"__name__": "guide"})
    artefact = onnx.load("model.trt.onnx")
    node = artefact.graph.node[-1]
    assert (node.op_type, node.domain, list(node.input)) == ("EfficientNMS_TRT", "TRT", ["boxes", "scores"])
    attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    assert attributes.pop("plugin_version") == b"1"
    integers = {"background_class": -1, "box_coding": 0, "score_activation": 0, "class_agnostic": 0}
    assert attributes == {
        **integers, "max_output_boxes": 5, "score_threshold": pytest.approx(0.05), "iou_threshold": 0.5,
    }  # fmt: skip
    assert all(isinstance(attributes[name], int) for name in integers)
