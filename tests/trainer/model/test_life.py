"""Detectors in our loop: resumed bit for bit, on any number of processes, evaluated and exported."""

import dataclasses
import importlib.util

import numpy as np
import onnx
import pytest
import torch
from finished_runs import losses
from life import live
from two_processes import LIKE_PASSES, assert_two_equal_one

from trainer.export.formats import OnnxRuntime
from trainer.export.verify import EXACT, DetectionComparison
from trainer.model import recipes
from trainer.model.architecture import Detections
from trainer.training.loop import train

pytestmark = pytest.mark.slow

_PYRAMID = {
    "model.backbone": "resnet18",
    "model.backbone_width": 16,
    "model.fpn_channels": 16,
    "model.head_depth": 1,
}
_DETR = {"model.width": 0.25, "model.queries": 20, "model.denoising": 10, "model.score_threshold": 0.0}
_GROUPS = {"model.width": 0.25, "model.queries": 20, "model.groups": 2, "model.score_threshold": 0.0}
NARROW = {
    "dfine": _DETR | {"model.size": "n"},
    "rtdetr": _DETR | {"model.size": "r18"},
    "deimv2": _DETR | {"model.size": "n"},
    "rfdetr_finetune": _GROUPS,
    "rfdetr_m": _GROUPS,
    "deimv2_s": _DETR,
}  # fmt: skip
"""By architecture or recipe. RetinaNet's life is in the tests of training, evaluation and export."""


@pytest.fixture
def narrow(tiny):
    """A tiny training of a narrow detector."""

    def config(architecture, **overrides):
        if "model.width" in NARROW[architecture] and not importlib.util.find_spec("transformers"):
            pytest.skip("transformers is not installed")
        kind = {} if architecture in recipes.RECIPES else {"model.architecture": architecture}
        chosen = {"loader.image_size": 160, "loader.sizes": [], **kind, **NARROW[architecture]}
        chosen |= {"model.weights": "", "model.sync_batchnorm": False}
        model = recipes.load("debug" if kind else architecture, chosen).model
        return dataclasses.replace(tiny(**overrides), model=model)

    return config


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=[] if name in ("dfine", "rfdetr_finetune") else pytest.mark.extra)
        for name in NARROW
    ],
)
def test_a_whole_life(architecture, narrow, shards, tmp_path):
    """Trained, stopped and resumed to the same bits, evaluated and exported."""
    config = narrow(architecture, train__epochs=1, train__lr=1e-3, train__clip_norm=0.5)
    lived = live(config, shards, tmp_path, 3)
    check = lived["formats"]["onnx"]
    assert check["images"] == 4 and check["matches"]["matched"] >= 0.98 and abs(check["ap_change"]) <= 1e-3
    if "model.width" in NARROW[architecture]:
        path = tmp_path / "model" / "model.onnx"
        kinds = {node.op_type for node in onnx.load(path).graph.node}
        assert "GridSample" in kinds and "NonMaxSuppression" not in kinds
        assert_images_are_found_alone_as_together(OnnxRuntime(path), path)


def assert_images_are_found_alone_as_together(runtime, path):
    """Of an RF-DETR the graph had the batch size of its export as a constant: report rf_detr_949."""
    size = onnx.load(path).graph.input[0].type.tensor_type.shape.dim[-1].dim_value
    images = np.random.default_rng(0).integers(0, 256, (3, 3, size, size), dtype=np.uint8)
    together, comparison = runtime.run(images), DetectionComparison(EXACT)
    for index in range(len(images)):
        alone = runtime.run(images[index : index + 1])
        of_batch = [part[index : index + 1] for part in together]
        comparison.add(*(Detections(*map(torch.from_numpy, each)) for each in (alone, of_batch)))
    matches = comparison.result()
    assert matches.detections > 20 and matches.matched >= 0.98


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=[] if name == "dfine" else pytest.mark.extra)
        for name in NARROW
        if name != "rtdetr"
    ],
)
def test_two_processes_equal_one_on_the_same_global_batch(architecture, narrow, shards, tmp_path):
    assert_two_equal_one(narrow(architecture, **LIKE_PASSES), shards, tmp_path, steps=4, weights=0.05)


def test_several_passes_equal_a_larger_batch(narrow, shards, tmp_path, monkeypatch):
    """Passes of 1, 2 and 2 images: D-FINE's boxes are counted over all five."""
    # A batch's own statistics are no sum over images.
    monkeypatch.setattr(
        torch.nn.BatchNorm2d, "train", lambda self, mode=True: torch.nn.Module.train(self, False)
    )
    common = {"train__precision": "fp32", "train__epochs": 1, "train__lr": 1e-5, "train__clip_norm": 0.5}
    train(narrow("dfine", **common, train__batch_size=5), shards, str(tmp_path / "whole"))
    split = {"train__batch_size": 2, "train__global_batch": 5}
    train(narrow("dfine", **common, **split), shards, str(tmp_path / "parts"))
    one, other = losses(str(tmp_path / "whole")), losses(str(tmp_path / "parts"))
    assert len(one) == len(other) >= 4
    for step in one:
        assert other[step] == pytest.approx(one[step], rel=2e-3), step
