"""The training loader against the limit that decoding and resizing set, and its first batch.

    python -m benchmarks.loader
    python -m benchmarks.loader --cases 1024x768:512 --images 256 --rounds 9

The limit is what the libraries' plain calls take to decode and resize the same JPEGs, which lie in memory,
in as many threads as the loader has, and nothing else: `full_decode`, and `half_dct`, which lets the
decoder divide the sides where the target is small enough, as the loader does. `one_thread` is the latter
without a second thread that shares the caches. `loader` makes batches of the same images from shards:
reading, checking, boxes, flips, padding. All are images a second of CPU time. `stock` is torchvision's
way, a DataLoader of as many processes over single files, PIL and the transforms of v2; it and
`loader_wall` are by the clock.
`first_batch` is the time from opening the shards to a batch: warm from a local disk, cold from an S3
server behind a link of 20 ms and 60 MB/s a connection. `resume` opens a split of 1.74 million samples
and finds the samples in the middle of an epoch that are read next.
"""

import contextlib
import io
import json
import os
import statistics
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

from benchmarks.common import arguments, report
from trainer.config import DataConfig, LoaderConfig
from trainer.data.download import download
from trainer.data.loader import Batch, TrainLoader
from trainer.data.order import SampleStream
from trainer.data.shard_cache import ShardCache
from trainer.data.shard_index import SAMPLE, ShardDataset
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


def in_turn(
    ways: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float]
) -> dict[str, np.ndarray]:
    """Seconds of each way in each round, after one that does not count; every second round is backwards."""
    seconds = {name: np.zeros(rounds + 1) for name in ways}
    for number in range(rounds + 1):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            start = clock()
            ways[name]()
            seconds[name][number] = clock() - start
    return {name: of[1:] for name, of in seconds.items()}


def measure(uri: str, size: int, rounds: int, workers: int) -> dict[str, float]:
    """Medians of the rates, each way in turn."""
    dataset = ShardDataset(uri, "train")
    jpegs = [dataset.read(index)[0] for index in range(len(dataset))]
    # One batch ahead: nothing is decoded while another way is measured.
    config = LoaderConfig(image_size=size, workers=workers, prefetch=1)
    views = [random_view(width, height, config, [0.5] * 5) for width, height in dataset.sizes.tolist()]
    # The sides that the decoder is asked for at least, 0 being as stored, and those that the loader draws.
    halved = [view.crop[:1:-1] if view.divisor > 1 else (0, 0) for view in views]
    wanted = [view.place[:1:-1] for view in views]

    def limit(scaled: bool, part: slice) -> None:
        for jpeg, least, sides in zip(jpegs[part], halved[part], wanted[part], strict=True):
            height, width = least if scaled else (0, 0)
            pixels = simplejpeg.decode_jpeg(jpeg, "RGB", min_height=height, min_width=width)
            image = torch.from_numpy(pixels).permute(2, 0, 1)
            if image.shape[1:] != sides:
                tv.resize(image, sides, antialias=True)

    def side_by_side(scaled: bool) -> None:
        list(pool.map(limit, [scaled] * workers, [slice(k, None, workers) for k in range(workers)]))

    def ours() -> None:
        for _ in range(len(dataset) // BATCH):
            next(batches)

    ways: dict[str, Callable[[], None]] = {
        "full_decode": lambda: side_by_side(False), "half_dct": lambda: side_by_side(True),
        "one_thread": lambda: limit(True, slice(None)), "loader": ours,
    }  # fmt: skip
    with ThreadPoolExecutor(workers) as pool, training(dataset, config) as batches:
        seconds = in_turn(ways, rounds, time.process_time)
    rates = {name: float(len(dataset) / np.median(of)) for name, of in seconds.items()}
    shares = seconds["half_dct"] / seconds["loader"]
    return rates | {"share_of_limit": float(np.median(shares))}


@contextlib.contextmanager
def training(dataset: ShardDataset, config: LoaderConfig) -> Iterator[Iterator[Batch]]:
    """Batches of a training that begins."""
    loader = TrainLoader(
        dataset, config, global_batch=BATCH, batch_size=BATCH, seed=0, world=HERE, max_bad_fraction=0.0
    )
    batches = loader.batches(0)
    try:
        yield batches
    finally:
        batches.close()
        loader.close()


class Files(Dataset[Any]):
    """Single files with eight boxes each, as torchvision's reference takes them in."""

    def __init__(self, folder: Path, size: int) -> None:
        self._paths, self._size = sorted(folder.glob("*.jpg")), size
        self._flip, self._sanitize = v2.RandomHorizontalFlip(0.5), v2.SanitizeBoundingBoxes()
        self._boxes = torch.tensor([[20.0, 20.0, 200.0, 220.0]]).repeat(8, 1)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        image = tv.to_image(Image.open(self._paths[index]).convert("RGB"))
        height, width = image.shape[-2:]
        boxes = tv_tensors.BoundingBoxes(self._boxes, format="XYXY", canvas_size=(height, width))  # type: ignore[call-overload]
        image, target = self._flip(image, {"boxes": boxes, "labels": torch.zeros(8, dtype=torch.int64)})
        scale = self._size / max(height, width)
        high, wide = round(height * scale), round(width * scale)
        image, target = v2.Resize([high, wide], antialias=True)(image, target)
        image, target = v2.Pad([0, 0, self._size - wide, self._size - high], fill=114)(image, target)
        return self._sanitize(image, target)


def against_stock(uri: str, folder: Path, size: int, rounds: int, workers: int) -> dict[str, float]:
    """Images a second by the clock, of whole epochs in turn, and the median of the ratios."""
    dataset = ShardDataset(uri, "train")
    stock = DataLoader(
        Files(folder, size), BATCH, shuffle=True, drop_last=True, num_workers=workers,
        persistent_workers=True,
        collate_fn=lambda pairs: (torch.stack([image for image, _ in pairs]), [of for _, of in pairs]),
    )  # fmt: skip

    def ours() -> None:
        with training(dataset, LoaderConfig(image_size=size, workers=workers)) as batches:
            for _ in range(len(stock)):
                next(batches)

    seconds = in_turn({"stock": lambda: deque(stock, maxlen=0), "loader": ours}, rounds, time.perf_counter)
    images = len(stock) * BATCH
    return {
        "stock": float(images / np.median(seconds["stock"])),
        "loader_wall": float(images / np.median(seconds["loader"])),
        "times_stock": float(np.median(seconds["stock"] / seconds["loader"])),
    }


def first_batch(uri: str, size: int, workers: int, cache: ShardCache) -> float:
    """Seconds from opening the shards to the first batch."""
    start = time.perf_counter()
    with training(
        ShardDataset(uri, "train", cache), LoaderConfig(image_size=size, workers=workers)
    ) as batches:
        next(batches)
        return time.perf_counter() - start


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


def write_large(folder: Path, samples: int = 1_743_042, shard_size: int = 220) -> None:
    """Write the index and the table of a split of so many samples, without the shards."""
    table = np.zeros(samples, SAMPLE)
    table["shard"], table["image_id"] = np.arange(samples) // shard_size, np.arange(samples)
    folder.mkdir()
    np.save(folder / "train.samples.npy", table)
    shards = [
        {
            "name": f"train-{number:05}.tar",
            "samples": count,
            "boxes": 8 * count,
            "bytes": 2**26,
            "sha256": "0" * 64,
        }
        for number, count in enumerate(np.bincount(table["shard"]).tolist())
    ]
    split = {"samples": samples, "boxes": 8 * samples, "shards": shards}
    index = {
        "kind": "shards",
        "categories": [],
        "fingerprint": "",
        "class_counts": {},
        "splits": {"train": split},
    }
    (folder / "index.json").write_text(json.dumps(index))


def resume(folder: Path) -> tuple[float, float]:
    """Seconds by the clock and of the CPU until it is known what is read next in the seventh epoch."""
    start, cpu = time.perf_counter(), time.process_time()
    dataset = ShardDataset(str(folder), "train")
    stream = SampleStream(dataset.shard_sizes, seed=0)
    dataset.expect(stream.ahead(6 * len(dataset) + len(dataset) // 2))
    return time.perf_counter() - start, time.process_time() - cpu


def main() -> None:
    """Measure every case and print the figures."""
    options = arguments(__doc__, cases="1024x768:512,1024x768:800", images=96, cold_images=1000, workers=2)
    options.device = HERE.device  # whatever else the machine has
    figures: dict[str, Any] = {}
    shares = []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        made: dict[str, str] = {}
        for case in ["640x480:512", *filter(None, options.cases.split(","))]:
            sizes, _, size = case.partition(":")
            if sizes not in made:
                made[sizes] = make_shards(folder / sizes, options.images, *map(int, sizes.split("x")))
            found = measure(made[sizes], int(size), options.rounds, options.workers)
            figures |= {f"{name}_{sizes}_to_{size}": value for name, value in found.items()}
            shares.append(found["share_of_limit"])
            uri, side = made[sizes], int(size)
        figures |= against_stock(
            made["640x480"], folder / "640x480" / "train", 512, options.rounds, options.workers
        )
        write_large(folder / "large")
        resumed = [resume(folder / "large") for _ in range(3)]
        figures["resume_1740000_s"], figures["resume_1740000_cpu_s"] = map(min, *resumed)
        warm = [first_batch(uri, side, options.threads, ShardCache(folder / "unused")) for _ in range(3)]
        figures["first_batch_warm_s"] = statistics.median(warm)
        if options.cold_images:
            figures["first_batch_cold_s3_s"] = cold(
                folder / "cold", options.cold_images, side, options.threads
            )
    report(
        "loader", min(shares), figures, options,
        at_least={name: 0.9 for name in figures if name.startswith("share_of_limit_")},
        at_most={"first_batch_warm_s": 0.3, "first_batch_cold_s3_s": 2, "resume_1740000_s": 0.1},
    )  # fmt: skip


if __name__ == "__main__":
    main()
