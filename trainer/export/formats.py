"""The export formats, each with its writer and its runtime."""

import copy
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
import torch

from trainer.base.errors import ExportError, install_extra, translated
from trainer.config.schema import Config
from trainer.config.types import InputSquare
from trainer.export import build_engine
from trainer.export.onnx_operators import gathered_samples, nms_keep
from trainer.export.quantize import CalibrationImages, quantize, quiet
from trainer.model.architecture import Architecture
from trainer.model.deployment import INPUT, Detections, Graph

_LOG = logging.getLogger("export")


class Runtime(Protocol):
    """A loaded exported file."""

    name: str  # the library and its version, such as `onnxruntime 1.31.1`
    threads: int  # threads that compute one request

    def run(self, images: np.ndarray) -> list[np.ndarray]:
        """Return outputs, in the graph's order, of uint8 images [B, 3, S, S]."""


class OnnxRuntime:
    """An ONNX file in onnxruntime, on the CPU."""

    def __init__(self, path: Path, threads: int = 0) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # Refused shapes are reported by our errors, not by lines on stderr.
        self.threads = options.intra_op_num_threads = threads or torch.get_num_threads()
        self.name = f"onnxruntime {onnxruntime.__version__}"
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(self, images: np.ndarray) -> list[np.ndarray]:
        return self._session.run(None, {INPUT: images})


class OpenVino:
    """An OpenVINO model on the CPU, in fp32: OpenVINO's default is bf16 if the CPU supports it."""

    def __init__(self, path: Path, threads: int = 0) -> None:
        openvino = import_openvino()
        self.threads = threads or torch.get_num_threads()
        self.name = f"openvino {version('openvino')}"
        hints = {
            "INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": self.threads, "NUM_STREAMS": "1",
        }  # fmt: skip
        self._model = openvino.Core().compile_model(str(path), "CPU", hints)

    def run(self, images: np.ndarray) -> list[np.ndarray]:
        results = self._model({INPUT: images})
        # Copied: OpenVINO reuses its output buffers in the next request.
        return [np.array(results[port]) for port in self._model.outputs]


class ExportedProgram:
    """A file of torch.export, in PyTorch. It is code: open only files of authors you trust."""

    def __init__(self, path: Path, threads: int = 0) -> None:
        self.threads = threads or torch.get_num_threads()
        self.name = f"torch {torch.__version__}"
        self._module = torch.export.load(path).module()

    def run(self, images: np.ndarray) -> list[np.ndarray]:
        with torch.inference_mode():
            return [part.numpy() for part in self._module(torch.from_numpy(images))]


def import_openvino() -> Any:
    """Import OpenVINO."""
    try:
        import openvino
    except ImportError:
        raise ExportError(
            "the format openvino needs the package openvino, which is not installed",
            fix=f"{install_extra('openvino')}, or remove openvino from export.formats",
        ) from None
    return openvino


_ANY_BATCH: Any = ({0: torch.export.Dim("batch", min=1)},)


def _example(image_size: int) -> torch.Tensor:
    # Two images: a batch of one would be taken for a constant.
    return torch.zeros(2, 3, image_size, image_size, dtype=torch.uint8)


def write_onnx(graph: Graph, path: Path, opset: int, *, grid_sample: bool = True) -> None:
    """Export a graph with a dynamic batch, all weights inside the file, and check it.

    Without `grid_sample` it has no GridSample: a CPU then needs 2 to 9 % longer, but TensorRT is right.
    """
    translations: dict[Callable[..., Any], Callable[..., Any]] = {
        torch.ops.kubedet.nms_keep.default: nms_keep
    }
    if not grid_sample:
        translations[torch.ops.aten.grid_sampler.default] = gathered_samples
    failing = f"the model cannot be written as ONNX (opset {opset})"
    fix = "use the versions of torch, onnx and onnxscript in constraints.txt"
    with translated(ExportError, failing, fix=fix):
        with quiet():
            program = torch.onnx.export(
                graph,
                (_example(graph.image_size),),
                dynamo=True,
                opset_version=opset,
                input_names=[INPUT],
                output_names=list(graph.names),
                dynamic_shapes=_ANY_BATCH,
                custom_translation_table=translations,
                verbose=False,
            )
        assert program is not None
        model = program.model_proto
        values = [*model.graph.value_info, *model.graph.initializer, *model.graph.input, *model.graph.output]
        for part in (model, model.graph, *model.graph.node, *values):  # They hold paths of this machine.
            part.ClearField("metadata_props")
            part.ClearField("doc_string")
        path.write_bytes(model.SerializeToString())
        onnx.checker.check_model(str(path), full_check=True)


class Maker:
    """Writes the files of formats; shared intermediate files are created once, in the folder `scratch`."""

    def __init__(
        self, detector: Architecture, square: InputSquare, config: Config, shards_uri: str, scratch: Path
    ) -> None:
        self.square, self.config, self.shards_uri = square, config, shards_uri
        # A copy: a folded detector cannot be trained or saved.
        self.detector = copy.deepcopy(detector).folded()
        self._scratch = scratch

    @cached_property
    def graph(self) -> Graph:
        return self.detector.deployment_graph(self.square.size)

    @cached_property
    def fp32(self) -> Path:
        path = self._scratch / "fp32.onnx"
        write_onnx(self.graph, path, self.config.export.opset)
        return path

    def onnx(self, path: Path) -> None:
        shutil.copyfile(self.fp32, path)

    def int8(self, path: Path) -> None:
        images = CalibrationImages(self.shards_uri, self.square, self.config.export.calibration_images)
        _LOG.info("calibrating int8 on %d training images", images.count)
        quantize(self.fp32, path, images)

    def raw(self, path: Path) -> None:
        raw = self.detector.raw_graph(self.square.size)
        write_onnx(raw, path, self.config.export.opset, grid_sample=False)

    def program(self, path: Path) -> None:
        fix = "use the version of torch in constraints.txt, or remove torch-export from export.formats"
        with translated(ExportError, "torch.export cannot write the model", fix=fix), quiet():
            example = (_example(self.square.size),)
            torch.export.save(torch.export.export(self.graph, example, dynamic_shapes=_ANY_BATCH), path)

    def openvino(self, path: Path) -> None:
        openvino = import_openvino()
        openvino.save_model(openvino.convert_model(str(self.fp32)), str(path), compress_to_fp16=False)


@dataclass(frozen=True)
class Format:
    """One export format."""

    files: tuple[str, ...]  # its files; the first one is opened
    write: Callable[[Maker, Path], None]  # writes them, given the path of the first
    open: Callable[[Path], Runtime]
    raw: bool = False  # whether it gives all boxes and scores, not detections
    is_code: bool = False  # whether its file is a program, which runs the code of its author


FORMATS = {
    "onnx": Format(("model.onnx",), Maker.onnx, OnnxRuntime),
    "onnx-int8": Format(("model.int8.onnx",), Maker.int8, OnnxRuntime),
    "torch-export": Format(("model.pt2",), Maker.program, ExportedProgram, is_code=True),
    "openvino": Format(("model.xml", "model.bin"), Maker.openvino, OpenVino),
    "raw": Format(("model.raw.onnx",), Maker.raw, OnnxRuntime, raw=True),
}
"""The formats by their names in export.formats."""


class Served:
    """An exported file in its runtime, giving detections."""

    def __init__(self, kind: Format, path: Path, thresholds: Mapping[str, float]) -> None:
        self.kind, self.runtime, self._thresholds = kind, kind.open(path), thresholds

    def predict(self, images: np.ndarray) -> Detections:
        """Detect objects in uint8 images [B, 3, S, S]."""
        outputs = [torch.from_numpy(part) for part in self.runtime.run(images)]
        return select(outputs[0], outputs[1], self._thresholds) if self.kind.raw else Detections(*outputs)


def select(boxes: torch.Tensor, scores: torch.Tensor, thresholds: Mapping[str, float]) -> Detections:
    """Detections from the raw graph's outputs for a batch; see `build_engine.select`."""
    limit = int(thresholds["detections_per_image"])
    padded = Detections(
        torch.zeros(len(boxes), limit, 4), torch.zeros(len(boxes), limit),
        torch.full((len(boxes), limit), -1), torch.zeros(len(boxes), dtype=torch.int64),
    )  # fmt: skip
    for row in range(len(boxes)):
        found = build_engine.select(boxes[row].numpy(), scores[row].numpy(), thresholds)
        count = padded.num[row] = len(found[1])
        for part, values in zip(padded, found, strict=False):
            part[row, :count] = torch.from_numpy(values)
    return padded


def check_trust(kind: str, uri: str, run_code: bool, *, fix: str) -> None:
    """Raise ExportError for a file that can execute code, unless `run_code`; `fix` explains how to allow
    it.
    """
    if FORMATS[kind].is_code and not run_code:
        raise ExportError(
            f"{FORMATS[kind].files[0]} of {uri} can execute code, so it is opened only if you allow it",
            fix=f"if you trust its author, {fix}; otherwise use another format, such as onnx",
        )
