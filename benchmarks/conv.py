"""The gradients of a class head's last convolution: the library's way against products of matrices.

    python -m benchmarks.conv
    python -m benchmarks.conv --maps 100,50,25 --images 8     # a GPU, 800 px

Square maps of `--maps` places a side with 256 channels, in bf16, at 91 and 601 classes. `gain` is what
`trainer.model.conv_gradients` chooses for each map against the library's way for all: the time of all
maps together.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import arguments, interleaved, report, run
from trainer.model import conv_gradients

CHANNELS, ANCHORS = 256, 9


def operands(outputs: int, side: int, images: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Random gradient of the output, input and kernel, as channels_last in bf16."""
    shapes = (images, outputs, side, side), (images, CHANNELS, side, side), (outputs, CHANNELS, 3, 3)
    gradient, features, kernel = (
        torch.randn(shape, device=device).to(torch.bfloat16, memory_format=torch.channels_last)
        for shape in shapes
    )
    return gradient, features, kernel


def main() -> None:
    """Measure every map both ways and print the milliseconds."""
    options = arguments(__doc__, maps="64,32,16,8", images=2)
    figures: dict[str, Any] = {}
    for classes in (91, 601):
        total = {"library": 0.0, "chosen": 0.0}
        for side in map(int, options.maps.split(",")):
            tensors = operands(ANCHORS * classes, side, options.images, options.device)
            ways = {"library": conv_gradients.by_library, "products": conv_gradients.by_products}
            seconds = interleaved(
                {name: lambda way=way, data=tensors: way(*data, [True] * 3) for name, way in ways.items()},
                options.rounds, options.device, options.clock,
            )  # fmt: skip
            figures |= {f"{name}_{classes}_{side}_ms": value * 1e3 for name, value in seconds.items()}
            total["library"] += seconds["library"]
            total["chosen"] += seconds["products" if conv_gradients.products_pay(tensors[0]) else "library"]
        figures[f"gain_{classes}"] = total["library"] / total["chosen"]
    # The choice must not cost anything where there are few outputs either.
    report("conv", figures["gain_601"], figures, options, at_least={"gain_91": 0.98, "gain_601": 1})


if __name__ == "__main__":
    sys.exit(run(main))
