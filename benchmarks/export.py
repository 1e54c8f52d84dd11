"""Exported files against the trained model: latency, size, and the top-k of many classes.

    python -m benchmarks.export --size 320 --threads 2 --rounds 15
    python -m benchmarks.export --case topk --threads 2 --rounds 15

latency: one image through the deployment graph in PyTorch (eager, in inference mode), in onnxruntime
(fp32 and static int8) and in OpenVINO where that is installed, in turn, each with the same
threads. The ratio is fp32's in onnxruntime to eager; `onnx_over_tuned` and `onnx_over_torchvision` are
to what the evaluation runs in PyTorch (normalisation folded into the convolutions, weights in the layout
they like best on a CPU), and to torchvision's own model. The weights are random, which decides nothing
here but how many boxes reach the suppression: the bias of the scores is set so that about a hundred do.
int8 is calibrated on random images. `onnx_of_limit` is the speed of fp32's convolutions, as if they took
all of the time, by that of a large matrix product in the same rounds: how near the CPU's limit.

topk: the two stages of the graph's top-k against a sort of all pairs of anchor and class,
on the finest level (100 x 100 x 9 anchors) at 601 classes and 800 px, in onnxruntime.

Two threads need two cores with nothing else to do: where others work too, one of them waits for the other.
"""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
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
from trainer.model.deployment import INPUT, best_pairs

CLASSES = 80
SIDE = 1536
"""Of the matrices whose product shows the CPU's limit."""


class _Images:
    """Images to calibrate on, each asked for once."""

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


def latency(options: Any) -> None:
    """Measure the exported forms and print the ratios."""
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


class _TwoStages(nn.Module):
    """The graph's way."""

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return best_pairs(logits, 1000)


class _OneSort(nn.Module):
    """All pairs of anchor and class in one top-k."""

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        classes = logits.shape[2]
        best, pair = torch.topk(logits.permute(0, 3, 1, 2).flatten(1), 1000, dim=1)
        return best, torch.div(pair, classes, rounding_mode="floor"), pair % classes


def _without_gradients(module: Callable[..., Any], *inputs: Any) -> Any:
    return torch.inference_mode()(lambda: module(*inputs))


def topk(options: Any) -> None:
    """Measure the top-k of the finest level and print the ratio."""
    classes, each, places = 601, 9, 100 * 100
    logits = torch.randn(1, each, classes, places) - 7
    inputs = {"logits": logits.numpy()}
    candidates: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, kind in (("one_sort", _OneSort), ("two_stages", _TwoStages)):
            module = kind().eval()
            path = Path(temporary) / f"{name}.onnx"
            program = torch.onnx.export(
                module, (logits,), dynamo=True, opset_version=18, verbose=False, input_names=["logits"]
            )
            program.save(str(path))
            session_options = onnxruntime.SessionOptions()
            session_options.intra_op_num_threads = options.threads
            session = onnxruntime.InferenceSession(str(path), session_options)
            candidates[f"{name}_ort"] = lambda session=session: session.run(None, inputs)
            candidates[f"{name}_eager"] = torch.inference_mode()(lambda module=module: module(logits))
        seconds = interleaved(candidates, options.rounds, options.device, options.clock)
    figures = {f"{name}_ms": value * 1000 for name, value in seconds.items()}
    ratio = seconds["one_sort_ort"] / seconds["two_stages_ort"]
    report("export_topk", ratio, figures, options, at_most={"two_stages_ort_ms": 40})


def main() -> None:
    """Measure the case that is asked for."""
    options = arguments(__doc__, size=320, case="latency")
    {"latency": latency, "topk": topk}[options.case](options)


if __name__ == "__main__":
    main()
