"""Training fed by the loader, by the number of its threads: which number suits a machine.

    python -m benchmarks.workers
    python -m benchmarks.workers --device cuda --recipe openimages_r50 --workers 2,4,8,12,16 --steps 50

Whole steps of a recipe's network on pictures of 640x480 from shards on the disk, with each number of
decoding threads in turn, every second round backwards; on a CPU these share the cores with the step.
`waiting_share` is the part of the time that the step waited for its batch. `same_batch` trains on one
batch again and again: no loader can be faster. `ratio` is the best number's rate over that.
"""

import dataclasses
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, report, run, synchronize
from benchmarks.pictures import make_shards
from benchmarks.training import step_of, without_weights
from trainer.config.schema import Config
from trainer.data.loader import TrainLoader
from trainer.data.shard_index import ShardDataset
from trainer.launching.distributed import World
from trainer.model import recipes
from trainer.training.state import TrainState
from trainer.training.step import TrainStep


def fed(
    step: TrainStep, dataset: ShardDataset, config: Config, world: World, workers: int, steps: int
) -> tuple[float, float]:
    """Images a second, and the share of it that steps wait; 0 workers train on the first batch alone."""
    size = config.train.batch_size
    loader = TrainLoader(
        dataset, dataclasses.replace(config.loader, workers=max(1, workers)), global_batch=size,
        batch_size=size, seed=0, world=world, max_bad_fraction=0.0,
    )  # fmt: skip
    batches = loader.batches(0)
    try:
        batch = next(batches)
        step([batch])
        synchronize(world.device)
        waited, began = 0.0, time.perf_counter()
        for _ in range(steps):
            if workers:
                requested_at = time.perf_counter()
                batch = next(batches)
                waited += time.perf_counter() - requested_at
            step([batch])
        synchronize(world.device)
        seconds = time.perf_counter() - began
    finally:
        batches.close()
        loader.close()
    return steps * size / seconds, waited / seconds


def main() -> None:
    """Measure every number, and print the figures."""
    options = arguments(
        __doc__, trains=True, recipe="small", batch=4, steps=8, images=96, workers="1,2,4"
    )  # fmt: skip
    config = without_weights(recipes.load(options.recipe, {"train.batch_size": options.batch}))
    world = World(0, 1, options.device)
    numbers = [0, *map(int, options.workers.split(","))]
    measurements: dict[int, list[tuple[float, float]]] = {number: [] for number in numbers}
    with tempfile.TemporaryDirectory() as folder:
        dataset = ShardDataset(make_shards(Path(folder) / "made", options.images, 640, 480), "train")
        step = step_of(TrainState(config, len(dataset.categories), world), config, options.batch)
        for turn in range(options.rounds + 1):
            for number in numbers[:: -1 if turn % 2 else 1]:
                result = fed(step, dataset, config, world, number, options.steps)
                if turn:
                    measurements[number].append(result)
    figures: dict[str, Any] = {}
    for number, results in measurements.items():
        name = f"workers_{number}" if number else "same_batch"
        figures[f"images_per_s_{name}"] = statistics.median(rate for rate, _ in results)
        if number:
            figures[f"waiting_share_{name}"] = statistics.median(share for _, share in results)
    best = max(numbers[1:], key=lambda number: figures[f"images_per_s_workers_{number}"])
    figures |= {"best": best, "image_size": config.loader.image_size}
    ratio = figures[f"images_per_s_workers_{best}"] / figures["images_per_s_same_batch"]
    report("workers", ratio, figures, options)


if __name__ == "__main__":
    sys.exit(run(main))
