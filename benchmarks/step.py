"""A whole training step against torchvision's: preprocessing, network, loss, gradients, optimizer.

    python -m benchmarks.step                # a CPU: 91 and 601 classes, 256 px; 601, 512 px
    python -m benchmarks.step --cases 91:800,264:800:mlperf,601:800 --images 16 --network graphs   # a GPU

A case is CLASSES:SIZE[:RECIPE][@ROUNDS]. `stock` is torchvision's model in the step of its reference script
in fp32; `stock_bf16` adds autocast and channels_last; `stock_amp` (GPU) is the script's `--amp`. Those that
do not fit into memory are left out. `ours` is the loop's whole step; `ours_augmented` also changes colors,
and `augmented_share` is the part of the rate that it keeps. `saved` is what a forward pass keeps for the
backward pass; `peak` (GPU) the memory of a step besides weights and optimizer. `operators` are those that a
step dispatches, views aside; `waits` counts host waits. `ratio` is to `stock_amp` on a GPU and to `stock` on
a CPU.
"""

import argparse
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.common import arguments, interleaved, random_batch, report, run, saved_bytes, stock_model
from benchmarks.operators import Operators
from benchmarks.training import PHOTOGRAPHS, batch_of, color_maps, step_of, without_weights
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
"""Those of a GPU are for one H200."""
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
"""Autocast type; None is fp32."""
RATIOS = {"stock": "ratio", "stock_bf16": "ratio_to_bf16", "stock_amp": "ratio_to_amp"}


class Candidate(NamedTuple):
    """What is measured."""

    step: Callable[[], Any]  # One training step.
    forward: Callable[[], Any]  # Its loss alone.


class Reference(NamedTuple):
    """A library's network, as its users train it."""

    model: nn.Module
    loss: Callable[[], Tensor]
    optimizer: torch.optim.Optimizer
    clip_norm: float = torch.inf


Library = Callable[[Any, Any, int], Reference]  # of a batch, the options of a network and its classes


def torchvision(batch: Any, config: RetinaNetOptions, classes: int) -> Reference:
    """The model of torchvision and its loss, as in its references/detection/engine.py."""
    pixels, _, _, lists = batch
    model = stock_model(classes, pixels.shape[-1], pixels.device, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9, weight_decay=1e-4)
    return Reference(model, lambda: sum(model([image / 255 for image in pixels], lists).values()), optimizer)


def stock(reference: Reference, device: str, dtype: torch.dtype | None) -> Candidate:
    """The library's network in a plain step, with autocast to `dtype`."""
    model, loss, optimizer, clip_norm = reference
    if dtype == torch.bfloat16:
        model = model.to(memory_format=torch.channels_last)
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)

    def forward() -> Tensor:
        with torch.autocast(device, dtype, enabled=dtype is not None):
            return loss()

    def step() -> None:
        total = forward()
        total.item()  # Scripts of both libraries look in every step whether it is finite.
        scaler.scale(total).backward()
        if clip_norm < torch.inf:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return Candidate(step, forward)


class Case(NamedTuple):
    """A case of `--cases`; see above."""

    classes: int
    size: int  # Side of the images, pixels.
    recipe: str  # Empty: the default network.
    rounds: int  # 0: `--rounds`.

    @property
    def label(self) -> str:
        """The name that the case has in the figures."""
        return "_".join([str(self.classes), f"{self.size}px", *filter(None, [self.recipe])])


def parse(text: str) -> Case:
    """Read CLASSES:SIZE[:RECIPE][@ROUNDS]; raises ConfigError."""
    match = re.fullmatch(r"(\d+):(\d+)(?::(\w+))?(?:@(\d+))?", text)
    if not match:
        raise ConfigError(
            f"--cases: {text!r} is no case",
            fix="write CLASSES:SIZE, CLASSES:SIZE:RECIPE or either with @ROUNDS, as 601:800:mlperf@5",
        )
    classes, size, recipe, rounds = match.groups(default="")
    return Case(int(classes), int(size), recipe, int(rounds or 0))


def ours(
    batch: Any, config: Config, classes: int, device: torch.device, *, network: str = "off"
) -> dict[str, Candidate]:
    """The loop's step with the recipe's colors and with those of photographs."""
    pixels, boxes, labels, _ = batch
    state = TrainState(config, classes, World(0, 1, device))
    if network != "off":
        state.detector.compile_network("reduce-overhead" if network == "graphs" else "default")
    step = step_of(state, config, len(pixels))

    def candidate(color: Tensor | None) -> Candidate:
        inputs = batch_of(pixels, boxes, labels, color)
        return Candidate(lambda: step([inputs]), lambda: step.losses(inputs))

    return {
        "ours": candidate(color_maps(config.loader, len(pixels), device)),
        "ours_augmented": candidate(color_maps(PHOTOGRAPHS, len(pixels), device)),
    }


def graph_memory(segments: list[dict[str, Any]]) -> int:
    """Bytes of the CUDA graphs' own pools, which no allocation shows, from `torch.cuda.memory_snapshot`."""
    return sum(part["total_size"] for part in segments if tuple(part["segment_pool_id"]) != (0, 0))


def on_a_gpu(candidate: Candidate, images: int, *, graphs: bool) -> dict[str, float]:
    """Memory of a step besides weights, in GB per image, and its host waits."""
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


def measure(
    case: Case, options: argparse.Namespace, library: Library, kind: type | tuple[type, ...]
) -> dict[str, Any]:
    """Figures of one case, by name without the case; ConfigError if its options are of another kind."""
    device = options.device
    config = without_weights(recipes.load(case.recipe) if case.recipe else Config())
    if not isinstance(config.model, kind):
        raise ConfigError(
            f"there is no step of a library to compare {config.model.architecture} with",
            fix="measure recipes of retinanet with benchmarks.step, of dfine or rtdetr with detr_step",
        )
    if device.type == "cuda":
        torch.compiler.reset()  # the graphs of the case before keep their memory otherwise
    batch = random_batch(options.images, case.size, case.classes, device)
    theirs = {
        name: stock(library(batch, config.model, case.classes), device.type, dtype)
        for name, dtype in STOCK.items()
        if name != "stock_amp" or device.type == "cuda"
    }
    own = ours(batch, config, case.classes, device, network=options.network)
    # Both of ours come after one of theirs, and find the memory as that has left it.
    candidates = {"stock": theirs["stock"], "ours_augmented": own["ours_augmented"], **theirs, **own}
    steps = {name: candidate.step for name, candidate in candidates.items()}
    seconds = interleaved(steps, case.rounds or options.rounds, device, options.clock, spare=STOCK)
    figures: dict[str, Any] = {f"{name}_s": value for name, value in seconds.items()}
    figures["images_per_second"] = options.images / seconds["ours"]
    figures["augmented_share"] = seconds["ours"] / seconds["ours_augmented"]
    figures |= {RATIOS[name]: seconds[name] / seconds["ours"] for name in STOCK if name in seconds}
    for name in seconds:
        if device.type == "cuda":
            graphs = name.startswith("ours") and options.network == "graphs"
            measured = on_a_gpu(candidates[name], options.images, graphs=graphs)
            figures |= {f"{name}_{key}": value for key, value in measured.items()}
        else:
            saved = saved_bytes(candidates[name].forward)
            figures[f"{name}_saved_gb_per_image"] = saved / 1e9 / options.images
            with Operators() as counted:
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
    """Measure every case, with options of a `kind`, against a library; print the ratios."""
    options = arguments(description, trains=True, images=2, cases=cases, network=("off", "model", "graphs"))
    chosen = [parse(text) for text in options.cases.split(",")]
    figures: dict[str, Any] = {}
    for case in chosen:
        figures |= {
            f"{key}_{case.label}": value for key, value in measure(case, options, library, kind).items()
        }
        print(f"{case.label}: {headline([case], figures):.2f}", flush=True)
    report(
        name,
        headline(chosen, figures),
        figures,
        options,
        at_least=goals.get(options.device.type),
        at_most=MEMORY,
    )


def headline(cases: Sequence[Case], figures: dict[str, Any]) -> float:
    """The ratio of the last case with the most classes that has one, preferably to AMP; 0 without any."""
    ordered = sorted(enumerate(cases), key=lambda pair: (pair[1].classes, pair[0]), reverse=True)
    names = [f"{name}_{case.label}" for _, case in ordered for name in ("ratio_to_amp", *RATIOS.values())]
    return next((figures[name] for name in names if name in figures), 0.0)


if __name__ == "__main__":
    sys.exit(run(main))
