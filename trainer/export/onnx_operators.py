"""ONNX translations of operators for which PyTorch's exporter has none, or an unsuitable one."""

from typing import Any

from onnx import TensorProto
from onnxscript import opset18

# Any: onnxscript's type variables describe graph values, but these are Python values.
op: Any = opset18


def nms_keep(
    boxes: Any, scores: Any, labels: Any, classes: int, iou_threshold: float, score_threshold: float
) -> Any:
    """Translate `postprocess.nms_keep` to NonMaxSuppression."""
    every_class = op.Reshape(
        op.Range(op.Constant(value_int=0), op.Constant(value_int=classes), op.Constant(value_int=1)),
        op.Constant(value_ints=[1, classes, 1]),
    )
    is_class = op.Equal(op.Unsqueeze(labels, op.Constant(value_ints=[1])), every_class)
    per_class = op.Where(
        is_class, op.Unsqueeze(scores, op.Constant(value_ints=[1])), op.Constant(value_float=0.0)
    )
    selected = op.NonMaxSuppression(
        boxes,
        per_class,
        op.Gather(op.Shape(scores), op.Constant(value_ints=[1])),
        op.Constant(value_floats=[iou_threshold]),
        op.Constant(value_floats=[score_threshold]),
        center_point_box=0,
    )
    where = op.Gather(selected, op.Constant(value_ints=[0, 2]), axis=1)
    ones = op.Expand(op.Constant(value_float=1.0), op.Gather(op.Shape(selected), op.Constant(value_ints=[0])))
    nothing = op.Expand(op.Constant(value_float=0.0), op.Shape(scores))
    return op.ScatterND(nothing, where, ones)


def grid_sample_by_gather(values: Any, grid: Any, mode: int, padding: int, align_corners: bool) -> Any:
    """Translate grid_sample (bilinear, zeros outside, corners not aligned) without GridSample.

    TensorRT compiles GridSample to wrong values without an error: pull request 917 of
    github.com/lightly-ai/lightly-train, issue 4646 of github.com/NVIDIA/TensorRT. `values` are [N, C, H, W],
    `grid` [N, h, w, 2] in -1..1. Positions are integers, so 16-bit arithmetic does not round them.
    """
    if (mode, padding, align_corners) != (0, 0, False):
        raise NotImplementedError(
            "only bilinear sampling with zero padding and without aligned corners is supported"
        )
    channels, height, width = (int(side) for side in values.shape[1:])
    places = _int_constant(height * width, scalar=True)
    count = op.Mul(op.Gather(op.Shape(values), _int_constant(0, scalar=True)), places)
    first = op.Reshape(op.Range(_int_constant(0, scalar=True), count, places), _int_constant(-1, 1, 1))
    columns, rows = _neighbors(grid, 0, width), _neighbors(grid, 1, height)
    table = op.Reshape(op.Transpose(values, perm=[0, 2, 3, 1]), _int_constant(-1, channels))
    total = None
    for row, down in rows:
        start = op.Add(op.Mul(row, _int_constant(width)), first)
        for column, across in columns:
            weight = op.Unsqueeze(op.Mul(down, across), _int_constant(3))
            part = op.Mul(op.Gather(table, op.Add(start, column), axis=0), weight)
            total = part if total is None else op.Add(total, part)
    return op.Transpose(total, perm=[0, 3, 1, 2])


def _neighbors(grid: Any, axis: int, size: int) -> list[tuple[Any, Any]]:
    """Return the positions before and after each point on an axis of length `size`, with their weights."""
    scale, shift = op.Constant(value_float=size / 2), op.Constant(value_float=(size - 1) / 2)
    point = op.Add(op.Mul(op.Gather(grid, _int_constant(axis, scalar=True), axis=3), scale), shift)
    before = op.Floor(point)
    share = op.Sub(point, before)
    place = op.Cast(before, to=TensorProto.INT64)
    neighbors = []
    for where, weight in (
        (place, op.Sub(op.Constant(value_float=1.0), share)),
        (op.Add(place, _int_constant(1)), share),
    ):
        inside = op.Min(op.Max(where, _int_constant(0)), _int_constant(size - 1))
        zero = op.Constant(value_float=0.0)
        neighbors.append((inside, op.Where(op.Equal(where, inside), weight, zero)))
    return neighbors


def _int_constant(*values: int, scalar: bool = False) -> Any:
    return op.Constant(value_int=values[0]) if scalar else op.Constant(value_ints=list(values))
