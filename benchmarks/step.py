"""Compare a whole training step with torchvision's: preprocessing, network, loss, gradients, optimizer.

    python -m benchmarks.step                # CPU: 91 and 601 classes at 256 px, 601 at 512 px
    python -m benchmarks.step --cases 91:800,264:800:mlperf,601:800 --images 16 --network graphs   # GPU

A case is CLASSES:SIZE[:RECIPE][@ROUNDS]. `stock` is torchvision's model in the step of its reference script
in fp32; `stock_bf16` adds autocast and channels_last; `stock_amp` (GPU) is the script's `--amp`. They are
skipped if they do not fit into memory. `ours` is the loop's whole step; `ours_augmented` also changes colors,
and `augmented_share` is its rate relative to `ours`. `saved` is the memory that a forward pass saves for the
backward pass; `peak` (GPU) is the memory of a step without weights and optimizer. `operators` are those that
a step dispatches, without views; `waits` counts host waits. `ratio` compares with `stock_amp` on a GPU and
with `stock` on a CPU.
"""

import argparse
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.common import arguments, random_batch, report, run, saved_bytes, stock_model, time_interleaved
from benchmarks.operators import OperatorCounter
from benchmarks.training import PHOTOGRAPHS, color_maps, make_batch, make_step, without_weights
from trainer.base.errors import ConfigError
from trainer.config.schema import Config
from trainer.launching.distributed import World
from trainer.model import recipes
from trainer.model.retinanet.options import RetinaNetOptions
from trainer.training.state import TrainState

GOALS = {
    "cpu": {
        "ratio_91_256px": 2.0,
        "ratio_601_256px": 2.3,
        "ratio_601_512px": 3.5,
        "ratio_to_bf16_91_256px": 1.05,
        "ratio_to_bf16_601_256px": 1.3,
    },
    "cuda": {
        "images_per_second_91_800px": 400,
        "images_per_second_601_800px": 205,
        "images_per_second_264_800px_mlperf": 345,
        "ratio_to_amp_91_800px": 2.5,
        "ratio_to_amp_601_800px": 3.0,
    },
}
"""The GPU goals are for one H200."""
MEMORY = {
    "ours_peak_gb_per_image_601_800px": 1.1, "ours_peak_gb_per_image_264_800px_mlperf": 0.65,
    "ours_waits_91_800px": 0, "ours_waits_601_800px": 0, "ours_waits_264_800px_mlperf": 0,
}  # fmt: skip
"""Upper limits."""
STOCK: dict[str, torch.dtype | None] = {
    "stock": None,
    "stock_bf16": torch.bfloat16,
    "stock_amp": torch.float16,
}
"""Autocast type of each reference; None is fp32."""
RATIOS = {"stock": "ratio", "stock_bf16": "ratio_to_bf16", "stock_amp": "ratio_to_amp"}


class Candidate(NamedTuple):
    """A measured implementation."""

    step: Callable[[], Any]  # One training step.
    forward: Callable[[], Any]  # Its loss alone.


class Reference(NamedTuple):
    """A library's network with its loss and optimizer."""

    model: nn.Module
    loss: Callable[[], Tensor]
    optimizer: torch.optim.Optimizer
    clip_norm: float = torch.inf


Library = Callable[[Any, Any, int], Reference]  # arguments: batch, network options, number of classes


def torchvision(batch: Any, config: RetinaNetOptions, classes: int) -> Reference:
    """Return torchvision's model and loss, as in its references/detection/engine.py."""
    pixels, _, _, lists = batch
    model = stock_model(classes, pixels.shape[-1], pixels.device, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9, weight_decay=1e-4)
    return Reference(model, lambda: sum(model([image / 255 for image in pixels], lists).values()), optimizer)


def stock(reference: Reference, device: str, dtype: torch.dtype | None) -> Candidate:
    """Return a plain training step of the library's network, with autocast to `dtype`."""
    model, loss, optimizer, clip_norm = reference
    if dtype == torch.bfloat16:
        model = model.to(memory_format=torch.channels_last)
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)

    def forward() -> Tensor:
        with torch.autocast(device, dtype, enabled=dtype is not None):
            return loss()

    def step() -> None:
        total = forward()
        total.item()  # The scripts of both libraries check in every step that the loss is finite.
        scaler.scale(total).backward()
        if clip_norm < torch.inf:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return Candidate(step, forward)


class Case(NamedTuple):
    """A case of `--cases`; see the module's docstring."""

    classes: int
    size: int  # Side of the images, pixels.
    recipe: str  # Empty: the default network.
    rounds: int  # 0: `--rounds`.

    @property
    def label(self) -> str:
        """Name of the case in the figures."""
        return "_".join([str(self.classes), f"{self.size}px", *filter(None, [self.recipe])])


def parse_case(text: str) -> Case:
    """Parse CLASSES:SIZE[:RECIPE][@ROUNDS]; raise ConfigError if it is invalid."""
    match = re.fullmatch(r"(\d+):(\d+)(?::(\w+))?(?:@(\d+))?", text)
    if not match:
        raise ConfigError(
            f"--cases: {text!r} is invalid",
            fix="write CLASSES:SIZE[:RECIPE][@ROUNDS], for example 601:800:mlperf@5",
        )
    classes, size, recipe, rounds = match.groups(default="")
    return Case(int(classes), int(size), recipe, int(rounds or 0))


def ours(
    batch: Any, config: Config, classes: int, device: torch.device, *, network: str = "off"
) -> dict[str, Candidate]:
    """Return the loop's step with the recipe's color changes, and with those for photographs."""
    pixels, boxes, labels, _ = batch
    state = TrainState(config, classes, World(0, 1, device))
    if network != "off":
        state.detector.compile_network("reduce-overhead" if network == "graphs" else "default")
    step = make_step(state, config, len(pixels))

    def candidate(color: Tensor | None) -> Candidate:
        inputs = make_batch(pixels, boxes, labels, color)
        return Candidate(lambda: step([inputs]), lambda: step.losses(inputs))

    return {
        "ours": candidate(color_maps(config.loader, len(pixels), device)),
        "ours_augmented": candidate(color_maps(PHOTOGRAPHS, len(pixels), device)),
    }


def graph_memory(segments: list[dict[str, Any]]) -> int:
    """Return the bytes in the private pools of CUDA graphs, from `torch.cuda.memory_snapshot`."""
    return sum(part["total_size"] for part in segments if tuple(part["segment_pool_id"]) != (0, 0))


def measure_gpu_memory(candidate: Candidate, images: int, *, graphs: bool) -> dict[str, float]:
    """Return the memory of a step without weights, in GB per image, and its host waits."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        candidate.step()
        torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchronizing" in str(warning.message) for warning in caught)
    peak = torch.cuda.max_memory_allocated() - before
    if graphs:
        peak += graph_memory(torch.cuda.memory_snapshot())
    return {"peak_gb_per_image": peak / 1e9 / images, "waits": waits}


def measure(
    case: Case, options: argparse.Namespace, library: Library, kind: type | tuple[type, ...]
) -> dict[str, Any]:
    """Return the figures of one case; raise ConfigError if its network is not of `kind`."""
    device = options.device
    config = without_weights(recipes.load(case.recipe) if case.recipe else Config())
    if not isinstance(config.model, kind):
        raise ConfigError(
            f"this benchmark has no reference for {config.model.architecture}",
            fix="use benchmarks.step for retinanet, and benchmarks.detr_step for dfine and rtdetr",
        )
    if device.type == "cuda":
        torch.compiler.reset()  # otherwise the graphs of the previous case keep their memory
    batch = random_batch(options.images, case.size, case.classes, device)
    references = {
        name: stock(library(batch, config.model, case.classes), device.type, dtype)
        for name, dtype in STOCK.items()
        if name != "stock_amp" or device.type == "cuda"
    }
    own = ours(batch, config, case.classes, device, network=options.network)
    # Each of our two steps follows a reference, so both find the memory in the same state.
    candidates = {"stock": references["stock"], "ours_augmented": own["ours_augmented"], **references, **own}
    steps = {name: candidate.step for name, candidate in candidates.items()}
    seconds = time_interleaved(steps, case.rounds or options.rounds, device, options.clock, optional=STOCK)
    figures: dict[str, Any] = {f"{name}_s": value for name, value in seconds.items()}
    figures["images_per_second"] = options.images / seconds["ours"]
    figures["augmented_share"] = seconds["ours"] / seconds["ours_augmented"]
    figures |= {RATIOS[name]: seconds[name] / seconds["ours"] for name in STOCK if name in seconds}
    for name in seconds:
        if device.type == "cuda":
            graphs = name.startswith("ours") and options.network == "graphs"
            measured = measure_gpu_memory(candidates[name], options.images, graphs=graphs)
            figures |= {f"{name}_{key}": value for key, value in measured.items()}
        else:
            saved = saved_bytes(candidates[name].forward)
            figures[f"{name}_saved_gb_per_image"] = saved / 1e9 / options.images
            with OperatorCounter() as counted:
                candidates[name].step()
            figures |= {f"{name}_operators": counted.operators, f"{name}_waits": counted.waits}
    return figures


def main() -> None:
    """Measure every case and print the ratios."""
    compare("step", __doc__, "91:256,601:256,601:512", torchvision, RetinaNetOptions, GOALS)


def compare(
    name: str,
    description: str | None,
    cases: str,
    library: Library,
    kind: type | tuple[type, ...],
    goals: dict[str, dict[str, float]],
) -> None:
    """Compare every case with a library and print the ratios; networks must be of `kind`."""
    options = arguments(description, trains=True, images=2, cases=cases, network=("off", "model", "graphs"))
    chosen = [parse_case(text) for text in options.cases.split(",")]
    figures: dict[str, Any] = {}
    for case in chosen:
        figures |= {
            f"{key}_{case.label}": value for key, value in measure(case, options, library, kind).items()
        }
        print(f"{case.label}: {main_ratio([case], figures):.2f}", flush=True)
    report(
        name,
        main_ratio(chosen, figures),
        figures,
        options,
        at_least=goals.get(options.device.type),
        at_most=MEMORY,
    )


def main_ratio(cases: Sequence[Case], figures: dict[str, Any]) -> float:
    """Return the ratio of the last case with the most classes, preferably to AMP; 0 if there is none."""
    ordered = sorted(enumerate(cases), key=lambda pair: (pair[1].classes, pair[0]), reverse=True)
    names = [f"{name}_{case.label}" for _, case in ordered for name in ("ratio_to_amp", *RATIOS.values())]
    return next((figures[name] for name in names if name in figures), 0.0)


if __name__ == "__main__":
    sys.exit(run(main))
