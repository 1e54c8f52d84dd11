"""The training loader against the limit that decoding and resizing set, and its first batch.

    python -m benchmarks.loader
    python -m benchmarks.loader --cases 640x480:512,1024x768:512 --images 256 --rounds 9

`full_decode` decodes and resizes JPEGs that lie in memory, in one thread, and does nothing else;
`half_dct` lets the decoder divide the sides where the target is small enough, as the loader does: it
is the limit. `loader` makes batches of the same images from shards: reading, checking, boxes, flips.
All are images a second of CPU time. `first_batch` is the time from opening the shards to a batch:
warm from a local disk, cold from an S3 server behind a link of 20 ms and 60 MB/s a connection.
`resume` opens the stream of 1.74 million samples in the middle of an epoch.
"""

import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as tv

from benchmarks.common import arguments, report
from trainer.config import DataConfig, LoaderConfig
from trainer.data.download import download
from trainer.data.loader import TrainLoader, decode
from trainer.data.order import SampleStream
from trainer.data.shard_cache import ShardCache
from trainer.data.shard_index import ShardDataset
from trainer.data.shards import shard
from trainer.data.transforms import random_view
from trainer.distributed import World

HERE = World(0, 1, torch.device("cpu"))
BATCH = 8


def picture(width: int, height: int, seed: int) -> bytes:
    """A JPEG with about as many bytes as a photograph of that size (0.45 a pixel)."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (height // 32, width // 32, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32)
    grain = generator.normal(0, 11, (height, width, 1))
    buffer = io.BytesIO()
    Image.fromarray((pixels + grain).clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def make_shards(folder: Path, images: int, width: int, height: int, target: str = "") -> str:
    """Write that many pictures with eight boxes each as shards; gives their URI."""
    (folder / "train").mkdir(parents=True)
    pictures = [picture(width, height, number) for number in range(min(images, 100))]
    for number in range(images):
        (folder / "train" / f"{number:06}.jpg").write_bytes(pictures[number % len(pictures)])
    boxes = np.random.default_rng(0).uniform([0, 0, 20, 20], [300, 200, 300, 250], (images, 8, 4)).round(1)
    annotations = [
        {"id": 8 * image + place + 1, "image_id": image + 1, "category_id": 1, "bbox": box.tolist(),
         "area": float(box[2] * box[3]), "iscrowd": 0}
        for image, of in enumerate(boxes) for place, box in enumerate(of)
    ]  # fmt: skip
    listed = [
        {"id": number + 1, "file_name": f"{number:06}.jpg", "width": width, "height": height}
        for number in range(images)
    ]
    form = {"images": listed, "annotations": annotations, "categories": [{"id": 1, "name": "thing"}]}
    (folder / "annotations").mkdir()
    (folder / "annotations" / "instances_train.json").write_text(json.dumps(form))
    config = DataConfig(val_fraction=0.0, processes=1)
    target = target or str(folder / "data")
    return shard(download(f"coco:{folder}", target, config), target, config)["uri"]


def cpu_rate(work: Callable[[], int]) -> float:
    """Images for a second of this process's CPU time, all threads together."""
    start = time.process_time()
    return work() / (time.process_time() - start)


def measure(uri: str, size: int, rounds: int, workers: int) -> dict[str, float]:
    """Medians of the rates, each way in turn."""
    dataset = ShardDataset(uri, "train")
    jpegs = [dataset.read(index)[0] for index in range(len(dataset))]
    # One batch ahead: nothing is decoded while another way is measured.
    config = LoaderConfig(image_size=size, workers=workers, prefetch=1)
    loader = TrainLoader(dataset, config, global_batch=BATCH, batch_size=BATCH, seed=0, world=HERE)
    batches = loader.batches(0)

    def limit(scaled: bool) -> int:
        for jpeg, (width, height) in zip(jpegs, dataset.sizes.tolist(), strict=True):
            view = random_view(width, height, config, np.random.default_rng(0))
            image = decode(jpeg, width, height, view.divisor if scaled else 1)
            if image.shape[1:] != view.place[:1:-1]:
                tv.resize(image, view.place[:1:-1], antialias=True)
        return len(jpegs)

    def ours() -> int:
        return sum(len(next(batches).image_ids) for _ in range(len(dataset) // BATCH))

    ways: dict[str, Callable[[], int]] = {
        "full_decode": lambda: limit(False), "half_dct": lambda: limit(True), "loader": ours,
    }  # fmt: skip
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(rounds + 1):
        for name, way in ways.items():
            rate = cpu_rate(way)
            if round_number:
                rates[name].append(rate)
    batches.close()
    loader.close()
    shares = [ours / half for ours, half in zip(rates["loader"], rates["half_dct"], strict=True)]
    medians = {name: statistics.median(of) for name, of in rates.items()}
    return medians | {"share_of_limit": statistics.median(shares)}


def first_batch(uri: str, size: int, workers: int, cache: ShardCache) -> float:
    """Seconds from opening the shards to the first batch."""
    start = time.perf_counter()
    loader = TrainLoader(
        ShardDataset(uri, "train", cache), LoaderConfig(image_size=size, workers=workers), global_batch=BATCH,
        batch_size=BATCH, seed=0, world=HERE,
    )  # fmt: skip
    batches = loader.batches(0)
    next(batches)
    seconds = time.perf_counter() - start
    batches.close()
    loader.close()
    return seconds


def cold(folder: Path, images: int, size: int, workers: int) -> float:
    """Seconds to the first batch of shards in an S3 store behind a slow link, nothing being here."""
    from benchmarks.slow_link import slow_link
    from benchmarks.storage import KEYS, store

    with contextlib.ExitStack() as stack:
        port = stack.enter_context(slow_link(stack.enter_context(store())))
        os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = KEYS
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
        uri = make_shards(folder, images, 1024, 768, "s3://bucket/data")
        return first_batch(uri, size, workers, ShardCache(folder / "cache"))


def resume(samples: int = 1_743_042, shard_size: int = 220) -> float:
    """Seconds to the first sample after a resume in the middle of the seventh epoch."""
    sizes = [shard_size] * (samples // shard_size)
    start = time.perf_counter()
    _ = SampleStream(sizes, seed=0)[6 * sum(sizes) + sum(sizes) // 2]
    return time.perf_counter() - start


def main() -> None:
    """Measure every case and print the figures."""
    options = arguments(
        __doc__, cases="640x480:512,1024x768:512,1024x768:800", images=128, cold_images=1000, workers=2
    )
    figures: dict[str, Any] = {}
    shares = []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        made: dict[str, str] = {}
        for case in options.cases.split(","):
            sizes, _, size = case.partition(":")
            if sizes not in made:
                made[sizes] = make_shards(folder / sizes, options.images, *map(int, sizes.split("x")))
            found = measure(made[sizes], int(size), options.rounds, options.workers)
            figures |= {f"{name}_{sizes}_to_{size}": value for name, value in found.items()}
            shares.append(found["share_of_limit"])
            uri, side = made[sizes], int(size)
        figures["resume_1740000_s"] = min(resume() for _ in range(3))
        warm = [first_batch(uri, side, options.threads, ShardCache(folder / "unused")) for _ in range(3)]
        figures["first_batch_warm_s"] = statistics.median(warm)
        if options.cold_images:
            figures["first_batch_cold_s3_s"] = cold(
                folder / "cold", options.cold_images, side, options.threads
            )
    report("loader", min(shares), figures, options)


if __name__ == "__main__":
    main()
