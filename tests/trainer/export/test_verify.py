"""Checks of exported files."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from trainer.base.errors import ExportError
from trainer.config.schema import Config, ExportConfig
from trainer.config.types import NetworkInput
from trainer.data.shard_index import ShardDataset
from trainer.export import verify
from trainer.export.formats import FORMATS, ExportedModel
from trainer.export.metadata import Agreement
from trainer.model.architecture import build

SIZE = 96


class Runtime:
    """Finds as many boxes as an image has bright pixels in its first row; options make it misbehave."""

    name, threads = "a runtime", 1

    def __init__(self, *, lenient=False, mixed=False, needs_objects=False):
        self.lenient, self.mixed, self.needs_objects = lenient, mixed, needs_objects

    def run(self, images):
        if self.needs_objects and images.max() <= 200:
            raise RuntimeError("Reshape: a dimension is 0\nof a node")
        if not self.lenient and images.shape[1:] != (3, SIZE, SIZE):
            raise ValueError("a wrong shape")
        images = images.reshape(-1, *images.shape[-3:]) if images.ndim == 4 else images[None]
        num = (images[:, 0, 0] > 200).sum(axis=1)
        if self.mixed and len(images) > 1:
            num = num[::-1].copy()
        boxes = np.tile(np.arange(SIZE, dtype=np.float32)[None, :, None], (len(images), 1, 4))
        boxes[..., 2:] += 5
        real = np.arange(SIZE) < num[:, None]
        return [boxes * real[..., None], real * np.float32(0.9), np.where(real, 1, -1), num]


def _served(**options):
    served = object.__new__(ExportedModel)
    served.kind, served.runtime = FORMATS["onnx"], Runtime(**options)
    return served


def _squares():
    squares = torch.zeros(3, 3, SIZE, SIZE, dtype=torch.uint8)
    for row, count in enumerate((3, 7, 1)):
        squares[row, 0, 0, :count] = 255
    return squares


def test_a_good_file_passes():
    verify._check_edge_cases("onnx", _served(), _squares(), NetworkInput(SIZE))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixed": True}, r"\(onnx\) detects different objects in a batch"),
        ({"lenient": True}, r"accepts an input with the wrong shape \[1, 3, 128, 96\]"),
        ({"needs_objects": True}, r"\(onnx\) fails on an image without objects: Reshape"),
    ],
)
def test_misbehaving_files_are_refused(options, message):
    with pytest.raises(ExportError, match=message):
        verify._check_edge_cases("onnx", _served(**options), _squares(), NetworkInput(SIZE))


def test_a_file_that_its_runtime_does_not_open_is_refused(shards, tiny, tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"junk")
    config = tiny()
    detector = build(config.model, 5).eval()
    with pytest.raises(ExportError, match=r"\(onnx\) cannot be opened by the runtime that serves it"):
        verify.verify_exports(tmp_path, ["onnx"], detector, ShardDataset(shards, "val"), config, SIZE)


@pytest.mark.parametrize(
    ("name", "change", "matched", "message"),
    [
        ("onnx", 0.0009, 1.0, ""),
        ("onnx", -0.0009, 0.98, ""),
        ("onnx-int8", -0.0049, 0.1, ""),
        ("onnx", -0.0011, 1.0, "AP changes by -0.0011; the limit is 0.001"),
        ("onnx", 0.0, 0.97, "97.0% of the detections match"),
        ("onnx-int8", -0.0051, 1.0, r"the limit is 0.005 \(export.max_ap_change_int8\)"),
        ("onnx", 0.1, 0.5, "AP changes.*; 50.0% of"),
    ],
)
def test_large_changes_are_refused(name, change, matched, message):
    config = Config(export=ExportConfig(formats=["onnx", "onnx-int8"]))
    with pytest.raises(ExportError, match=message) if message else nullcontext():
        verify._check_agreement(name, change, Agreement(10, matched, 0.0, 0.0), 500, config)
