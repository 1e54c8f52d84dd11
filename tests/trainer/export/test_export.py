"""Export: the shipped file finds what the model finds, or nothing is shipped."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.torch
import torch
from PIL import Image

from trainer import checkpoint
from trainer.data.loader import read_sample
from trainer.data.shard_index import ShardDataset
from trainer.data.transforms import letterbox
from trainer.errors import CheckpointError, ExportError
from trainer.export import export as exporting
from trainer.export import parity
from trainer.export.graph import DeploymentGraph, nms_keep
from trainer.export.preprocess import preprocess
from trainer.loop import train

SIZE = 96


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shards, tiny):
    """A checkpoint of a short training, which says enough to be compared."""
    config = tiny(train__epochs=8, train__validate_every=8, model__score_threshold=0.03)
    return train(config, shards, str(tmp_path_factory.mktemp("trained")))["checkpoint"], config


@pytest.fixture(scope="module")
def exported(trained, shards, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, exporting.export(trained[0], shards, str(folder), trained[1])


def test_the_graph_equals_the_detector(trained, shards):
    detector, _ = checkpoint.load_model(trained[0])
    dataset = ShardDataset(shards, "val")
    images = torch.stack([letterbox(read_sample(dataset, index)[0], SIZE)[0] for index in range(3)])
    with torch.inference_mode():
        boxes, scores, labels, num = DeploymentGraph(detector, SIZE)(images)
    expected = detector.predict(images)
    assert torch.equal(num, expected.num) and int(num.min()) > 5
    assert torch.equal(labels, expected.labels)
    assert torch.allclose(scores, expected.scores, atol=1e-6)
    assert torch.allclose(boxes, expected.boxes, atol=1e-3)


def test_suppression_is_within_a_class():
    boxes = torch.tensor([[[0.0, 0, 10, 10], [0, 0, 10, 10], [0, 0, 10, 9.5], [50, 50, 60, 60]]])
    kept = nms_keep(boxes, torch.tensor([[0.9, 0.8, 0.7, 0.01]]), torch.tensor([[0, 1, 0, 0]]), 2, 0.5, 0.05)
    assert kept.tolist() == [[1.0, 1.0, 0.0, 0.0]]


@pytest.mark.slow
def test_what_is_exported(exported, trained, shards):
    folder, result = exported
    assert sorted(path.name for path in folder.iterdir()) == [
        "model.onnx", "model.safetensors", "model_metadata.json",
    ]  # fmt: skip
    assert result["parity"]["matched"] >= 0.98 and result["parity"]["detections"] > 20
    model = onnx.load(folder / "model.onnx")
    assert {o.version for o in model.opset_import if o.domain == ""} == {18}
    assert not any(tensor.external_data for tensor in model.graph.initializer)
    metadata = json.loads((folder / "model_metadata.json").read_text())
    assert metadata["classes"] == ShardDataset(shards, "val").categories
    assert metadata["input"]["shape"] == ["batch", 3, SIZE, SIZE]
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    detector, _ = checkpoint.load_model(trained[0])
    assert weights.keys() == detector.state_dict().keys()


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
def test_the_file_serves_any_batch_and_refuses_other_shapes(exported, batch):
    session = onnxruntime.InferenceSession(str(exported[0] / "model.onnx"))
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
def test_a_model_that_does_not_match_is_not_shipped(trained, shards, tmp_path, monkeypatch):
    write = exporting.write_onnx

    def damaged(graph, path, opset):
        write(graph, path, opset)
        model = onnx.load(path)
        for tensor in model.graph.initializer:
            if tensor.name.endswith("cls_logits.bias"):
                values = onnx.numpy_helper.to_array(tensor) + 0.5
                tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
        onnx.save(model, path)

    monkeypatch.setattr(exporting, "write_onnx", damaged)
    with pytest.raises(ExportError, match="differs from the trained one"):
        exporting.export(trained[0], shards, str(tmp_path / "model"), trained[1])
    assert not (tmp_path / "model").exists()


def test_partners_are_found_by_label_box_and_score_not_by_rank():
    def detections(rows):
        boxes, scores, labels = zip(*rows, strict=True)
        return parity.Detections(
            torch.tensor([boxes]), torch.tensor([scores]), torch.tensor([labels]), torch.tensor([len(rows)])
        )

    one = ([0.0, 0, 10, 10], 0.9, 1), ([20.0, 20, 40, 40], 0.9, 2)
    comparison = parity._Comparison()
    comparison.add(detections(one), detections(one[::-1]))
    assert comparison.result(1).matched == 1.0
    comparison = parity._Comparison()
    comparison.add(detections(one), detections([one[0], ([20.0, 20, 40, 40], 0.9, 3)]))
    assert comparison.result(1).matched == 0.5
    comparison = parity._Comparison()
    comparison.add(detections(one), detections([one[0], ([20.0, 20, 40, 44], 0.9, 2)]))
    assert comparison.result(1).matched == 0.5


def test_a_checkpoint_of_nothing_is_refused(shards, tiny, tmp_path):
    torch.save({"a": 1}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError):
        exporting.export(str(tmp_path / "x.pt"), shards, str(tmp_path / "model"), tiny())
    assert not (tmp_path / "model").exists()


def test_preprocessing_turns_by_exif_and_keeps_the_scale():
    image = Image.new("RGB", (40, 20), (200, 10, 10))
    exif = image.getexif()
    exif[0x0112] = 6  # Turn by 90 degrees to see it upright.
    image.info["exif"] = exif.tobytes()
    turned = Image.open(_saved(image, exif))
    square, scale = preprocess(turned, SIZE)
    assert scale == pytest.approx(SIZE / 40)
    assert square[0, SIZE - 2, 20] > 150 and square[1, 20, SIZE - 2] == 114
    again, _ = preprocess(np.full((20, 40, 3), 7, np.uint8), SIZE)
    assert again.shape == (3, SIZE, SIZE) and again[0, 0, 0] == 7


def _saved(image, exif):
    import io

    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif, quality=95)
    return io.BytesIO(buffer.getvalue())
