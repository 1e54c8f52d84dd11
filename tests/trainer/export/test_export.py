"""Export: every format finds what the model finds, or nothing is shipped."""

import importlib.util
import json
import os
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.torch
import torch
from bundles import make_bundle

from trainer.base.errors import CheckpointError, ConfigError, ExportError, StorageError
from trainer.data.shard_index import ShardDataset
from trainer.export import bundle, formats
from trainer.export import export as exporting
from trainer.model import boxes as box_ops
from trainer.model.architecture import build
from trainer.model.architectures.retinanet.retinanet import DeploymentGraph
from trainer.training import checkpoint
from trainer.training.loop import train

SIZE = 96


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shards, tiny):
    """A checkpoint of a short training, which says enough to be compared."""
    config = tiny(train__epochs=8, train__validate_every=8, model__score_threshold=0.03)
    return train(config, shards, str(tmp_path_factory.mktemp("trained")))["checkpoint"]


@pytest.fixture(scope="module")
def exported(trained, shards, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    everywhere = ["onnx", "onnx-int8", "torch-export", "raw"]
    optional = ["openvino"] if importlib.util.find_spec("openvino") else []
    config = tiny(export__formats=everywhere + optional, export__max_ap_change_int8=1.0)
    return folder, exporting.export(trained, shards, str(folder), config)


@pytest.mark.slow
def test_what_is_exported(exported, trained, shards):
    folder, result = exported
    opened = bundle.load(str(folder))
    opened.check()
    assert set(opened.checksums) - {"model.xml", "model.bin"} == {
        "model.onnx", "model.int8.onnx", "model.raw.onnx", "model.pt2", "model.safetensors",
        "model_metadata.json", "MODEL_CARD.md", "sbom.cdx.json",
    }  # fmt: skip
    for name, check in result["formats"].items():
        assert check["images"] == 4 and check["matches"]["detections"] > 20
        # The four images of these tests say little of eight bits.
        if name == "onnx-int8":
            assert check["matches"]["matched"] > 0.5
        else:
            assert check["matches"]["matched"] >= 0.98 and abs(check["ap_change"]) <= 0.001
    metadata = opened.metadata
    assert metadata["classes"] == ShardDataset(shards, "val").categories
    assert metadata["input"]["shape"] == ["batch", 3, SIZE, SIZE] and metadata["outputs"]["rows"] == 100
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    detector, _ = checkpoint.load_model(trained)
    assert weights.keys() == detector.state_dict().keys()
    # Its normalisation is in the convolutions.
    program = torch.export.load(folder / "model.pt2")
    assert not [node for node in program.graph.nodes if "batch_norm" in str(node.target)]
    card = (folder / "MODEL_CARD.md").read_text()
    assert "| 0 | circle |" in card and "onnx-int8" in card


@pytest.mark.slow
def test_what_is_there_is_neither_made_nor_checked_again(trained, shards, tiny, tmp_path, monkeypatch):
    target, written = str(tmp_path / "model"), []
    real = exporting.verify

    def counted(*inputs):
        written.append(inputs)
        return real(*inputs)

    monkeypatch.setattr(exporting, "verify", counted)
    first = exporting.export(trained, shards, target, tiny())
    assert exporting.export(trained, shards, target, tiny()) == first and len(written) == 1
    # Other settings, and a file that was damaged since: it is made anew.
    kept = (tmp_path / "model" / "model.onnx").read_bytes()
    with monkeypatch.context() as spared:  # Once anew is enough of the exporter, which takes its time.
        spared.setattr(formats, "write_onnx", lambda graph, path, opset: path.write_bytes(kept))
        exporting.export(trained, shards, target, tiny(export__check_images=3))
    (tmp_path / "model" / "model.onnx").write_bytes(b"damaged")
    mended = exporting.export(trained, shards, target, tiny(export__check_images=3))
    assert len(written) == 3
    bundle.load(target).check()
    assert mended["files"] == first["files"]


@pytest.mark.slow
def test_the_files_are_what_they_should_be(exported):
    folder, _ = exported
    model = onnx.load(folder / "model.onnx")
    assert {o.version for o in model.opset_import if o.domain == ""} == {18}
    assert not any(tensor.external_data for tensor in model.graph.initializer)
    quantised = onnx.load(folder / "model.int8.onnx").graph
    scales = {node.input[0] for node in quantised.node if node.op_type == "DequantizeLinear"}
    weights = [tensor for tensor in quantised.initializer if tensor.name in scales and len(tensor.dims) == 4]
    convolutions = [node for node in quantised.node if node.op_type == "Conv"]
    assert len(convolutions) > len(weights) > 20  # The heads' are those of five levels.
    assert all(tensor.data_type == onnx.TensorProto.INT8 for tensor in weights)
    producers = {output: node for node in quantised.node for output in node.output}
    for node in convolutions:  # Each input comes from a DequantizeLinear, by channel for the weights.
        inputs = [producers[name] for name in node.input[:2]]
        assert [one.op_type for one in inputs] == ["DequantizeLinear"] * 2
        assert [a.i for a in inputs[1].attribute if a.name == "axis"] == [0]
    # By channel: a scale for each output. And of the convolutions alone: no other weight has eight bits.
    values = {tensor.name: tensor for tensor in quantised.initializer}
    for node in (producers[node.input[1]] for node in convolutions):
        assert list(values[node.input[1]].dims) == [values[node.input[0]].dims[0]]
    eight = {name for name, tensor in values.items() if tensor.data_type == onnx.TensorProto.INT8}
    read = {name: node for node in quantised.node for name in node.input if name in eight}
    weighted = {producers[node.input[1]].name for node in convolutions}
    assert {node.name for node in read.values() if len(values[node.input[0]].dims) == 4} == weighted
    # Static: no range is found while it runs, and nothing computes in integers but what is asked to.
    kinds = {node.op_type for node in quantised.node}
    assert not kinds & {"DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "QLinearMatMul"}
    assert {"Mul", "Sigmoid"} <= kinds


# Of those that onnx-tensorrt's docs/operators.md lists, what a detector's graph may need.
TENSORRT_TAKES = {
    "Add", "Cast", "Clip", "Concat", "Constant", "Conv", "Div", "Exp", "Expand", "Gather", "Identity",
    "InstanceNormalization", "MaxPool", "Mul", "Relu", "Reshape", "Resize", "Shape", "Sigmoid", "Slice",
    "Squeeze", "Sub", "Transpose", "Unsqueeze",
}  # fmt: skip


@pytest.mark.slow
def test_the_raw_graph_is_one_that_tensorrt_takes(exported):
    graph = onnx.load(exported[0] / "model.raw.onnx").graph
    assert {node.op_type for node in graph.node} <= TENSORRT_TAKES
    assert {node.domain for node in graph.node} <= {"", "ai.onnx"}
    # TensorRT has uint8 for inputs alone, to be cast at once.
    (image,) = graph.input
    assert {node.op_type for node in graph.node if image.name in node.input} <= {"Cast", "Shape"}
    shapes = {
        item.name: [side.dim_param or side.dim_value for side in item.type.tensor_type.shape.dim]
        for item in graph.output
    }
    anchors = 9 * sum(side * side for side in (12, 6, 3, 2, 1))
    assert shapes == {"boxes": ["batch", anchors, 4], "scores": ["batch", anchors, 5]}


@pytest.mark.slow
def test_the_raw_graphs_outputs_are_the_models_boxes_and_scores(exported, trained):
    detector, _ = checkpoint.load_model(trained)
    images = np.random.default_rng(0).integers(0, 256, (2, 3, SIZE, SIZE), dtype=np.uint8)
    session = onnxruntime.InferenceSession(str(exported[0] / "model.raw.onnx"))
    boxes, scores = session.run(None, {"images": images})
    with torch.inference_mode():
        logits, offsets, shapes = detector.outputs(detector.normalize(torch.from_numpy(images)))
        anchors = torch.cat(detector.anchors(shapes, (SIZE, SIZE)))
    # For every anchor and class, no threshold and no limit: the plugin applies those.
    assert np.abs(scores - torch.sigmoid(torch.cat(logits, dim=1)).numpy()).max() < 1e-4
    expected = box_ops.decode(torch.cat(offsets, dim=1), anchors).clamp(0, SIZE)
    assert np.abs(boxes - expected.numpy()).max() < 0.01
    assert (boxes[..., 2:] >= boxes[..., :2]).all() and boxes.min() >= 0 and boxes.max() <= SIZE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.onnx", "model.int8.onnx"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_file_serves_any_batch_and_refuses_other_shapes(exported, name, batch):
    session = onnxruntime.InferenceSession(str(exported[0] / name))
    images = np.random.default_rng(0).integers(0, 256, (batch, 3, SIZE, SIZE), dtype=np.uint8)
    boxes, scores, labels, num = session.run(None, {"images": images})
    assert boxes.shape == (batch, 100, 4) and scores.shape == labels.shape == (batch, 100)
    for row in range(batch):
        assert (scores[row, num[row] :] == 0).all() and (labels[row, num[row] :] == -1).all()
        assert (np.diff(scores[row]) <= 0).all()
    for wrong in (images[:, :, :64], images.astype(np.float32), images[0]):
        with pytest.raises(Exception, match=r"(?i)invalid|unexpected"):
            session.run(None, {"images": wrong})


@pytest.mark.slow
def test_a_model_that_does_not_match_is_not_shipped(exported, trained, shards, tiny, tmp_path, monkeypatch):
    def damaged(graph, path, opset):
        model = onnx.load(exported[0] / "model.onnx")
        for tensor in model.graph.initializer:
            if tensor.name.endswith("cls_logits.bias"):
                values = onnx.numpy_helper.to_array(tensor) + 0.5
                tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
        onnx.save(model, path)

    monkeypatch.setattr(formats, "write_onnx", damaged)
    with pytest.raises(ExportError, match="differs from the trained one on 4 images"):
        exporting.export(trained, shards, str(tmp_path / "model"), tiny())
    assert not list((tmp_path / "model").iterdir())


def test_a_checkpoint_of_nothing_is_refused(shards, tiny, tmp_path):
    torch.save({"a": 1}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError):
        exporting.export(str(tmp_path / "x.pt"), shards, str(tmp_path / "model"), tiny())


def test_a_checkpoint_of_another_architecture_is_refused(untrained, shards, tiny, tmp_path):
    other = build(tiny(model__version="v1").model, 5).state_dict()
    with pytest.raises(CheckpointError, match=r"best\.pt do not fit its own configuration"):
        exporting.export(untrained(model=other), shards, str(tmp_path / "model"), tiny())


def test_other_classes_are_refused(untrained, shards, tiny, tmp_path):
    renamed = [{"id": label, "name": f"thing{label}"} for label in range(5)]
    with pytest.raises(ExportError, match="10 differ: circle, ring"):
        exporting.export(untrained(categories=renamed), shards, str(tmp_path / "model"), tiny())


def test_an_unknown_format_is_refused(tiny):
    with pytest.raises(ConfigError, match=r"export\.formats\.0.*tflite"):
        tiny(export__formats=["tflite"])
    with pytest.raises(ExportError, match="unknown format tflite"):
        formats.check_formats(["onnx", "tflite"])


def test_a_read_only_target_is_refused_before_any_work(shards, tiny, tmp_path):
    (tmp_path / "model").write_text("a file, not a folder")  # Refuses root as well.
    with pytest.raises(StorageError, match="model"):
        exporting.export("no such checkpoint", shards, str(tmp_path / "model"), tiny())
    if os.getuid():
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(StorageError, match="cannot write"):
            exporting.export("no such checkpoint", shards, str(tmp_path / "locked"), tiny())


def test_a_missing_package_is_said_before_any_work(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    config = tiny(export__formats=["openvino"])
    with pytest.raises(ExportError, match="needs the package openvino"):
        exporting.export("no such checkpoint", "no shards", str(tmp_path / "model"), config)


def test_the_whole_way_around_a_bundle(untrained, shards, tiny, tmp_path, monkeypatch):
    """With a file written beforehand in the place of the exporter, which takes many seconds."""
    make_bundle(tmp_path / "small")
    monkeypatch.setattr(
        formats, "write_onnx", lambda graph, path, opset: path.write_bytes(
            (tmp_path / "small" / "model.onnx").read_bytes()
        ),
    )  # fmt: skip
    (tmp_path / "evaluation").mkdir()
    scored = {
        "split": "test", "images": 4, "metrics": {"coco/AP": 0.25}, "thresholds": {"star": 0.41},
        "per_class": {"star": {"AP": 0.3, "AP50": 0.5, "AP75": 0.2, "boxes": 7}},
        "verdict": {"passed": True, "reason": "coco/AP 0.250 >= 0.1: passed"},
    }  # fmt: skip
    (tmp_path / "evaluation" / "metrics.json").write_text(json.dumps(scored))
    config = tiny(export__min_match=0.0, export__max_ap_change=1.0, export__name="pets")
    inputs, target, scores = untrained(), str(tmp_path / "model"), str(tmp_path / "evaluation")
    result = exporting.export(inputs, shards, target, config, evaluation_uri=scores)
    metadata = bundle.load(str(tmp_path / "model")).metadata
    assert metadata["metrics"] == {
        "split": "test", "images": 4, "values": {"coco/AP": 0.25}, "evaluation": str(tmp_path / "evaluation"),
        "gate": "coco/AP 0.250 >= 0.1: passed",
        "per_class": {"star": {"AP": 0.3, "AP50": 0.5, "boxes": 7, "threshold": 0.41}},
    }  # fmt: skip
    assert metadata["trained_on"]["splits"]["train"]["images"] == 24
    assert metadata["trained_on"]["source"] == "sample:images=24,seed=3,size=96"
    card = (tmp_path / "model" / "MODEL_CARD.md").read_text()
    assert "- coco/AP 0.250 >= 0.1: passed" in card and "| 3 | star | 4 | 7 | 0.300 | 0.500 | 0.410 |" in card
    assert "| 0 | circle | 1 | 0 | - | - | - |" in card and "train 24 images with" in card
    assert metadata["name"] == "pets" and metadata["model_version"] == result["model_version"]
    again = exporting.export(inputs, shards, target, config)
    assert again["model_version"] == result["model_version"]  # The same files are the same version.


def test_the_graph_has_no_unused_class(tiny):
    detector = build(tiny(model__background_class=True).model, 5).eval()
    graph = DeploymentGraph(detector, SIZE)
    assert detector.head.classification_head.cls_logits.out_channels == 54
    assert graph.cls_logits.out_channels == 45
