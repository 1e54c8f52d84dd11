"""Writes the deployment graph as one ONNX file."""

import contextlib
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import onnx
import torch
from onnxscript import opset18

from trainer.base.errors import ExportError, first_line
from trainer.model.deployment import INPUT, Graph

# onnxscript's type variables describe graph values, which Python values stand for here.
op: Any = opset18


def _nms_keep(boxes: Any, scores: Any, labels: Any, classes: int, overlap: float, threshold: float) -> Any:
    """`deployment.nms_keep` in ONNX operators: NonMaxSuppression over [B, classes, T] scores.

    A candidate has its score in the row of its class and 0 elsewhere, below any threshold.
    """
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
        op.Constant(value_floats=[overlap]),
        op.Constant(value_floats=[threshold]),
        center_point_box=0,
    )
    where = op.Gather(selected, op.Constant(value_ints=[0, 2]), axis=1)
    ones = op.Expand(op.Constant(value_float=1.0), op.Gather(op.Shape(selected), op.Constant(value_ints=[0])))
    nothing = op.Expand(op.Constant(value_float=0.0), op.Shape(scores))
    return op.ScatterND(nothing, where, ones)


def _without_traces(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without the exporter's notes: stack traces with paths of this machine, 0.6 MB of them."""
    graph = model.graph
    for part in (
        model,
        graph,
        *graph.node,
        *graph.value_info,
        *graph.initializer,
        *graph.input,
        *graph.output,
    ):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    return model


def write_onnx(graph: Graph, path: Path, opset: int) -> None:
    """Export a graph with a dynamic batch, all weights inside the file, and check it.

    Raises:
        ExportError: the exporter or the checker refuses it.
    """
    size = graph.image_size
    # Two images: a batch of one would be taken for a constant.
    example = torch.zeros(2, 3, size, size, dtype=torch.uint8)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                graph,
                (example,),
                dynamo=True,
                opset_version=opset,
                input_names=[INPUT],
                output_names=list(graph.names),
                dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
                custom_translation_table={torch.ops.kubedet.nms_keep.default: _nms_keep},
                verbose=False,
            )
            assert program is not None
        model = _without_traces(program.model_proto)
        path.write_bytes(model.SerializeToString())
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # the exporter has no common error of its own
        reason = first_line(error)
        raise ExportError(
            f"the model cannot be written as ONNX (opset {opset}): {reason}",
            fix="use the versions of torch, onnx and onnxscript in constraints.txt",
        ) from error
