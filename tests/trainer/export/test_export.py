"""Export: every format detects what the model detects, or nothing is published."""

import json
from dataclasses import asdict

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.torch
import torch
from bundles import make_bundle

from trainer.__main__ import main
from trainer.base.errors import ExportError
from trainer.config.parsing import to_json
from trainer.data.shard_index import ShardDataset
from trainer.export import bundle, formats
from trainer.export import export as exporting
from trainer.model import boxes as box_ops
from trainer.training import checkpoint

SIZE = 96


@pytest.mark.slow
def test_each_format_finds_what_the_model_finds(exported, trained, shards):
    opened = bundle.load(str(exported))
    opened.verify_checksums()
    assert set(opened.checksums) == {
        "model.onnx",
        "model.int8.onnx",
        "model.raw.onnx",
        "model.safetensors",
        "model_metadata.json",
        "MODEL_CARD.md",
    }
    for name, form in asdict(opened.metadata)["formats"].items():
        check = form["check"]
        assert check["images"] == 4 and check["matches"]["detections"] > 20
        # Four images are too few to judge int8.
        if name == "onnx-int8":
            assert check["matches"]["matched"] > 0.5
        else:
            assert check["matches"]["matched"] >= 0.98 and abs(check["ap_change"]) <= 0.001
    metadata = asdict(opened.metadata)
    assert metadata["classes"] == ShardDataset(shards, "val").categories
    assert metadata["input"]["shape"] == ["batch", 3, SIZE, SIZE] and metadata["outputs"]["rows"] == 100
    weights = safetensors.torch.load_file(exported / "model.safetensors")
    detector, _ = checkpoint.load_model(trained)
    assert weights.keys() == detector.state_dict().keys()
    # Normalization is folded into the convolutions.
    graph = onnx.load(exported / "model.onnx").graph
    assert not [node for node in graph.node if node.op_type == "BatchNormalization"]
    card = (exported / "MODEL_CARD.md").read_text()
    assert "| 0 | circle |" in card and "onnx-int8" in card


@pytest.mark.slow
def test_an_export_of_the_same_inputs_is_reused(exported, trained, shards, tiny, tmp_path, monkeypatch):
    target, written = str(tmp_path / "model"), []
    real = exporting.verify_exports
    kept = (exported / "model.onnx").read_bytes()
    monkeypatch.setattr(formats, "write_onnx", lambda graph, path: path.write_bytes(kept))

    def counted(*inputs):
        written.append(inputs)
        return real(*inputs)

    monkeypatch.setattr(exporting, "verify_exports", counted)
    first = exporting.export(trained, shards, target, tiny())
    assert exporting.export(trained, shards, target, tiny()) == first and len(written) == 1
    # Other settings or a damaged file: it is exported again.
    exporting.export(trained, shards, target, tiny(export__check_images=3))
    (tmp_path / "model" / "model.onnx").write_bytes(b"damaged")
    repaired = exporting.export(trained, shards, target, tiny(export__check_images=3))
    assert len(written) == 3
    bundle.load(target).verify_checksums()
    assert repaired["files"] == first["files"]


@pytest.mark.slow
def test_onnx_and_int8_files(exported):
    model = onnx.load(exported / "model.onnx")
    assert {o.version for o in model.opset_import if o.domain == ""} == {18}
    assert not any(tensor.external_data for tensor in model.graph.initializer)
    quantized = onnx.load(exported / "model.int8.onnx").graph
    values = {tensor.name: tensor for tensor in quantized.initializer}
    sources = {node.output[0]: node for node in quantized.node if node.op_type == "DequantizeLinear"}
    convolutions = [node for node in quantized.node if node.op_type == "Conv"]
    assert all(name in sources for node in convolutions for name in node.input[:2])
    weighted = set()
    for weight, scale in (sources[node.input[1]].input[:2] for node in convolutions):
        assert list(values[scale].dims) == [values[weight].dims[0]]  # A scale for each output channel.
        weighted.add(weight)
    assert len(convolutions) > len(weighted) > 20  # The heads share their weights between five levels.
    # Nothing else is quantized, and no range is computed at run time.
    assert weighted == {
        name
        for name, item in values.items()
        if item.data_type == onnx.TensorProto.INT8 and len(item.dims) == 4
    }
    kinds = {node.op_type for node in quantized.node}
    assert not kinds & {"DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "QLinearMatMul"}


# Operators from onnx-tensorrt's docs/operators.md that a detector's graph may need.
TENSORRT_TAKES = {
    "Add", "Cast", "Clip", "Concat", "Constant", "Conv", "Div", "Exp", "Expand", "Gather", "Identity",
    "InstanceNormalization", "MaxPool", "Mul", "Relu", "Reshape", "Resize", "Shape", "Sigmoid", "Slice",
    "Squeeze", "Sub", "Transpose", "Unsqueeze",
}  # fmt: skip


@pytest.mark.slow
def test_tensorrt_supports_the_raw_graph(exported):
    graph = onnx.load(exported / "model.raw.onnx").graph
    assert {node.op_type for node in graph.node} <= TENSORRT_TAKES
    assert {node.domain for node in graph.node} <= {"", "ai.onnx"}
    # TensorRT supports uint8 only for inputs that are cast at once.
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
    session = onnxruntime.InferenceSession(str(exported / "model.raw.onnx"))
    boxes, scores = session.run(None, {"images": images})
    with torch.inference_mode():
        features = detector.features(detector.normalize(torch.from_numpy(images)))
        logits, offsets = detector.outputs(features)
        logits = torch.cat([level.permute(0, 3, 1, 2).flatten(1, 2) for level in logits], dim=1)
        anchors = detector.anchors([level.shape[-2:] for level in features], SIZE)
    # For every anchor and class, without threshold and limit: the plugin applies those.
    assert np.abs(scores - torch.sigmoid(logits).numpy()).max() < 1e-4
    expected = box_ops.decode(offsets, torch.cat(anchors)).clamp(0, SIZE)
    assert np.abs(boxes - expected.numpy()).max() < 0.01
    assert (boxes[..., 2:] >= boxes[..., :2]).all() and boxes.min() >= 0 and boxes.max() <= SIZE


def test_metadata_and_card_of_a_bundle(saved, shards, tiny, tmp_path, monkeypatch):
    make_bundle(tmp_path / "small")
    monkeypatch.setattr(
        formats,
        "write_onnx",
        lambda graph, path: path.write_bytes((tmp_path / "small" / "model.onnx").read_bytes()),
    )
    (tmp_path / "evaluation").mkdir()
    scored = {
        "split": "test", "images": 4, "metrics": {"coco/AP": 0.25}, "thresholds": {"star": 0.41},
        "per_class": {"star": {"AP": 0.3, "AP50": 0.5, "AP75": 0.2, "boxes": 7}},
        "verdict": {"passed": True, "reason": "coco/AP 0.250 >= 0.1: passed"},
    }  # fmt: skip
    written = tmp_path / "evaluation" / "metrics.json"
    written.write_text(json.dumps(scored | {"sha256": "another model's"}))
    config = tiny(export__min_match=0.0, export__max_ap_change=1.0, export__name="pets")
    inputs, target, scores = saved(), str(tmp_path / "model"), str(tmp_path / "evaluation")
    with pytest.raises(ExportError, match=str(written)):
        exporting.export(inputs, shards, target, config, evaluation_uri=scores)
    written.write_text(json.dumps(scored | {"sha256": checkpoint.read_digest(inputs)}))
    result = exporting.export(inputs, shards, target, config, evaluation_uri=scores)
    metadata = asdict(bundle.load(str(tmp_path / "model")).metadata)
    assert metadata["metrics"] == {
        "split": "test",
        "images": 4,
        "values": {"coco/AP": 0.25},
        "evaluation": str(tmp_path / "evaluation"),
        "gate": "coco/AP 0.250 >= 0.1: passed",
        "per_class": {"star": {"AP": 0.3, "AP50": 0.5, "boxes": 7, "threshold": 0.41}},
    }
    assert metadata["trained_on"]["splits"]["train"]["images"] == 24
    assert metadata["trained_on"]["source"] == "sample:images=24,seed=3,size=96"
    card = (tmp_path / "model" / "MODEL_CARD.md").read_text()
    assert "- coco/AP 0.250 >= 0.1: passed" in card and "| 3 | star | 4 | 7 | 0.300 | 0.500 | 0.410 |" in card
    assert "| 0 | circle | 1 | 0 | - | - | - |" in card and "train 24 images with" in card
    assert metadata["name"] == "pets" and metadata["model_version"] == result["model_version"]
    again = exporting.export(inputs, shards, target, config)
    assert again["model_version"] == result["model_version"]  # The same files are the same version.


@pytest.fixture
def export(saved, shards, tiny, tmp_path, capsys):
    """Runs the command; returns exit code and stderr."""
    (tmp_path / "config.json").write_text(to_json(tiny()))

    def run(*words, checkpoint="", target="model", **changes):
        arguments = ["--checkpoint", checkpoint or saved(**changes), "--shards", shards]
        arguments += ["--output", str(tmp_path / target), "--config", str(tmp_path / "config.json")]
        code = main(["export", *arguments, *words])
        return code, capsys.readouterr().err

    return run


def _nothing_is_left(folder):
    return not folder.exists() or not list(folder.iterdir())


def test_classes_that_differ(export, tmp_path):
    code, said = export(categories=[{"id": label, "name": f"thing{label}"} for label in range(5)])
    assert code == 1 and "differ from those of the shards" in said and "10 differ: circle, ring" in said
    assert "Traceback" not in said and _nothing_is_left(tmp_path / "model")


def test_a_format_that_is_not_supported(export, tmp_path):
    code, said = export("--set", 'export.formats=["onnx", "tflite"]')
    assert code == 2 and "export.formats.1" in said and "tflite" in said and "onnx-int8" in said
    assert not (tmp_path / "model").exists()


def test_a_target_that_cannot_be_written(export, tmp_path):
    (tmp_path / "file").write_text("")
    code, said = export(target="file/model")
    assert code == 2 and "file/model" in said and "cannot write" in said and "Traceback" not in said


def test_a_key_that_cannot_sign(export, tmp_path, monkeypatch):
    pytest.importorskip("model_signing")
    (tmp_path / "key.pem").write_text("no key")
    monkeypatch.setenv("KUBEDET_SIGNING_KEY", str(tmp_path / "key.pem"))
    code, said = export(checkpoint="not read")
    assert code == 1 and "cannot be used to sign" in said and "key.pem" in said and "openssl" in said


def test_a_file_with_other_detections_is_not_published(export, tmp_path, monkeypatch):
    other = (tmp_path / "small", make_bundle(tmp_path / "small"))[0] / "model.onnx"
    monkeypatch.setattr(formats, "write_onnx", lambda graph, path: path.write_bytes(other.read_bytes()))
    code, said = export()
    assert code == 1 and "the exported model (onnx) differs from the trained one on 4 images" in said
    assert "nothing was published" in said and _nothing_is_left(tmp_path / "model")
