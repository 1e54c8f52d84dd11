"""The runtimes that serve an exported file, behind one small interface."""

from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from trainer.base.errors import ExportError
from trainer.model.deployment import INPUT


class Runtime(Protocol):
    """An exported file that is loaded and ready for requests."""

    name: str
    """The library and its version, e.g. `onnxruntime 1.31.1`."""
    threads: int
    """Threads that compute one request."""

    def run(self, images: np.ndarray) -> list[np.ndarray]:
        """Outputs, in the graph's order, of uint8 images [B, 3, S, S]."""
        ...


class OnnxRuntime:
    """An ONNX file in onnxruntime, on the CPU."""

    def __init__(self, path: Path, threads: int = 0) -> None:
        """Open a file.

        Args:
            path: the file.
            threads: threads of a request; 0 takes as many as PyTorch has here.
        """
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # Refused shapes are reported by our errors, not by lines on stderr.
        self.threads = options.intra_op_num_threads = threads or torch.get_num_threads()
        self.name = f"onnxruntime {onnxruntime.__version__}"
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(self, images: np.ndarray) -> list[np.ndarray]:
        return self._session.run(None, {INPUT: images})


class OpenVino:
    """An OpenVINO model on the CPU, in fp32: its own choice would be bf16 where the CPU has it."""

    def __init__(self, path: Path, threads: int = 0) -> None:
        """Open a model; `path` is its .xml, beside its .bin."""
        openvino = import_openvino()
        self.threads = threads or torch.get_num_threads()
        self.name = f"openvino {version('openvino')}"
        hints = {
            "INFERENCE_PRECISION_HINT": "f32",
            "INFERENCE_NUM_THREADS": self.threads,
            "NUM_STREAMS": "1",
        }
        self._model = openvino.Core().compile_model(str(path), "CPU", hints)

    def run(self, images: np.ndarray) -> list[np.ndarray]:
        results = self._model({INPUT: images})
        # Copied: OpenVINO reuses its output buffers in the next request.
        return [np.array(results[port]) for port in self._model.outputs]


class ExportedProgram:
    """A file of torch.export, in PyTorch. It is code: open only files whose origin you know."""

    def __init__(self, path: Path, threads: int = 0) -> None:
        """Open a file; the operator `kubedet::nms_keep` in it is defined in trainer/model/deployment.py."""
        self.threads = threads or torch.get_num_threads()
        self.name = f"torch {torch.__version__}"
        self._module = torch.export.load(path).module()

    def run(self, images: np.ndarray) -> list[np.ndarray]:
        with torch.inference_mode():
            return [part.numpy() for part in self._module(torch.from_numpy(images))]


def import_openvino() -> Any:
    """Import OpenVINO.

    Raises:
        ExportError: it is not installed.
    """
    try:
        import openvino
    except ImportError:
        raise ExportError(
            "the format openvino needs the package openvino, which is not installed",
            fix="pip install 'kubedet[openvino]', or leave openvino out of export.formats",
        ) from None
    return openvino
