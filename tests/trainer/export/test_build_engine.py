"""The TensorRT engine of a bundle: a graph without GridSample, and a script that refuses bad engines."""

import io
import json
import subprocess
import sys
import zipfile

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.ops import batched_nms

from trainer.export import build_engine, bundle
from trainer.export.formats import OnnxRuntime, write_onnx
from trainer.model.deployment import Graph


class Sampled(Graph):
    """Samples [2, 16] of each color, at points that the image's own values choose: some outside."""

    names, image_size = ("samples",), 5

    def forward(self, images):
        values = images.float()
        grid = F.pad(values.flatten(1), (0, 0))[:, :64].unflatten(1, (2, 16, 2)) / 90 - 1.4
        return (F.grid_sample(values, grid, align_corners=False),)


@pytest.mark.slow
def test_gathered_samples_are_those_of_grid_sample(tmp_path):
    runtimes = []
    for name, native in (("native", True), ("gathered", False)):
        write_onnx(Sampled(), tmp_path / name, 18, grid_sample=native)
        kinds = {node.op_type for node in onnx.load(tmp_path / name).graph.node}
        assert ("GridSample" in kinds) == native and ("Gather" in kinds) == (not native)
        runtimes.append(OnnxRuntime(tmp_path / name))
    images = np.random.default_rng(0).integers(0, 256, (7, 3, 5, 5), dtype=np.uint8)
    images[0] = 36  # At the border, at half a pixel from it, and on the center of a pixel.
    images[1], images[2], images[3] = 0, 255, 126
    (expected,), (found,) = (runtime.run(images) for runtime in runtimes)
    assert expected.shape == (7, 3, 2, 16) and (expected == 0).any() and expected.max() > 100
    assert np.abs(found - expected).max() < 1e-5 * 255
    torch_values = Sampled()(torch.from_numpy(images))[0].numpy()
    assert np.abs(found - torch_values).max() < 1e-5 * 255


class Attention(Graph):
    """Deformable attention of transformers on two levels, with values and points from the image."""

    names, image_size = ("attended",), 8

    def __init__(self, module):
        super().__init__()
        self.stock = module.MultiScaleDeformableAttention()

    def forward(self, images):
        values = images.float().flatten(1) / 255
        shapes, rows = [(6, 4), (2, 4)], values[:, :96].unflatten(1, (32, 1, 3)).expand(-1, -1, 2, -1)
        points = (values[:, :160] * 1.4 - 0.2).unflatten(1, (5, 2, 2, 4, 2))
        weights = values[:, 32:112].unflatten(1, (5, 2, 2, 4))
        return (self.stock(rows, torch.tensor(shapes), shapes, torch.tensor([0, 24]), points, weights, 64),)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["rf_detr", "lw_detr"])
def test_attention_of_other_detectors_needs_no_grid_sample(model, tmp_path):
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    images = np.random.default_rng(0).integers(0, 256, (3, 3, 8, 8), dtype=np.uint8)
    outputs = []
    for name, native in (("native", True), ("gathered", False)):
        write_onnx(Attention(module), tmp_path / name, 18, grid_sample=native)
        kinds = {node.op_type for node in onnx.load(tmp_path / name).graph.node}
        assert ("GridSample" in kinds) == native
        outputs += OnnxRuntime(tmp_path / name).run(images)
    assert np.abs(outputs[0]).max() > 0.1 and np.abs(outputs[0] - outputs[1]).max() < 1e-5


@pytest.mark.parametrize("own_boxes", [False, True], ids=["shared boxes", "a box for each class"])
def test_selection_is_torchvisions_suppression(own_boxes):
    random = np.random.default_rng(1)
    corners = random.uniform(0, 80, (300, 4, 4) if own_boxes else (300, 4)).astype(np.float32)
    corners[..., 2:] = corners[..., :2] + random.uniform(5, 30, corners[..., 2:].shape)
    scores = random.random((300, 4), dtype=np.float32)
    limits = {"score": 0.2, "nms": 0.4, "detections_per_image": 50}
    rows, labels = np.nonzero(scores > 0.2)
    chosen = corners[rows, labels] if own_boxes else corners[rows]
    boxes, values = torch.from_numpy(chosen).double(), torch.from_numpy(scores[rows, labels])
    kept = batched_nms(boxes, values.double(), torch.from_numpy(labels), 0.4)[:50]
    found = build_engine.select(corners, scores, limits)
    for ours, theirs in zip(found, (chosen[kept], scores[rows, labels][kept], labels[kept]), strict=True):
        assert np.array_equal(ours, theirs)
    best = build_engine.select(corners, scores, {"score": 0.2, "detections_per_image": 50})
    assert np.array_equal(best[1], np.sort(scores.ravel())[::-1][:50])


@pytest.fixture
def folder(tmp_path):
    """A bundle of a model that finds 19 of 20 objects, and makes no mistake."""
    (tmp_path / "model").mkdir()
    metadata = {"thresholds": {"score": 0.1, "detections_per_image": 10}, "input": {"input_size": 64}}
    (tmp_path / "model" / "model_metadata.json").write_text(json.dumps(metadata))
    with zipfile.ZipFile(tmp_path / "model" / "check.zip", "w") as file:
        truth = {
            "images": [],
            "annotations": [],
            "categories": [{"id": 0, "name": "a"}, {"id": 1, "name": "b"}],
        }
        for number in range(20):
            picture = io.BytesIO()
            Image.new("RGB", (64, 64), (10 * number,) * 3).save(picture, "JPEG")
            file.writestr(f"{number}.jpg", picture.getvalue())
            truth["images"].append({"id": number, "file_name": f"{number}.jpg", "width": 64, "height": 64})
            box = {"id": number + 1, "image_id": number, "category_id": number % 2, "iscrowd": 0}
            truth["annotations"].append({**box, "bbox": [number, 8, 40, 30], "area": 1200})
        file.writestr("truth.json", json.dumps(truth))
        file.writestr("reference.json", json.dumps({"coco/AP": 0.95}))
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("found", "shift", "ap", "kept"),
    [
        (19, 0, 96 / 101, True),
        (18, 0, 91 / 101, False),
        (20, 0, 1, True),
        (20, 4, 0.3, False),
        (20, np.nan, 0, False),
        (0, 0, 0, False),
    ],
    ids=["the same", "one less", "one more", "shifted", "not a number", "nothing"],
)
def test_an_engine_is_kept_only_if_it_finds_what_the_model_finds(
    folder, found, shift, ap, kept, monkeypatch, capsys
):
    def run(images):
        numbers = np.rint(images.mean(axis=(1, 2, 3)) / 10)
        boxes = np.stack([np.array([n, 8, n + 40, 38]) + shift for n in numbers])[:, None].astype(np.float32)
        chances = (
            np.stack([[n % 2 == 0, n % 2 == 1] for n in numbers])[:, None] * (numbers < found)[:, None, None]
        )
        return boxes, chances.astype(np.float32) + np.float32(0 * shift)

    monkeypatch.setattr(build_engine, "build", lambda graph, fp16, batch, size: (b"plan", run))
    monkeypatch.chdir(folder.parent)
    code = build_engine.main(["--bundle", str(folder), "--batch", "3"])
    output = capsys.readouterr()
    assert (code, sorted(path.name for path in folder.parent.iterdir())) == (
        (0, ["model", "model.engine"]) if kept else (1, ["model"])
    )
    assert ("refused: COCO AP" in output.err) == (not kept)
    assert f"COCO AP {ap:.4f}, model.raw.onnx in onnxruntime 0.9500" in output.out + output.err


@pytest.mark.slow
def test_a_bundle_has_what_checks_an_engine(exported, tmp_path):
    """The reference is of JPEGs: close to that of the export's own check."""
    with zipfile.ZipFile(exported / "check.zip") as file:
        reference, truth = (json.loads(file.read(name)) for name in ("reference.json", "truth.json"))
    metadata = bundle.load(str(exported)).metadata
    check = metadata.record["formats"]["raw"]["check"]
    assert len(truth["images"]) == check["images"] and truth["annotations"]
    assert reference["coco/AP"] == pytest.approx(check["ap"], abs=0.01)
    runtime = OnnxRuntime(exported / "model.raw.onnx")
    again = build_engine.score(exported / "check.zip", runtime.run, metadata.thresholds, batch=3)
    assert again == pytest.approx(reference["coco/AP"], abs=1e-6)
    # Alone, without kubedet and without TensorRT.
    script = [sys.executable, "-I", str(exported / "build_engine.py"), "--max-loss", "0.001"]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "pip install tensorrt" in done.stderr
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())
