"""How fast this machine trains a detector: a few passes of made-up images, in processes of their own.

`python -m trainer.training.machine_speed` reads {"config": its JSON, "classes": a number} and writes
images per second.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from contextlib import suppress

import torch

from trainer.base.worker_pool import threads_of_process
from trainer.config import parsing
from trainer.config.schema import Config
from trainer.launching.distributed import World
from trainer.model import fused_functions
from trainer.training.batch_fitting import Trial, memory
from trainer.training.state import TrainState

SECONDS = 3.0
"""How long it measures, after a first pass."""
_BOXES = 8
"""Of an image, as photographs have them."""
_LONGEST_WAIT = 180.0
"""For the answers of all processes, in seconds."""


def images_per_second(config: Config, classes: int, device: torch.device, seconds: float = SECONDS) -> float:
    """Measure forward and backward passes of one process on made-up images.

    Args:
        config: its model, image size, batch size and precision count. Nothing is compiled and no weights are
            fetched.
        classes: of the data.
        device: where it trains.
        seconds: how long, at least; one pass is made in any case.

    Returns:
        Images per second; 0 where not even one pass fits into the GPU's memory.
    """
    model = dataclasses.replace(config.model, weights="", sync_batchnorm=False)
    config = dataclasses.replace(config, model=model)
    fused_functions.choose(False, device, tell=False)
    trial = Trial(config, TrainState(config, classes, World(0, 1, device)), memory(device), _BOXES)
    start, images = time.perf_counter(), config.train.batch_size
    if device.type == "cpu" and trial(1) and time.perf_counter() - start > seconds:
        images = 1  # Nobody should wait for more of them: a CPU is as fast with one.
    elif not trial(images):  # The first pass chooses kernels, and is slower.
        return 0.0
    start, passes, elapsed = time.perf_counter(), 0, 0.0
    while elapsed < seconds:
        trial(images)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        passes, elapsed = passes + 1, time.perf_counter() - start
    return passes * images / elapsed


def measure(config: Config, classes: int, processes: int) -> float:
    """Return images per second that processes of this machine train side by side; 0 if that fails.

    Their memory is free again when the training begins.

    Args:
        config: as it would be trained.
        classes: of the data.
        processes: of the training, each with its share of the cores or a GPU.
    """
    request = json.dumps({"config": parsing.to_json(config), "classes": classes})
    threads = {"OMP_NUM_THREADS": str(threads_of_process(processes))}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "trainer.training.machine_speed"],
            env={**threads, **os.environ, "LOCAL_RANK": str(rank)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )
        for rank in range(processes)
    ]  # fmt: skip
    try:
        for process in started:  # All of them first: they are to share the machine.
            with suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.write(request)
                process.stdin.close()
                process.stdin = None
        until = time.monotonic() + _LONGEST_WAIT
        answers = [process.communicate(timeout=until - time.monotonic())[0] for process in started]
        rates = [float(answer.split()[-1]) for answer in answers]
    except (subprocess.SubprocessError, ValueError, IndexError):
        return 0.0
    finally:
        for process in started:
            process.kill()
            process.wait()
    return sum(rates) if all(rates) else 0.0


def _main() -> None:
    request = json.load(sys.stdin)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    print(images_per_second(parsing.from_json(request["config"]), request["classes"], device))


if __name__ == "__main__":
    _main()
