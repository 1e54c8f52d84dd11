"""A whole training step against torchvision's: preprocessing, network, loss, gradients, optimiser.

    python -m benchmarks.step                # a CPU: 91 and 601 classes, 256 px; 601, 512 px
    python -m benchmarks.step --cases 91:800,264:800:mlperf,601:800 --images 16 --network graphs   # a GPU

A case is CLASSES:SIZE or CLASSES:SIZE:RECIPE, whose network it takes; @N after it gives it N rounds.
`stock` is torchvision's model and SGD in fp32, `stock_bf16` the same with autocast and channels_last,
`ours` the detector as the loop trains it. Images are ready in memory for all. `saved` is what a forward
pass keeps for the backward pass; on a GPU `peak` is the most memory that a step takes beside weights
and optimiser, what CUDA graphs keep for themselves included, and `waits` how often the host waits for
the device in it.
"""

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import arguments, interleaved, random_batch, report, saved_bytes, stock_model
from trainer import recipes
from trainer.config import ModelConfig
from trainer.model.detector import build

GOALS = {
    "cpu": {
        "ratio_91_256px": 2.0, "ratio_601_256px": 2.3, "ratio_601_512px": 3.5,
        "ratio_to_bf16_91_256px": 1.05, "ratio_to_bf16_601_256px": 1.3,
    },
    "cuda": {
        "images_per_second_91_800px": 400, "images_per_second_601_800px": 205,
        "images_per_second_264_800px_mlperf": 280,
        "ratio_to_bf16_91_800px": 2.5, "ratio_to_bf16_601_800px": 3.0,
    },
}  # fmt: skip
"""Those of a GPU are for one H200."""
MEMORY = {
    "ours_peak_gb_per_image_601_800px": 1.1,
    "ours_waits_91_800px": 0, "ours_waits_601_800px": 0, "ours_waits_264_800px_mlperf": 0,
}  # fmt: skip
"""At most, in GB an image, and times that the host waits."""


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


def stock(
    batch: Any, config: ModelConfig, classes: int, size: int, device: torch.device, *, bf16: bool
) -> Candidate:
    """The step of torchvision's reference script."""
    pixels, _, _, lists = batch
    model = stock_model(classes, size, device, config)
    if bf16:
        model = model.to(memory_format=torch.channels_last)

    def loss() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            return sum(model([image / 255 for image in pixels], lists).values())

    return Candidate(model, loss, fused=False)


def ours(
    batch: Any, config: ModelConfig, classes: int, device: torch.device, *, network: str = ""
) -> Candidate:
    """Our step, as the loop does it; `network` is "", "model" or "graphs" (see `train.compile`)."""
    pixels, boxes, labels, _ = batch
    detector = build(config, classes).to(device, memory_format=torch.channels_last).train()
    if network:
        detector.compile_trunk("reduce-overhead" if network == "graphs" else "default")

    def loss() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return sum(detector(pixels, boxes, labels))

    return Candidate(detector, loss, fused=True)


def graph_memory(segments: list[dict[str, Any]]) -> int:
    """Bytes of the pools that CUDA graphs have to themselves: no allocation in a step tells of them.

    Args:
        segments: of `torch.cuda.memory_snapshot`.
    """
    return sum(part["total_size"] for part in segments if tuple(part["segment_pool_id"]) != (0, 0))


def on_a_gpu(candidate: Candidate, images: int, *, graphs: bool) -> dict[str, float]:
    """Memory of a step beside what stays, in GB an image, and how often the host waits in it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        candidate.step()
        torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchronizing" in str(one.message) for one in caught)
    peak = torch.cuda.max_memory_allocated() - before
    if graphs:
        peak += graph_memory(torch.cuda.memory_snapshot())
    return {"peak_gb_per_image": peak / 1e9 / images, "waits": waits}


def measure(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of one case, by name without the case."""
    described, _, rounds = case.partition("@")
    classes, size, *recipe = described.split(":")
    config = recipes.load(recipe[0]).model if recipe else ModelConfig()
    outputs, side, device = int(classes), int(size), options.device
    if device.type == "cuda":
        torch.compiler.reset()  # the graphs of the case before keep their memory otherwise
    batch = random_batch(options.images, side, outputs, device)
    candidates = {
        "stock": stock(batch, config, outputs, side, device, bf16=False),
        "stock_bf16": stock(batch, config, outputs, side, device, bf16=True),
        "ours": ours(batch, config, outputs, device, network=options.network),
    }
    steps = {name: candidate.step for name, candidate in candidates.items()}
    seconds = interleaved(steps, int(rounds or options.rounds), device, options.clock)
    figures: dict[str, Any] = {f"{name}_s": value for name, value in seconds.items()}
    figures["images_per_second"] = options.images / seconds["ours"]
    figures["ratio"] = seconds["stock"] / seconds["ours"]
    figures["ratio_to_bf16"] = seconds["stock_bf16"] / seconds["ours"]
    for name, candidate in candidates.items():
        if device.type == "cuda":
            graphs = name == "ours" and options.network == "graphs"
            found = on_a_gpu(candidate, options.images, graphs=graphs)
            figures |= {f"{name}_{key}": value for key, value in found.items()}
        else:
            saved = saved_bytes(candidate.loss)
            figures[f"{name}_saved_gb_per_image"] = saved / 1e9 / options.images
    return figures


def main() -> None:
    """Measure every case and print the ratios."""
    options = arguments(__doc__, trains=True, images=2, cases="91:256,601:256,601:512", network="")
    cases = options.cases.split(",")
    figures: dict[str, Any] = {}
    for case in cases:
        label = label_of(case)
        figures |= {f"{key}_{label}": value for key, value in measure(case, options).items()}
        print(f"{case}: {figures[f'ratio_{label}']:.2f}", flush=True)
    goals = GOALS[options.device.type]
    report(
        "step",
        figures[f"ratio_{label_of(headline(cases))}"],
        figures,
        options,
        at_least=goals,
        at_most=MEMORY,
    )


def label_of(case: str) -> str:
    """Return the name that a case has in the figures."""
    classes, size, *recipe = case.partition("@")[0].split(":")
    return "_".join([classes, f"{size}px", *recipe])


def headline(cases: list[str]) -> str:
    """Return the case with the most classes, the last of several."""
    return max(enumerate(cases), key=lambda case: (int(case[1].partition(":")[0]), case[0]))[1]


if __name__ == "__main__":
    main()
