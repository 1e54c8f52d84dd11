"""The gradients of a class head's last convolution: the library's way against products of matrices.

    python -m benchmarks.conv
    python -m benchmarks.conv --maps 100,50,25 --images 8     # a GPU, 800 px

Square maps of `--maps` places a side with 256 channels, in bf16, at 91 and 601 classes. `gain` is what
`trainer.model.conv_gradients` chooses for each map against the library's way for all: the time of all
maps together. `padding_gain` is what the convolution and its gradients in the library's way would gain, or
lose, if the outputs (819 and 5409) were padded to a multiple of 8, as the tensor cores of a GPU want them.
"""

import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import arguments, interleaved, report, run
from trainer.model import conv_gradients

CHANNELS, ANCHORS = 256, 9
MULTIPLE = 8
"""Of channels: 16 bytes of bf16 (NVIDIA, Deep Learning Performance, Convolutional Layers)."""


def operands(outputs: int, side: int, images: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Random gradient of the output, input and kernel, as channels_last in bf16."""
    shapes = (images, outputs, side, side), (images, CHANNELS, side, side), (outputs, CHANNELS, 3, 3)
    gradient, features, kernel = (
        torch.randn(shape, device=device).to(torch.bfloat16, memory_format=torch.channels_last)
        for shape in shapes
    )
    return gradient, features, kernel


def ways(outputs: int, side: int, images: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    """What is measured of a map, by name."""
    tensors = operands(outputs, side, images, device)
    padded = operands(-(-outputs // MULTIPLE) * MULTIPLE, side, images, device)
    return {
        "library": lambda: conv_gradients.by_library(*tensors, [True] * 3),
        "products": lambda: conv_gradients.by_products(*tensors, [True] * 3),
        "padded_library": lambda: conv_gradients.by_library(*padded, [True] * 3),
        "forward": lambda: F.conv2d(tensors[1], tensors[2], padding=1),
        "padded_forward": lambda: F.conv2d(padded[1], padded[2], padding=1),
    }


def main() -> None:
    """Measure every map in all ways and print the milliseconds."""
    options = arguments(__doc__, maps="64,32,16,8", images=2)
    figures: dict[str, Any] = {}
    for classes in (91, 601):
        total: dict[str, float] = defaultdict(float)
        for side in map(int, options.maps.split(",")):
            outputs = ANCHORS * classes
            candidates = ways(outputs, side, options.images, options.device)
            seconds = interleaved(candidates, options.rounds, options.device, options.clock)
            figures |= {f"{name}_{classes}_{side}_ms": value * 1e3 for name, value in seconds.items()}
            gradient = operands(outputs, side, options.images, options.device)[0]
            for name, value in seconds.items():
                total[name] += value
            total["chosen"] += seconds["products" if conv_gradients.products_pay(gradient) else "library"]
        figures[f"gain_{classes}"] = total["library"] / total["chosen"]
        plain, padded = ("library", "forward"), ("padded_library", "padded_forward")
        figures[f"padding_gain_{classes}"] = sum(total[name] for name in plain) / sum(
            total[name] for name in padded
        )
    # The choice must not cost anything where there are few outputs either.
    report("conv", figures["gain_601"], figures, options, at_least={"gain_91": 0.98, "gain_601": 1})


if __name__ == "__main__":
    sys.exit(run(main))
