"""Compare the training loader with plain decoding and resizing; measure the time to its first batch.

    python -m benchmarks.loader
    python -m benchmarks.loader --cases 1024x768:512 --images 256 --rounds 9

`half_dct` and `full_decode` decode and resize the same JPEGs from memory with plain calls of the libraries,
in as many threads as the loader, with and without scaling in the decoder. `half_dct` is the upper limit.
`loader` makes whole batches from shards, `augmented` with the augmentation of `finetune`. These rates are
images per CPU second; `decode_ms` and `resize_ms` are per image in one thread. Rates by the wall clock:
`stock` is torchvision's DataLoader over files, `..._wall` the loader's output on the device. `first_batch` is
the time from opening the shards to the first batch: warm from a local disk, cold from S3 behind a link of 20
ms and 60 MB/s per connection. `resume` opens a split of 1.74 million samples and finds the next samples in
the middle of an epoch.
"""

import argparse
import contextlib
import os
import re
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from benchmarks.common import arguments, report, run, synchronize
from benchmarks.pictures import make_shards, write_large_index
from benchmarks.training import with_photo_augmentation
from trainer.base.errors import ConfigError
from trainer.config.parsing import with_overrides
from trainer.config.schema import Config, LoaderConfig
from trainer.data.batch import Batch
from trainer.data.loader import TrainLoader
from trainer.data.sample_order import SampleStream
from trainer.data.shard_index import ShardCache, ShardDataset
from trainer.data.transforms import random_view
from trainer.launching.distributed import World

CPU = torch.device("cpu")
BATCH = 8
DEFAULT_CASE = "640x480:512"  # The case that is always measured, also against torchvision.
GPU_GOAL = 505  # Images per second at 800 px from 16 cores: more than one H200 trains on.
CLOCK_ROUNDS = 3


def time_in_turn(
    ways: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float]
) -> dict[str, np.ndarray]:
    """Seconds of each way in each round after a warm-up; every second round runs in reverse order."""
    seconds = {name: np.zeros(rounds + 1) for name in ways}
    for number in range(rounds + 1):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            start = clock()
            ways[name]()
            seconds[name][number] = clock() - start
    return {name: values[1:] for name, values in seconds.items()}


def measure(uri: str, size: int, rounds: int, workers: int) -> dict[str, float]:
    """Return the median images per CPU second of each candidate, interleaved."""
    dataset, other = ShardDataset(uri, "train"), ShardDataset(uri, "train")
    images, jpegs = len(dataset), [dataset.read(index)[0] for index in range(len(dataset))]
    # Prefetch one batch only, so nothing is decoded while another candidate is measured.
    config = LoaderConfig(image_size=size, workers=workers, prefetch=1)
    views = [
        random_view(width, height, config, [0.5] * 5, (size, size))
        for width, height in dataset.sizes.tolist()
    ]
    # Smallest sides that the decoder must return (0: the stored size), and final sides in the loader.
    halved = [view.crop[:1:-1] if view.divisor > 1 else (0, 0) for view in views]
    sizes = [view.target[:1:-1] for view in views]

    def limit(scaled: bool, resized: bool, part: slice) -> None:
        for jpeg, minimum, sides in zip(jpegs[part], halved[part], sizes[part], strict=True):
            height, width = minimum if scaled else (0, 0)
            pixels = simplejpeg.decode_jpeg(jpeg, "RGB", min_height=height, min_width=width)
            image = torch.from_numpy(pixels).permute(2, 0, 1)
            if resized and image.shape[1:] != sides:
                tv.resize(image, sides, antialias=True)

    def decode_in_threads(scaled: bool) -> None:
        parts = [slice(k, None, workers) for k in range(workers)]
        list(pool.map(limit, [scaled] * workers, [True] * workers, parts))

    def consume(source: Iterator[Batch]) -> None:
        for _ in range(images // BATCH):
            next(source)

    with (
        ThreadPoolExecutor(workers) as pool,
        training_batches(dataset, config) as plain,
        training_batches(other, with_photo_augmentation(config)) as augmented,
    ):
        ways: dict[str, Callable[[], None]] = {
            "half_dct": lambda: decode_in_threads(True),
            "loader": lambda: consume(plain),
            "augmented": lambda: consume(augmented),
            "one_thread": lambda: limit(True, True, slice(None)),
            "decode": lambda: limit(True, False, slice(None)),
        }
        if any(view.divisor > 1 for view in views):
            ways["full_decode"] = lambda: decode_in_threads(False)
        seconds = time_in_turn(ways, rounds, time.process_time)
    rates = {name: float(images / np.median(values)) for name, values in seconds.items() if name != "decode"}
    return rates | {
        "share_of_limit": float(np.median(seconds["half_dct"] / seconds["loader"])),
        "augmented_share": float(np.median(seconds["loader"] / seconds["augmented"])),
        "decode_ms": float(np.median(seconds["decode"]) / images * 1e3),
        "resize_ms": float(np.median(seconds["one_thread"] - seconds["decode"]) / images * 1e3),
    }


def wall_clock_rates(uri: str, size: int, rounds: int, options: argparse.Namespace) -> dict[str, float]:
    """Return images per second of the whole loader on the device, interleaved."""
    dataset = ShardDataset(uri, "train")
    count = len(dataset) // BATCH
    config = LoaderConfig(image_size=size, workers=options.workers)
    ways = {"loader": config, "augmented": with_photo_augmentation(config)}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, loader_config in ways.items():
            with training_batches(dataset, loader_config, options.device) as batches:
                # Fill the prefetch queue: now the loader starts a batch for each batch taken.
                for _ in range(loader_config.prefetch):
                    next(batches)
                synchronize(options.device)
                start = time.perf_counter()
                for _ in range(count):
                    next(batches)
                synchronize(options.device)
                rates[name].append(count * BATCH / (time.perf_counter() - start))
    return {f"{name}_wall": statistics.median(values) for name, values in rates.items()}


@contextlib.contextmanager
def training_batches(
    dataset: ShardDataset, config: LoaderConfig, device: torch.device = CPU
) -> Iterator[Iterator[Batch]]:
    """Provide the first batches of a training run."""
    loader = TrainLoader(
        dataset,
        config,
        global_batch=BATCH,
        batch_size=BATCH,
        seed=0,
        world=World(0, 1, device),
        max_bad_fraction=0.0,
    )
    batches = loader.batches(0)
    try:
        yield batches
    finally:
        batches.close()
        loader.close()


def stock_loader(folder: Path, size: int, batch: int, workers: int) -> DataLoader[Any]:
    """Return batches of a folder's JPEGs, in squares of `size`, as torchvision's reference reads them."""
    return DataLoader(
        _JpegFiles(folder, size),
        batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=True,
        collate_fn=lambda pairs: (torch.stack([image for image, _ in pairs]), [box for _, box in pairs]),
    )


class _JpegFiles(Dataset[Any]):
    """Files with eight boxes each, read on access."""

    def __init__(self, folder: Path, size: int) -> None:
        self._paths, self._size = sorted(folder.glob("*.jpg")), size
        self._flip, self._sanitize = v2.RandomHorizontalFlip(0.5), v2.SanitizeBoundingBoxes()
        self._boxes = torch.tensor([[20.0, 20.0, 200.0, 220.0]]).repeat(8, 1)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        image = tv.to_image(Image.open(self._paths[index]).convert("RGB"))
        height, width = image.shape[-2:]
        boxes = tv_tensors.BoundingBoxes(self._boxes, format="XYXY", canvas_size=(height, width))
        image, target = self._flip(image, {"boxes": boxes, "labels": torch.zeros(8, dtype=torch.int64)})
        scale = self._size / max(height, width)
        high, wide = round(height * scale), round(width * scale)
        image, target = v2.Resize([high, wide], antialias=True)(image, target)
        image, target = v2.Pad([0, 0, self._size - wide, self._size - high], fill=114)(image, target)
        return self._sanitize(image, target)


def compare_with_stock(uri: str, folder: Path, size: int, rounds: int, workers: int) -> dict[str, float]:
    """Return images per second of whole epochs by the wall clock, interleaved, and the median ratio."""
    dataset, stock = ShardDataset(uri, "train"), stock_loader(folder, size, BATCH, workers)

    def ours() -> None:
        with training_batches(dataset, LoaderConfig(image_size=size, workers=workers)) as batches:
            for _ in range(len(stock)):
                next(batches)

    seconds = time_in_turn(
        {"stock": lambda: deque(stock, maxlen=0), "loader": ours}, rounds, time.perf_counter
    )
    return {
        "stock": float(len(stock) * BATCH / np.median(seconds["stock"])),
        "times_stock": float(np.median(seconds["stock"] / seconds["loader"])),
    }


def first_batch(uri: str, size: int, workers: int, cache: ShardCache) -> float:
    """Return the seconds from opening the shards to the first batch."""
    start = time.perf_counter()
    with training_batches(
        ShardDataset(uri, "train", cache), LoaderConfig(image_size=size, workers=workers)
    ) as batches:
        next(batches)
        return time.perf_counter() - start


def first_cold_batch(folder: Path, images: int, size: int, workers: int) -> float:
    """Return the seconds to the first batch from S3 behind a slow link, with an empty cache."""
    from benchmarks.local_store import KEYS, store
    from benchmarks.slow_link import slow_link

    with contextlib.ExitStack() as stack:
        port = stack.enter_context(slow_link(stack.enter_context(store())))
        os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = KEYS
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
        uri = make_shards(folder, images, 1024, 768, "s3://bucket/data")
        return first_batch(uri, size, workers, ShardCache(folder / "cache"))


def resume(folder: Path) -> tuple[float, float]:
    """Return the wall and CPU seconds to find the next samples in the middle of the seventh epoch."""
    start, cpu = time.perf_counter(), time.process_time()
    dataset = ShardDataset(str(folder), "train")
    stream = SampleStream(dataset.shard_sizes, seed=0)
    dataset.prefetch(stream.next_window(6 * len(dataset) + len(dataset) // 2))
    return time.perf_counter() - start, time.process_time() - cpu


def main() -> None:
    """Measure every case and print the figures."""
    options = arguments(__doc__, cases="1024x768:512,1024x768:800", images=96, cold_images=1000, workers=2)
    cases = [parse_case(case) for case in [DEFAULT_CASE, *filter(None, options.cases.split(","))]]
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        uris: dict[tuple[int, int], str] = {}
        for width, height, size in cases:
            name = f"{width}x{height}"
            if (width, height) not in uris:
                uris[width, height] = make_shards(folder / name, options.images, width, height)
            uri = uris[width, height]
            figures_of_case = measure(uri, size, options.rounds, options.workers)
            figures_of_case |= wall_clock_rates(uri, size, min(options.rounds, CLOCK_ROUNDS), options)
            figures |= {f"{key}_{name}_to_{size}": value for key, value in figures_of_case.items()}
        first = parse_case(DEFAULT_CASE)
        figures |= compare_with_stock(
            uris[first[:2]], folder / "640x480" / "train", first[2], options.rounds, options.workers
        )
        write_large_index(folder / "large")
        resumed = [resume(folder / "large") for _ in range(3)]
        figures["resume_1740000_s"], figures["resume_1740000_cpu_s"] = map(min, *resumed)
        warm = [first_batch(uri, size, options.threads, ShardCache(folder / "unused")) for _ in range(3)]
        figures["first_batch_warm_s"] = statistics.median(warm)
        if options.cold_images:
            figures["first_batch_cold_s3_s"] = first_cold_batch(
                folder / "cold", options.cold_images, size, options.threads
            )
    shares = {name: value for name, value in figures.items() if name.startswith("share_of_limit_")}
    report(
        "loader",
        min(shares.values()),
        figures,
        options,
        at_least=dict.fromkeys(shares, 0.9) | gpu_goals(figures, options),
        at_most={"first_batch_warm_s": 0.3, "first_batch_cold_s3_s": 2, "resume_1740000_s": 0.1},
    )


def parse_case(case: str) -> tuple[int, int, int]:
    """Read WIDTHxHEIGHT:SIZE; raises ConfigError."""
    match = re.fullmatch(r"(\d+)x(\d+):(\d+)", case)
    if not match:
        raise ConfigError(
            f"--cases: {case!r} is invalid", fix="write WIDTHxHEIGHT:SIZE, for example 1024x768:800"
        )
    width, height, size = map(int, match.groups())
    with_overrides(Config(), {"loader.image_size": size}, where=f"--cases: {case!r}")
    return width, height, size


def gpu_goals(figures: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """Return the goals for a machine with a GPU; empty without one."""
    if options.device.type != "cuda":
        return {}
    ways = ("loader_wall_", "augmented_wall_")
    return {name: GPU_GOAL for name in figures if name.startswith(ways) and name.endswith("_to_800")}


if __name__ == "__main__":
    sys.exit(run(main))
