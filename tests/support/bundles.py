"""A bundle for tests, around a small ONNX model that is written in a moment."""

import json

import numpy as np
import onnx
import safetensors.torch
from onnx import TensorProto, helper, numpy_helper

from trainer.base import json_files
from trainer.export import bundle
from trainer.export.description import render_card
from trainer.export.metadata import Metadata

SIZE = 96
ROWS = 5
CLASSES = [{"id": 0, "name": "cat", "original_id": 7}, {"id": 1, "name": "dog <b>", "original_id": 9}]
BOX = (12.0, 6.0, 48.0, 30.0)
"""The one box the model finds in every image, in pixels of the square."""


def bright_model(path, size=SIZE):
    """A model that finds one dog in every image, as sure as the image is bright; padded to ROWS."""
    boxes = np.zeros((1, ROWS, 4), np.float32)
    boxes[0, 0] = BOX
    constants = {
        "boxes0": boxes,
        "labels0": np.array([[1] + [-1] * (ROWS - 1)]),
        "axes": np.array([1, 2, 3]),
        "one": np.array([1]),
        "rows4": np.array([ROWS, 4]),
        "rows1": np.array([ROWS]),
        "full": np.float32(255),
        "first": np.eye(1, ROWS, dtype=np.float32),
    }
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["images"], ["float"], to=TensorProto.FLOAT),
            helper.make_node("ReduceMean", ["float", "axes"], ["mean"], keepdims=0),
            helper.make_node("Div", ["mean", "full"], ["bright"]),
            helper.make_node("Unsqueeze", ["bright", "one"], ["column"]),
            helper.make_node("Mul", ["column", "first"], ["scores"]),
            helper.make_node("Shape", ["images"], ["batch"], start=0, end=1),
            helper.make_node("Concat", ["batch", "rows4"], ["shape3"], axis=0),
            helper.make_node("Expand", ["boxes0", "shape3"], ["boxes"]),
            helper.make_node("Concat", ["batch", "rows1"], ["shape2"], axis=0),
            helper.make_node("Expand", ["labels0", "shape2"], ["labels"]),
            helper.make_node("Expand", ["one", "batch"], ["num"]),
        ],
        "bright",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["batch", 3, size, size])],
        [
            helper.make_tensor_value_info("boxes", TensorProto.FLOAT, ["batch", ROWS, 4]),
            helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", ROWS]),
            helper.make_tensor_value_info("labels", TensorProto.INT64, ["batch", ROWS]),
            helper.make_tensor_value_info("num", TensorProto.INT64, ["batch"]),
        ],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    path.write_bytes(model.SerializeToString())


def make_bundle(
    folder, *, version="v1", ap=0.5, name="pets", created="2026-11-21T08:00:00+00:00", classes=CLASSES
):
    folder.mkdir(parents=True)
    bright_model(folder / "model.onnx")
    (folder / bundle.WEIGHTS).write_bytes(safetensors.torch.save({}, {"version": version}))
    check = {
        "runtime": "onnxruntime 1", "images": 4, "ap": ap, "ap_change": 0.0,
        "matches": {"detections": 9, "matched": 1.0, "score_error": 0.0, "box_error": 0.0},
    }  # fmt: skip
    metadata = {
        "kind": "model", "version": 2, "name": name, "model_version": version, "created": created,
        "classes": classes,
        "input": {
            "name": "images", "dtype": "uint8", "shape": ["batch", 3, SIZE, SIZE], "input_size": SIZE,
            "resize": "letterbox", "fill": 114, "preprocessing": "a rule",
        },
        "outputs": {
            "names": ["boxes", "scores", "labels", "num"], "rows": ROWS, "boxes": "b", "scores": "s",
            "labels": "l", "num": "n",
        },
        "architecture": {"name": "retinanet", "title": "RetinaNet v2 on resnet18"},
        "thresholds": {"score": 0.05, "nms": 0.5, "detections_per_image": ROWS},
        "formats": {
            "onnx": {
                "files": ["model.onnx"], "outputs": ["boxes", "scores", "labels", "num"],
                "bytes": {"model.onnx": (folder / "model.onnx").stat().st_size}, "check": check,
            }
        },
        "trained_on": {"shards": "f00d", "checkpoint": "/runs/a/best.pt", "step": 10, "epoch": 2},
        "metrics": {"split": "test", "images": 4, "evaluation": "/runs/a/evaluation",
                    "values": {"coco/AP": ap, "coco/APl": -1.0}},
        "sha256": {}, "versions": {"kubedet": "0.2.0", "sources": "ab" * 32, "torch": "2"},
        "config": {
            "recipe": "debug", "model": {"version": "v2", "backbone": "resnet18", "weights": ""},
            "train": {"epochs": 2, "optimizer": "adamw", "lr": 0.001, "seed": 0},
        },
    }  # fmt: skip
    (folder / bundle.METADATA).write_text(json.dumps(metadata))
    (folder / bundle.CARD).write_text(render_card(json_files.validate(Metadata, metadata, "metadata", "")))
    bundle.write_checksums(folder)
    return str(folder)
