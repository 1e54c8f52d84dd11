"""Measures how fast this machine trains a detector: a few passes of artificial images, in other processes.

`python -m trainer.training.throughput_probe '{"config": JSON, "classes": number}'` prints images per second.
"""

import dataclasses
import json
import math
import os
import sys
import time

import torch

from trainer.config import parsing
from trainer.config.schema import Config
from trainer.launching.distributed import World
from trainer.model import fused_functions
from trainer.training.batch_fitting import Trial, memory
from trainer.training.state import TrainState

_SECONDS = 3.0  # duration of the measurement, after a first pass
_BOXES = 8  # boxes of an image, as in photographs


def images_per_second(config: Config, classes: int, device: torch.device) -> float:
    """Measure forward and backward passes of one process; 0 if not even one pass fits into the GPU's memory.

    Nothing is compiled or downloaded.
    """
    model = dataclasses.replace(config.model, weights="", sync_batchnorm=False)
    loader, sizes = config.loader, config.loader.sizes
    if sizes:  # A square of their mean area.
        side = 32 * round(math.sqrt(sum(side * side for side in sizes) / len(sizes)) / 32)
        loader = dataclasses.replace(loader, image_size=side, sizes=[])
    config = dataclasses.replace(config, model=model, loader=loader)
    fused_functions.choose(False, device, tell=False)
    trial = Trial(config, TrainState(config, classes, World(0, 1, device)), memory(device), _BOXES)
    start, images = time.perf_counter(), config.train.batch_size
    if device.type == "cpu" and trial(1) and time.perf_counter() - start > _SECONDS:
        images = 1  # A slow CPU; the batch size makes little difference.
    elif not trial(images):  # The first pass chooses kernels, and is slower.
        return 0.0
    start, passes, elapsed = time.perf_counter(), 0, 0.0
    while elapsed < _SECONDS:
        trial(images)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        passes, elapsed = passes + 1, time.perf_counter() - start
    return passes * images / elapsed


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    print(images_per_second(parsing.from_json(request["config"]), request["classes"], device))
