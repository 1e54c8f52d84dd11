"""D-FINE and RT-DETRv2 in our loop: resumed bit for bit, on any processes, evaluated and exported."""

import dataclasses
import importlib.util

import numpy as np
import onnx
import pytest
import torch
from finished_runs import losses, stop_after
from life import live
from two_processes import assert_two_equal_one

from trainer.base.errors import Interrupted
from trainer.export.detection_pairing import EXACT, Comparison
from trainer.export.formats import OnnxRuntime
from trainer.model import recipes
from trainer.model.postprocess import Detections
from trainer.trackers.training_log import read_rows
from trainer.training import batch_fitting
from trainer.training.loop import train


@pytest.fixture
def narrow(tiny):
    """A tiny training of one of both."""

    def config(architecture, **overrides):
        size = {"dfine": "n", "rtdetr": "r18"}[architecture]
        model = {
            "model.architecture": architecture, "model.size": size, "model.width": 0.25,
            "model.queries": 20, "model.denoising": 10, "model.score_threshold": 0.0,
        }  # fmt: skip
        base = recipes.load("debug", model)
        others = tiny(**{"train__lr": 1e-3, "train__clip_norm": 0.5, **overrides})
        return dataclasses.replace(others, model=base.model)

    return config


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_trains_in_every_precision(precision, narrow, shards, tmp_path):
    changes = {"train__epochs": 2, "train__lr": 3e-3, "train__precision": precision}
    result = train(narrow("dfine", **changes), shards, str(tmp_path))
    assert result["steps"] == 12 and len(result["metrics"]) == 12
    rows = [row for row in read_rows(str(tmp_path)) if row["kind"] == "train"]
    for row in rows:
        parts = [row[f"loss_{name}"] for name in ("vfl", "bbox", "giou", "fgl", "ddf")]
        assert sum(parts) == pytest.approx(row["loss"], rel=1e-5)
    # What the sides cost differs more from batch to batch than they are learnt in twelve steps.
    assert rows[-1]["loss_vfl"] < rows[0]["loss_vfl"]


@pytest.mark.slow
def test_several_passes_equal_a_larger_batch(narrow, shards, tmp_path, monkeypatch):
    """Passes of 1, 2 and 2 images: boxes are counted over all five."""
    # A batch's own statistics are no sum over images.
    monkeypatch.setattr(
        torch.nn.BatchNorm2d, "train", lambda self, mode=True: torch.nn.Module.train(self, False)
    )
    common = {"train__precision": "fp32", "train__epochs": 1, "train__lr": 1e-5}
    train(narrow("dfine", **common, train__batch_size=5), shards, str(tmp_path / "whole"))
    split = {"train__batch_size": 2, "train__global_batch": 5}
    train(narrow("dfine", **common, **split), shards, str(tmp_path / "parts"))
    one, other = losses(str(tmp_path / "whole")), losses(str(tmp_path / "parts"))
    assert len(one) == len(other) >= 4
    for step in one:
        assert other[step] == pytest.approx(one[step], rel=2e-3), step


@pytest.mark.slow
def test_squares_of_several_sizes_mosaics_and_mixed_images(narrow, shards, tmp_path, monkeypatch):
    """Resumed to the same bits too; the search for a batch size leaves the random numbers as they were."""
    config = narrow(
        "dfine", train__epochs=1, train__batch_size=6, loader__sizes=[96, 128], loader__mosaic=0.5,
        loader__mixup=0.5,
    )  # fmt: skip
    train(config, shards, str(tmp_path / "whole"))
    searched = dataclasses.replace(config, train=dataclasses.replace(config.train, find_batch_size=True))
    monkeypatch.setattr(batch_fitting, "memory", lambda device: 2**30)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        stop_after(patch, 1)
        train(searched, shards, str(tmp_path / "parts"))
    train(searched, shards, str(tmp_path / "parts"))
    assert losses(str(tmp_path / "parts")) == losses(str(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["dfine", "rtdetr"])
def test_a_whole_life(architecture, narrow, shards, tmp_path):
    """Trained, stopped and resumed to the same bits, evaluated, exported, and scored as exported."""
    formats = ["onnx", *(["openvino"] if importlib.util.find_spec("openvino") else [])]
    lived = live(narrow(architecture, train__epochs=3), shards, tmp_path, 7, formats)
    assert list(lived["formats"]) == formats
    for check in lived["formats"].values():
        assert check["images"] == 4 and check["matches"]["detections"] > 20
        assert check["matches"]["matched"] >= 0.98 and abs(check["ap_change"]) <= 1e-3
    path = tmp_path / "model" / "model.onnx"
    kinds = {node.op_type for node in onnx.load(path).graph.node}
    assert "GridSample" in kinds and "NonMaxSuppression" not in kinds
    assert_images_are_found_alone_as_together(OnnxRuntime(path), path)


def assert_images_are_found_alone_as_together(runtime, path):
    size = onnx.load(path).graph.input[0].type.tensor_type.shape.dim[-1].dim_value
    images = np.random.default_rng(0).integers(0, 256, (3, 3, size, size), dtype=np.uint8)
    together, comparison = runtime.run(images), Comparison(EXACT)
    for index in range(len(images)):
        alone = runtime.run(images[index : index + 1])
        of_batch = [part[index : index + 1] for part in together]
        comparison.add(*(Detections(*map(torch.from_numpy, each)) for each in (alone, of_batch)))
    matches = comparison.result()
    assert matches.detections > 20 and matches.matched >= 0.98


@pytest.mark.slow
@pytest.mark.extra
def test_two_processes_equal_one_on_the_same_global_batch(narrow, shards, tmp_path):
    """Each has three of six images, of which one process has three in each of two passes."""
    common = {
        "train__precision": "fp32", "train__epochs": 1, "train__lr": 1e-4, "train__global_batch": 6,
        "train__batch_size": 3,
    }  # fmt: skip
    assert_two_equal_one(narrow("dfine", **common), shards, tmp_path, steps=4, weights=0.05)
