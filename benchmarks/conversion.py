"""Convert raw images in a store to shards in the same store: images per CPU second, and memory.

    python -m benchmarks.conversion
    python -m benchmarks.conversion --images 2000 --rows 200000 --rounds 3

`shard` reads from and writes to SeaweedFS on this machine, with header checks and with full decoding,
interleaved; the CPU time excludes the server's. `..._scaled` rates are scaled to the machine of the goals, by
the decoding rates measured in between. The memory figures are the peak PSS of the download and sharding
processes on tables of many small images; it must not grow with the table.
"""

import csv
import io
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image

from benchmarks.common import arguments, report
from benchmarks.local_store import store, use
from benchmarks.pictures import picture
from trainer import storage
from trainer.config.schema import DataConfig
from trainer.data.download import download
from trainer.data.shards import shard, shards_uri
from trainer.data.sources.openimages import BOXES, DESCRIPTIONS

GOALS = {"headers": 900, "decoding": 350}
"""Images of 640x480 pixels per CPU second on a machine that decodes DECODED of them."""
DECODED = 894  # Images per CPU second of simplejpeg with its fast flags on the goals' machine.
MEMORY_GOAL = 1000  # MB of download or sharding, for any number of images.
_BEGIN = """
import sys
from trainer.config.schema import DataConfig
from trainer.data.download import download
from trainer.data.shards import shard
source, root = sys.argv[1:]
"""
STEPS = {
    "download": _BEGIN + "download(source, root, DataConfig())",
    "shard": _BEGIN + "shard(download(source, root, DataConfig()), root, DataConfig(shard_bytes=1_000_000))",
}


def write_mirror(folder: Path, images: int, boxes_each: int, picture_of: Callable[[int], bytes]) -> str:
    """Write a mirror of Open Images whose images share files; return the source."""
    pixels = folder / "pixels" / "train"
    pixels.mkdir(parents=True)
    kinds = min(images, 64)
    for number in range(kinds):
        (folder / f"{number}.jpg").write_bytes(picture_of(number))
    names = [f"/m/0{number:03}" for number in range(100)]
    for name, header in (
        (DESCRIPTIONS, ["LabelName", "DisplayName"]),
        (BOXES["train"], ["ImageID", "LabelName", "XMin", "XMax", "YMin", "YMax", "IsGroupOf"]),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(header)
            if name == DESCRIPTIONS:
                rows.writerows([mid, f"class {mid}"] for mid in names)
                continue
            for number in range(images):
                image_id = f"{number:016x}"
                (pixels / f"{image_id}.jpg").symlink_to(folder / f"{number % kinds}.jpg")
                for box in range(boxes_each):
                    x = 0.05 * box
                    rows.writerow([image_id, names[(number + box) % 100], x, x + 0.4, 0.1, 0.6, 0])
    (folder / "ids.txt").write_text("".join(f"train/{number:016x}\n" for number in range(images)))
    return (
        f"openimages:images={folder}/ids.txt,base={folder},pixels={folder}/pixels,labels=none,hierarchy=none"
    )


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its finished child processes."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def convert(raw: dict[str, Any], root: str, config: DataConfig) -> float:
    """Shard raw images; return images per CPU second."""
    for name in storage.list_files(shards_uri(raw, root, config)):
        storage.delete(storage.join(shards_uri(raw, root, config), name))
    began = cpu_seconds()
    index = shard(raw, root, config)
    used = cpu_seconds() - began
    return sum(split.samples for split in index.splits.values()) / used


def decode(pictures: list[bytes]) -> float:
    """Decode images; return images per CPU second."""
    began = cpu_seconds()
    for jpeg in pictures:
        simplejpeg.decode_jpeg(jpeg, fastdct=True, fastupsample=True)
    return len(pictures) / (cpu_seconds() - began)


def conversion_rates(images: int, rounds: int, processes: int) -> dict[str, float]:
    """Return the median images per CPU second by kind of check, measured and scaled to the goals' machine."""
    rates: dict[str, list[float]] = {name: [] for name in GOALS}
    scaled: dict[str, list[float]] = {f"{name}_scaled": [] for name in GOALS}
    decoded: list[float] = []
    pictures = [picture(640, 480, seed) for seed in range(64)] * 4
    with tempfile.TemporaryDirectory() as temporary, store() as port:
        use(port)
        root = "s3://bucket/data"
        source = write_mirror(Path(temporary), images, 8, lambda seed: picture(640, 480, seed))
        config = DataConfig(processes=processes)
        raw = download(source, root, config)
        for number in range(rounds + 1):
            decoded.append(decode(pictures))
            for name, values in rates.items():
                rate = convert(raw, root, replace(config, decode_check=name == "decoding"))
                decoded.append(decode(pictures))
                if number:  # the first round opens connections and warms the store
                    values.append(rate)
                    scaled[f"{name}_scaled"].append(rate * DECODED / statistics.mean(decoded[-2:]))
    every = {**rates, **scaled, "decoded": decoded}
    return {name: statistics.median(values) for name, values in every.items()}


def small_picture(seed: int) -> bytes:
    """Return a JPEG of a kilobyte."""
    pixels = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((64, 48)).save(buffer, "JPEG")
    return buffer.getvalue()


def peak_memory(step: str, source: str, root: str) -> float:
    """Run a step in a separate process; return the peak memory of it and its children, in bytes."""
    process = subprocess.Popen([sys.executable, "-c", STEPS[step], source, root], stderr=subprocess.DEVNULL)
    largest = 0
    while process.poll() is None:
        largest = max(largest, sum(map(_memory_share, _process_tree(process.pid))))
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"{step} ended with {process.returncode}")
    return largest


def _process_tree(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(pid for child in children for pid in _process_tree(int(child)))]


def _memory_share(pid: int) -> int:
    """Return the bytes of a process (PSS): shared memory is divided among the processes that share it."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # the process has ended
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def memory_figures(rows: int) -> dict[str, float]:
    """Return the peak memory of download and shard for `rows` images with eight boxes each."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source = write_mirror(folder / "source", rows, 8, small_picture)
        root = str(folder / "data")
        return {step: peak_memory(step, source, root) for step in STEPS}


def main() -> None:
    """Measure and print the figures."""
    options = arguments(__doc__, images=1000, rows=60_000, processes=1)
    began, load = time.time(), os.getloadavg()[0]
    figures: dict[str, Any] = {}
    for name, rate in conversion_rates(options.images, options.rounds, options.processes).items():
        figures[f"{name}_images_per_cpu_s"] = rate
    for rows in (options.rows // 10, options.rows):
        for name, bytes_taken in memory_figures(rows).items():
            figures[f"{name}_peak_mb_of_{rows}_rows"] = bytes_taken / 1e6
    figures |= {"load_before": load, "load_after": os.getloadavg()[0], "seconds": time.time() - began}
    least = {f"{name}_scaled_images_per_cpu_s": float(goal) for name, goal in GOALS.items()}
    most = {name: float(MEMORY_GOAL) for name in figures if "peak" in name}
    ratio = min(figures[name] / goal for name, goal in least.items())
    report("conversion", ratio, figures, options, at_least=least, at_most=most)


if __name__ == "__main__":
    main()
