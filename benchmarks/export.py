"""Exported files against the trained model: latency of one image, and size.

    python -m benchmarks.export --size 320 --threads 2 --rounds 15

The deployment graph in PyTorch (eager, inference mode) against onnxruntime (fp32 and static int8) and, if
installed, OpenVINO, interleaved and with the same threads. The ratio is eager to fp32 in onnxruntime.
`onnx_over_tuned` compares with the evaluation's folded channels_last network, `onnx_over_torchvision` with
torchvision's model. The weights are random; the bias of the scores lets about a hundred boxes reach the NMS.
`onnx_of_limit` is the rate of fp32's convolutions relative to that of a large matrix product.
"""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common import arguments, interleaved, report, stock_model
from trainer.export.formats import OnnxRuntime, OpenVino, write_onnx
from trainer.export.quantize import quantize
from trainer.model.architecture import build
from trainer.model.architectures.retinanet.retinanet import RetinaNet
from trainer.model.architectures.retinanet.retinanet_options import RetinaNetOptions
from trainer.model.deployment import INPUT

CLASSES = 80
SIDE = 1536
"""Of the matrices whose product shows the CPU's limit."""


class _Images:
    """A calibration reader."""

    def __init__(self, images: list[np.ndarray]) -> None:
        self._images = iter(images)

    def get_next(self) -> dict[str, np.ndarray] | None:
        image = next(self._images, None)
        return None if image is None else {INPUT: image[None]}


def _detector(images: Tensor) -> RetinaNet:
    """RetinaNet R50 v2 with random weights; on these images about a hundred scores pass."""
    detector = build(RetinaNetOptions(score_threshold=0.05), CLASSES).eval()
    with torch.inference_mode():
        logits, _ = detector.outputs(detector.features(detector.normalize(images)))
        hundredth = logits[0].flatten().topk(100).values[-1]
    with torch.no_grad():
        bias = detector.head.classification_head.cls_logits.bias
        bias += torch.logit(torch.tensor(0.05)) - hundredth
    return detector


def main() -> None:
    """Measure the exported forms and print the ratios."""
    options = arguments(__doc__, size=320)
    size = options.size
    images = torch.randint(0, 256, (1, 3, size, size), dtype=torch.uint8)
    detector = _detector(images)
    graph = detector.deployment_graph(size).eval()
    tuned = copy.deepcopy(detector).folded().to(memory_format=torch.channels_last)
    stock = stock_model(CLASSES, size, options.device).eval()
    stock.load_state_dict(detector.state_dict(), strict=False)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        safetensors.torch.save_file(
            {name: value.contiguous() for name, value in detector.state_dict().items()}, folder / "weights"
        )
        write_onnx(graph, folder / "fp32.onnx", 18)
        random = np.random.default_rng(0)
        calibration = [random.integers(0, 256, (3, size, size), dtype=np.uint8) for _ in range(8)]
        quantize(folder / "fp32.onnx", folder / "int8.onnx", _Images([images[0].numpy(), *calibration]))
        runtimes = {
            "onnx": OnnxRuntime(folder / "fp32.onnx", options.threads),
            "onnx-int8": OnnxRuntime(folder / "int8.onnx", options.threads),
        }
        openvino = _openvino(folder, options.threads)
        candidates: dict[str, Any] = {
            "eager": _without_gradients(graph, images),
            "tuned": _without_gradients(tuned.predict, images),
            "torchvision": _without_gradients(stock, [images[0].float() / 255]),
        }
        square = torch.rand(SIDE, SIDE)
        candidates["product"] = _without_gradients(torch.mm, square, square)
        pixels = images.numpy()
        for name, runtime in (runtimes | openvino).items():
            candidates[name] = lambda runtime=runtime: runtime.run(pixels)
        seconds = interleaved(candidates, options.rounds, options.device, options.clock)
        weights = (folder / "weights").stat().st_size
        figures: dict[str, Any] = {f"{name}_ms": value * 1000 for name, value in seconds.items()}
        figures |= {
            f"{name}_times": seconds["eager"] / seconds[name]
            for name in candidates
            if name not in ("eager", "tuned", "torchvision", "product")
        }
        figures |= {f"onnx_over_{name}": seconds[name] / seconds["onnx"] for name in ("tuned", "torchvision")}
        speed = _convolutions(graph, images) / seconds["onnx"]
        figures["onnx_gflops"], figures["limit_gflops"] = speed / 1e9, 2 * SIDE**3 / seconds["product"] / 1e9
        figures["onnx_of_limit"] = figures["onnx_gflops"] / figures["limit_gflops"]
        figures["onnx_size_ratio"] = (folder / "fp32.onnx").stat().st_size / weights
        figures["int8_size_ratio"] = (folder / "int8.onnx").stat().st_size / weights
        figures["weights_mb"] = weights / 1e6
        figures["detections"] = int(detector.predict(images).num[0])
    report(
        "export", figures["onnx_times"], figures, options,
        at_least={"onnx_times": 1.4, "onnx-int8_times": 3} if size == 320 else {},
        at_most={"onnx_size_ratio": 1.02, "int8_size_ratio": 0.27},
    )  # fmt: skip


def _convolutions(graph: nn.Module, images: Tensor) -> int:
    """Floating-point operations of a graph's convolutions."""
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        graph(images)
    return counter.get_total_flops()


def _openvino(folder: Path, threads: int) -> dict[str, Any]:
    try:
        import openvino
    except ImportError:
        return {}
    openvino.save_model(openvino.convert_model(str(folder / "fp32.onnx")), str(folder / "model.xml"))
    return {"openvino": OpenVino(folder / "model.xml", threads)}


def _without_gradients(module: Callable[..., Any], *inputs: Any) -> Any:
    return torch.inference_mode()(lambda: module(*inputs))


if __name__ == "__main__":
    main()
