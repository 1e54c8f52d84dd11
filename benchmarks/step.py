"""A whole training step against torchvision's: preprocessing, network, loss, gradients, optimiser.

    python -m benchmarks.step                # a CPU: 91 and 601 classes, 256 px; 601, 512 px
    python -m benchmarks.step --cases 91:800,601:800 --images 16 --rounds 20     # a GPU

`stock` is torchvision's model and SGD in fp32, `stock_bf16` the same with autocast and
channels_last, `ours` the detector as the loop trains it. Images are ready in memory for all.
`saved` is what a forward pass keeps for the backward pass.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import arguments, interleaved, random_batch, report, saved_bytes, stock_model
from trainer.config import ModelConfig
from trainer.model.detector import build


class Candidate:
    """A model, its optimiser and how its loss is computed."""

    def __init__(self, model: nn.Module, loss: Callable[[], Tensor], *, fused: bool) -> None:
        self.loss = loss
        self._optimizer = torch.optim.SGD(
            model.parameters(), lr=1e-6, momentum=0.9, weight_decay=1e-4, fused=fused
        )

    def step(self) -> None:
        """One training step."""
        self.loss().backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def stock(batch: Any, classes: int, size: int, device: torch.device, *, bf16: bool) -> Candidate:
    """The step of torchvision's reference script."""
    pixels, _, _, lists = batch
    model = stock_model(classes, size, device)
    if bf16:
        model = model.to(memory_format=torch.channels_last)

    def loss() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            return sum(model([image / 255 for image in pixels], lists).values())

    return Candidate(model, loss, fused=False)


def ours(batch: Any, classes: int, device: torch.device) -> Candidate:
    """Our step, as the loop does it."""
    pixels, boxes, labels, _ = batch
    detector = build(ModelConfig(), classes).to(device, memory_format=torch.channels_last).train()

    def loss() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return sum(detector(pixels, boxes, labels))

    return Candidate(detector, loss, fused=True)


def main() -> None:
    """Measure every case and print the ratios."""
    options = arguments(__doc__, images=2, cases="91:256,601:256,601:512")
    cases = [tuple(map(int, case.split(":"))) for case in options.cases.split(",")]
    figures: dict[str, Any] = {}
    for classes, size in cases:
        batch = random_batch(options.images, size, classes, options.device)
        candidates = {
            "stock": stock(batch, classes, size, options.device, bf16=False),
            "stock_bf16": stock(batch, classes, size, options.device, bf16=True),
            "ours": ours(batch, classes, options.device),
        }
        steps = {name: candidate.step for name, candidate in candidates.items()}
        seconds = interleaved(steps, options.rounds, options.device, options.clock)
        case = f"{classes}_{size}px"
        for name, value in seconds.items():
            figures[f"{name}_{case}_s"] = value
        figures[f"images_per_second_{case}"] = options.images / seconds["ours"]
        figures[f"ratio_{case}"] = seconds["stock"] / seconds["ours"]
        figures[f"ratio_to_bf16_{case}"] = seconds["stock_bf16"] / seconds["ours"]
        for name, candidate in candidates.items():
            figures[f"{name}_saved_{case}_gb_per_image"] = saved_bytes(candidate.loss) / 1e9 / options.images
    classes, size = cases[-1]
    report("step", figures[f"ratio_{classes}_{size}px"], figures, options)


if __name__ == "__main__":
    main()
