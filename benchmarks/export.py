"""Compare exported files with the trained model: latency of one image, and size.

    python -m benchmarks.export --size 320 --threads 2 --rounds 15

Runs the deployment graph in PyTorch (eager, inference mode) and in onnxruntime (fp32 and static int8),
interleaved, with the same number of threads. The ratio is the time of eager to that of fp32 in onnxruntime.
The weights are random; the bias of the scores is set so that about a hundred boxes reach the NMS.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from benchmarks.common import arguments, report, time_interleaved
from trainer.export.formats import OnnxRuntime, write_onnx
from trainer.export.quantize import quantize
from trainer.model.architecture import INPUT, build
from trainer.model.retinanet.options import RetinaNetOptions
from trainer.model.retinanet.retinanet import RetinaNet

CLASSES = 80


class _Calibration:
    """Images in the interface of onnxruntime's calibration."""

    def __init__(self, images: list[np.ndarray]) -> None:
        self._images = iter(images)

    def get_next(self) -> dict[str, np.ndarray] | None:
        image = next(self._images, None)
        return None if image is None else {INPUT: image[None]}


def _detector(images: Tensor) -> RetinaNet:
    """Return RetinaNet R50 v2 with random weights and about a hundred detections in these images."""
    detector = build(RetinaNetOptions(score_threshold=0.05), CLASSES).eval()
    with torch.inference_mode():
        logits, _ = detector.outputs(detector.features(detector.normalize(images)))
        hundredth = logits[0].flatten().topk(100).values[-1]
    with torch.no_grad():
        bias = detector.head.classification_head.cls_logits.bias
        bias += torch.logit(torch.tensor(0.05)) - hundredth
    return detector


def main() -> None:
    """Measure the exported files and print the ratios."""
    options = arguments(__doc__, size=320)
    size = options.size
    images = torch.randint(0, 256, (1, 3, size, size), dtype=torch.uint8)
    detector = _detector(images)
    graph = detector.deployment_graph(size).eval()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        safetensors.torch.save_file(
            {name: value.contiguous() for name, value in detector.state_dict().items()}, folder / "weights"
        )
        write_onnx(graph, folder / "fp32.onnx")
        random = np.random.default_rng(0)
        calibration = [random.integers(0, 256, (3, size, size), dtype=np.uint8) for _ in range(8)]
        quantize(folder / "fp32.onnx", folder / "int8.onnx", _Calibration([images[0].numpy(), *calibration]))
        runtimes = {
            "onnx": OnnxRuntime(folder / "fp32.onnx", options.threads),
            "onnx-int8": OnnxRuntime(folder / "int8.onnx", options.threads),
        }
        candidates: dict[str, Any] = {"eager": torch.inference_mode()(lambda: graph(images))}
        pixels = images.numpy()
        for name, runtime in runtimes.items():
            candidates[name] = lambda runtime=runtime: runtime.run(pixels)
        seconds = time_interleaved(candidates, options.rounds, options.device, options.clock)
        weights = (folder / "weights").stat().st_size
        figures: dict[str, Any] = {f"{name}_ms": value * 1000 for name, value in seconds.items()}
        figures |= {f"{name}_times": seconds["eager"] / seconds[name] for name in runtimes}
        figures["onnx_size_ratio"] = (folder / "fp32.onnx").stat().st_size / weights
        figures["int8_size_ratio"] = (folder / "int8.onnx").stat().st_size / weights
        figures["weights_mb"] = weights / 1e6
        figures["detections"] = int(detector.predict(images).num[0])
    report(
        "export",
        figures["onnx_times"],
        figures,
        options,
        at_least={"onnx_times": 1.4, "onnx-int8_times": 3} if size == 320 else {},
        at_most={"onnx_size_ratio": 1.02, "int8_size_ratio": 0.27},
    )


if __name__ == "__main__":
    main()
