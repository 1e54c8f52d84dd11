"""The export formats: how each is written, which runtime runs it, and its tolerance."""

import contextlib
import copy
import io
import logging
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from trainer.base.errors import ExportError, first_line
from trainer.config.schema import Config
from trainer.export.detection_pairing import EXACT, QUANTIZED, Tolerance
from trainer.export.onnx_file import write_onnx
from trainer.export.quantize import CalibrationImages, quantize
from trainer.export.runtimes import ExportedProgram, OnnxRuntime, OpenVino, Runtime, import_openvino
from trainer.model.architecture import Architecture
from trainer.model.deployment import Graph

_LOG = logging.getLogger("export")


class Maker:
    """Writes the files of formats; intermediate results that several of them share are made once."""

    def __init__(
        self, detector: Architecture, image_size: int, config: Config, shards_uri: str, folder: Path
    ) -> None:
        """Prepare.

        Args:
            detector: the trained model, on the CPU.
            image_size: side of the input square.
            config: the export section.
            shards_uri: where calibration images come from.
            folder: receives the files, and a folder `scratch` besides.
        """
        self.folder = folder
        self.image_size, self.config, self.shards_uri = image_size, config, shards_uri
        # A copy: nobody can train or save what is folded.
        self.detector = copy.deepcopy(detector).folded()
        self._scratch = folder / "scratch"
        self._scratch.mkdir()

    def clean(self) -> None:
        """Remove the intermediate files."""
        shutil.rmtree(self._scratch)

    @cached_property
    def graph(self) -> Graph:
        """The deployment graph."""
        return self.detector.deployment_graph(self.image_size)

    @cached_property
    def fp32(self) -> Path:
        """The deployment graph as ONNX, shipped or not."""
        path = self._scratch / "fp32.onnx"
        write_onnx(self.graph, path, self.config.export.opset)
        return path

    def onnx(self, path: Path) -> None:
        """Write the deployment graph."""
        shutil.copyfile(self.fp32, path)

    def int8(self, path: Path) -> None:
        """Write its quantised form."""
        images = CalibrationImages(self.shards_uri, self.image_size, self.config.export.calibration_images)
        _LOG.info("calibrating int8 on %d training images", images.count)
        quantize(self.fp32, path, images)

    def raw(self, path: Path) -> None:
        """Write the graph without suppression."""
        write_onnx(self.detector.raw_graph(self.image_size), path, self.config.export.opset)

    def program(self, path: Path) -> None:
        """Write the deployment graph as torch.export's program.

        Raises:
            ExportError: PyTorch cannot export it.
        """
        size = self.image_size
        example = torch.zeros(2, 3, size, size, dtype=torch.uint8)
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                shapes = ({0: torch.export.Dim("batch", min=1)},)
                torch.export.save(torch.export.export(self.graph, (example,), dynamic_shapes=shapes), path)
        except Exception as error:  # torch.export has no common error of its own
            reason = first_line(error)
            raise ExportError(
                f"torch.export cannot write the model: {reason}",
                fix="use the version of torch in constraints.txt, or leave out torch-export",
            ) from error

    def openvino(self, path: Path) -> None:
        """Write OpenVINO's form, with fp32 weights."""
        openvino = import_openvino()
        openvino.save_model(openvino.convert_model(str(self.fp32)), str(path), compress_to_fp16=False)


@dataclass(frozen=True)
class Format:
    """One export format."""

    files: tuple[str, ...]
    """Its files; the first is the one that is opened."""
    write: Callable[[Maker, Path], None]
    """Writes them, given the path of the first."""
    open: Callable[[Path], Runtime]
    """Opens the first in the runtime that serves it."""
    tolerance: Tolerance
    """How far its detections may differ from the trained model's."""
    raw: bool = False
    """It gives boxes and scores of all anchors, not detections."""


FORMATS = {
    "onnx": Format(("model.onnx",), Maker.onnx, OnnxRuntime, EXACT),
    "onnx-int8": Format(("model.int8.onnx",), Maker.int8, OnnxRuntime, QUANTIZED),
    "torch-export": Format(("model.pt2",), Maker.program, ExportedProgram, EXACT),
    "openvino": Format(("model.xml", "model.bin"), Maker.openvino, OpenVino, EXACT),
    "raw": Format(("model.raw.onnx",), Maker.raw, OnnxRuntime, EXACT, raw=True),
}
"""The formats by their names in export.formats."""


CODE = ("torch-export",)
"""Formats whose files are programs: to open one is to run what its maker wrote."""


def check_trust(kind: str, uri: str, run_code: bool, *, fix: str) -> None:
    """Refuse to open a file that is a program, unless whoever opens it has said that it may be run.

    Args:
        kind: its format.
        uri: of the bundle.
        run_code: what was said.
        fix: how to say it.

    Raises:
        ExportError: it is one, and nobody said so.
    """
    if kind in CODE and not run_code:
        raise ExportError(
            f"{FORMATS[kind].files[0]} of {uri} is a program, and is not run unless that is asked for",
            fix=f"if you trust who made it: {fix}; else take another format, or have onnx exported",
        )


def check_formats(names: Sequence[str]) -> None:
    """Refuse formats that cannot be made here, before anything is made.

    Raises:
        ExportError: one is unknown, or needs a package that is not installed.
    """
    unknown = [name for name in names if name not in FORMATS]
    if unknown or not names:
        raise ExportError(
            f"unknown format {', '.join(unknown)}" if unknown else "no format to export to",
            fix=f"export.formats takes: {', '.join(FORMATS)}",
        )
    if "openvino" in names:
        import_openvino()
