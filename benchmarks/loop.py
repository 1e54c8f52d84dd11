"""Measure a whole training run on one device: the loop against its own step, and the evaluation.

    python -m benchmarks.loop                                                    # on a CPU
    python -m benchmarks.loop --size 800 --images 16 --samples 1024 --epochs 12 --network graphs   # a GPU

`loop_images_per_second` is the rate in the second half of the training run, with loading, checkpoints and
logging; `step_images_per_second` is that of the step alone, for the same network and random images; `ratio`
is the first divided by the second. `busy_share` (GPU) is the share of that time in which kernels run,
according to nvidia-smi. `evaluation_images_per_second` is the rate of detection in the test split, from
shards to boxes. `ap` and `ap_cpu` are the scores of the same checkpoint on the device and on the CPU.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import arguments, random_batch, report, run, time_interleaved
from benchmarks.training import color_maps, make_batch, make_step, without_weights
from trainer.config.schema import Config
from trainer.data.download import download
from trainer.data.shard_index import ShardDataset
from trainer.data.shards import shard
from trainer.evaluation import coco
from trainer.evaluation.inference import predict_split
from trainer.evaluation.truth_and_predictions import Truth
from trainer.export import loading
from trainer.launching.distributed import World
from trainer.model import recipes
from trainer.training.loop import train
from trainer.training.state import TrainState
from trainer.training.step import compile_detector

GOALS = {"ratio": 0.95}
LIMITS = {"ap_difference": 1e-3}


def main() -> None:
    """Train, time the step, and score the result."""
    options = arguments(
        __doc__,
        trains=True,
        images=4,
        size=256,
        samples=192,
        epochs=4,
        recipe="coco_r50",
        workers=0,
        network=("off", "model", "graphs"),
    )
    config = make_config(options)
    with tempfile.TemporaryDirectory() as folder:
        source = f"sample:images={options.samples},size={options.size}"
        shards = shard(download(source, folder, config.data), folder, config.data).uri
        with _utilization(options.device) as readings:
            result = train(config, shards, f"{folder}/run")
        rows = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
        figures = second_half_rate([row for row in rows if row["kind"] == "train"], options.images)
        busy = [share for at, share in readings if at > readings[-1][0] - figures["seconds"]]
        if busy:
            figures["busy_share"] = statistics.mean(busy)
        classes = len(ShardDataset(shards, "train").categories)
        figures["step_images_per_second"] = step_rate(config, classes, options)
        figures |= score_checkpoint(result["checkpoint"], shards, config, options.device)
    ratio = figures["loop_images_per_second"] / figures["step_images_per_second"]
    report("loop", ratio, figures | {"ratio": ratio}, options, at_least=GOALS, at_most=LIMITS)


def make_config(options: argparse.Namespace) -> Config:
    """Return the recipe's configuration with random weights and one validation at the end."""
    config = without_weights(recipes.load(options.recipe))
    compiled = {"off": "loss", "model": "model", "graphs": "graphs"}[options.network]
    return dataclasses.replace(
        config,
        loader=dataclasses.replace(
            config.loader,
            image_size=options.size,
            workers=options.workers or len(os.sched_getaffinity(0)),
        ),
        train=dataclasses.replace(
            config.train,
            batch_size=options.images,
            epochs=options.epochs,
            minutes=0.0,
            patience=0,
            validate_every=options.epochs,
            log_every=2,
            compile=compiled if options.compile else "off",
        ),
    )


def second_half_rate(rows: list[dict[str, Any]], images: int) -> dict[str, float]:
    """Return seconds and rate of the second half, from rows with the mean rate since the start."""
    ends = [row["step"] * images / row["images_per_second"] for row in rows]
    middle = len(rows) // 2
    seconds = ends[-1] - ends[middle]
    done = (rows[-1]["step"] - rows[middle]["step"]) * images
    return {"seconds": seconds, "loop_images_per_second": done / seconds}


def step_rate(config: Config, classes: int, options: argparse.Namespace) -> float:
    """Return images per second of the step alone, on random images with eight boxes each."""
    device, images = options.device, options.images
    world = World(0, 1, device)
    state = TrainState(config, classes, world)
    compile_detector(state.detector, config.train.compile, world)
    step = make_step(state, config, images)
    pixels, boxes, labels, _ = random_batch(images, options.size, classes, device)
    batch = make_batch(pixels, boxes, labels, color_maps(config.loader, images, device))
    seconds = time_interleaved({"step": lambda: step([batch])}, options.rounds, device, options.clock)
    return images / seconds["step"]


def score_checkpoint(checkpoint: str, shards: str, config: Config, device: torch.device) -> dict[str, float]:
    """Score a checkpoint on the device and on the CPU."""
    dataset = ShardDataset(shards, "test")
    truth = Truth.from_coco(dataset.annotations())
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    found: dict[str, float] = {}
    # The first pass on the device is a warm-up; the second one is timed.
    for name, target in (("ap", device), ("ap", device), ("ap_cpu", torch.device("cpu"))):
        predict = loading.load_model(checkpoint, target).predict
        start = time.perf_counter()
        predictions = predict_split(predict, dataset, config, World(0, 1, target))
        if name == "ap":
            found["evaluation_images_per_second"] = len(dataset) / (time.perf_counter() - start)
        found[name] = coco.evaluate(truth, predictions).metrics["coco/AP"]
    return found | {"ap_difference": abs(found["ap"] - found["ap_cpu"])}


@contextlib.contextmanager
def _utilization(device: torch.device) -> Iterator[list[tuple[float, float]]]:
    """Collect pairs of a time and the share of the last sampling period in which the GPU ran kernels."""
    readings: list[tuple[float, float]] = []
    if device.type != "cuda":
        yield readings
        return
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--loop-ms=500"]
    with subprocess.Popen(
        [*command, f"--id={device.index or 0}"], stdout=subprocess.PIPE, text=True
    ) as watch:

        def read() -> None:
            assert watch.stdout is not None
            readings.extend((time.monotonic(), float(line) / 100) for line in watch.stdout if line.strip())

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            yield readings
        finally:
            watch.terminate()
            reader.join()


if __name__ == "__main__":
    sys.exit(run(main))
