"""The raw graph: without GridSample, and the selection of its boxes."""

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torchvision.ops import batched_nms

from trainer.export.formats import OnnxRuntime, to_detections, write_onnx
from trainer.model.architecture import Graph


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
        write_onnx(Sampled(), tmp_path / name, grid_sample=native)
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
def test_attention_of_other_detectors_needs_no_grid_sample(tmp_path):
    module = pytest.importorskip("transformers.models.rf_detr.modeling_rf_detr")
    images = np.random.default_rng(0).integers(0, 256, (3, 3, 8, 8), dtype=np.uint8)
    outputs = []
    for name, native in (("native", True), ("gathered", False)):
        write_onnx(Attention(module), tmp_path / name, grid_sample=native)
        kinds = {node.op_type for node in onnx.load(tmp_path / name).graph.node}
        assert ("GridSample" in kinds) == native
        outputs += OnnxRuntime(tmp_path / name).run(images)
    assert np.abs(outputs[0]).max() > 0.1 and np.abs(outputs[0] - outputs[1]).max() < 1e-5


def test_selection_is_torchvisions_suppression():
    random = torch.Generator().manual_seed(1)
    corners = torch.rand(2, 300, 4, generator=random) * 80
    corners[..., 2:] = corners[..., :2] + 5 + 25 * torch.rand(2, 300, 2, generator=random)
    scores = torch.rand(2, 300, 4, generator=random)
    limits = {"score": 0.2, "nms": 0.4, "detections_per_image": 50}
    found = to_detections(corners, scores, limits)
    for image in range(2):
        rows, labels = torch.nonzero(scores[image] > 0.2, as_tuple=True)
        values = scores[image, rows, labels]
        kept = batched_nms(corners[image, rows].double(), values.double(), labels, 0.4)[:50]
        expected = (corners[image, rows[kept]], values[kept], labels[kept])
        assert all(torch.equal(part[image], theirs) for part, theirs in zip(found, expected, strict=False))
    assert found.num.tolist() == [50, 50]
    best = to_detections(corners, scores, {"score": 0.2, "detections_per_image": 50})
    assert torch.equal(best.scores, scores.flatten(1).sort(dim=1, descending=True).values[:, :50])
    nothing = to_detections(corners, scores * 0, limits)
    assert nothing.num.tolist() == [0, 0] and (nothing.labels == -1).all()
