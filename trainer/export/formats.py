"""The export formats with their writers, and the runtime that runs them."""

import copy
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from trainer.base.errors import ExportError, wrap_exceptions
from trainer.config.schema import Config
from trainer.config.types import NetworkInput
from trainer.export.onnx_operators import grid_sample_by_gather, nms_keep
from trainer.export.quantize import CalibrationImages, quantize, suppress_output
from trainer.model.architecture import INPUT, Architecture, Detections, Graph
from trainer.model.retinanet import postprocess

_LOG = logging.getLogger("export")
OPSET = 18  # ONNX operator set that all runtimes support
_MAX_CANDIDATES = 10_000  # best pairs of box and class per image that suppression processes


class OnnxRuntime:
    """An ONNX file in onnxruntime, on the CPU.

    `name` is the library with its version, such as `onnxruntime 1.31.1`; `size` is the side of the input in
    pixels.
    """

    def __init__(self, path: Path, threads: int = 0) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # Suppresses messages about refused shapes, which our errors report.
        options.intra_op_num_threads = threads or torch.get_num_threads()
        self.name = f"onnxruntime {onnxruntime.__version__}"
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.size = self._session.get_inputs()[0].shape[-1]

    def run(self, images: np.ndarray) -> list[np.ndarray]:
        """Run the model on uint8 images [B, 3, S, S]; return the outputs in the graph's order."""
        outputs: list[np.ndarray] = self._session.run(None, {INPUT: images})
        return outputs


_ANY_BATCH: Any = ({0: torch.export.Dim("batch", min=1)},)


def _example_input(image_size: int) -> torch.Tensor:
    # Two images, because the exporter would treat a batch size of one as a constant.
    return torch.zeros(2, 3, image_size, image_size, dtype=torch.uint8)


def write_onnx(graph: Graph, path: Path, *, grid_sample: bool = True) -> None:
    """Export a graph with a dynamic batch size and all weights in one file, and check it.

    With `grid_sample=False` the graph contains no GridSample, so TensorRT compiles it correctly; on a CPU
    it is 2 to 9 % slower.
    """
    translations: dict[Callable[..., Any], Callable[..., Any]] = {
        torch.ops.kubedet.nms_keep.default: nms_keep
    }
    if not grid_sample:
        translations[torch.ops.aten.grid_sampler.default] = grid_sample_by_gather
    failing = f"the model cannot be written as ONNX (opset {OPSET})"
    fix = "use the versions of torch, onnx and onnxscript in constraints.txt"
    with wrap_exceptions(ExportError, failing, fix=fix):
        with suppress_output():
            program = torch.onnx.export(
                graph,
                (_example_input(graph.image_size),),
                dynamo=True,
                opset_version=OPSET,
                input_names=[INPUT],
                output_names=list(graph.output_names),
                dynamic_shapes=_ANY_BATCH,
                custom_translation_table=translations,
                verbose=False,
            )
        assert program is not None
        model = program.model_proto
        values = [*model.graph.value_info, *model.graph.initializer, *model.graph.input, *model.graph.output]
        for part in (model, model.graph, *model.graph.node, *values):  # They contain local paths.
            part.ClearField("metadata_props")
            part.ClearField("doc_string")
        path.write_bytes(model.SerializeToString())
        onnx.checker.check_model(str(path), full_check=True)


class FormatWriter:
    """Writes exported files; shared intermediate files are created once, in the folder `scratch`."""

    def __init__(
        self,
        detector: Architecture,
        network_input: NetworkInput,
        config: Config,
        shards_uri: str,
        scratch: Path,
    ) -> None:
        self.network_input, self.config, self.shards_uri = network_input, config, shards_uri
        # A copy: a folded detector cannot be trained or saved.
        self.detector = copy.deepcopy(detector).fold_batchnorm()
        self._scratch = scratch

    @cached_property
    def graph(self) -> Graph:
        return self.detector.deployment_graph(self.network_input.size)

    @cached_property
    def fp32(self) -> Path:
        path = self._scratch / "fp32.onnx"
        write_onnx(self.graph, path)
        return path

    def write_fp32(self, path: Path) -> None:
        shutil.copyfile(self.fp32, path)

    def write_int8(self, path: Path) -> None:
        images = CalibrationImages(self.shards_uri, self.network_input, self.config.export.calibration_images)
        _LOG.info("calibrating int8 on %d training images", images.count)
        quantize(self.fp32, path, images)

    def write_raw(self, path: Path) -> None:
        raw = self.detector.raw_graph(self.network_input.size)
        write_onnx(raw, path, grid_sample=False)


@dataclass(frozen=True)
class Format:
    """An export format: its file, and the function that writes it."""

    file: str
    write: Callable[[FormatWriter, Path], None]  # writes the file
    raw: bool = False  # whether it returns all boxes and scores instead of detections


FORMATS = {
    "onnx": Format("model.onnx", FormatWriter.write_fp32),
    "onnx-int8": Format("model.int8.onnx", FormatWriter.write_int8),
    "raw": Format("model.raw.onnx", FormatWriter.write_raw, raw=True),
}
"""The formats by their names in export.formats."""


class ExportedModel:
    """An exported file, opened in onnxruntime."""

    def __init__(self, kind: Format, path: Path, thresholds: Mapping[str, float]) -> None:
        self.kind, self.runtime, self._thresholds = kind, OnnxRuntime(path), thresholds

    def predict(self, images: np.ndarray) -> Detections:
        """Detect objects in uint8 images [B, 3, S, S]."""
        arrays = [torch.from_numpy(array) for array in self.runtime.run(images)]
        return to_detections(arrays[0], arrays[1], self._thresholds) if self.kind.raw else Detections(*arrays)


def to_detections(boxes: torch.Tensor, scores: torch.Tensor, thresholds: Mapping[str, float]) -> Detections:
    """Select detections from the raw graph's outputs for a batch: boxes [B, N, 4] and scores [B, N, C].

    `thresholds` are `score`, `detections_per_image` and, for a detector with suppression, `nms`: the largest
    overlap (IoU) of two detections of a class.
    """
    limit, classes = int(thresholds["detections_per_image"]), scores.shape[2]
    padded = Detections(
        torch.zeros(len(boxes), limit, 4),
        torch.zeros(len(boxes), limit),
        torch.full((len(boxes), limit), -1),
        torch.zeros(len(boxes), dtype=torch.int64),
    )
    for row, (corners, values) in enumerate(zip(boxes, scores, strict=True)):
        flat = values.flatten()
        pairs = torch.nonzero(flat > thresholds["score"]).flatten()
        count = _MAX_CANDIDATES if "nms" in thresholds else limit
        pairs = pairs[flat[pairs].argsort(descending=True, stable=True)[:count]]
        if "nms" in thresholds and len(pairs):
            candidates = corners[pairs // classes][None], flat[pairs][None], (pairs % classes)[None]
            kept = postprocess.nms_keep(*candidates, classes, thresholds["nms"], 0.0)
            pairs = pairs[kept[0] > 0][:limit]
        count = padded.num[row] = len(pairs)
        padded.boxes[row, :count] = corners[pairs // classes]
        padded.scores[row, :count] = flat[pairs]
        padded.labels[row, :count] = pairs % classes
    return padded
