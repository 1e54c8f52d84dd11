"""Our download against what Open Images' own downloader does, over a slow link, in turns.

    python benchmarks/download.py [--images 1500] [--rounds 3] [--threads N]

The official downloader (https://github.com/openimages/dataset/blob/main/downloader.py) takes a file of
lines `split/image_id` and gives each line to one of five threads, which call boto3's `download_file`.
That asks for the object's head, then for its bytes, over a connection that stays open. `plain` does the
same with urllib3 alone, which costs less time than boto3. Ours is `download` whole: listing, tables,
images and manifest. Both write images to the disk. The last line is JSON.
"""

import argparse
import csv
import json
import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import urllib3
from slow_server import DELAY, SPEED, slow_server

from trainer.config import DataConfig
from trainer.data.download import download
from trainer.data.sources.openimages import BOXES, DESCRIPTIONS

GOAL = 10
_MEAN_SIZE = 294_000
"""Bytes of a training image of Open Images: 513 GB / 1,743,042."""


def plain(lines: list[str], address: str, folder: Path) -> None:
    """Fetch images as the official downloader does: five threads, the first error ends everything."""
    pool = urllib3.PoolManager(maxsize=5)
    folder.mkdir(parents=True)

    def one(line: str) -> None:
        url = f"{address}/{line}.jpg"
        if pool.request("HEAD", url).status != 200:
            raise SystemExit(f"error when downloading image {line}")
        (folder / f"{line.partition('/')[2]}.jpg").write_bytes(pool.request("GET", url).data)

    with ThreadPoolExecutor(5) as threads:
        list(threads.map(one, lines))


def ours(address: str, base: Path, folder: Path, threads: int) -> int:
    """Fetch the same images with `download`; return how many came."""
    source = f"openimages:images={base}/ids.txt,base={base},pixels={address},labels=none"
    made = download(source, str(folder), DataConfig(threads=threads))
    return sum(split["images"] for split in made["splits"].values())


def _mirror(folder: Path, count: int) -> list[str]:
    """Write CSV files of one box an image; return the lines of the image list."""
    ids = [f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}" for number in range(1, count + 1)]
    for name, header, rows in (
        (DESCRIPTIONS, ["LabelName", "DisplayName"], [["/m/01yrx", "Cat"]]),
        (
            BOXES["train"],
            ["ImageID", "LabelName", "XMin", "XMax", "YMin", "YMax", "IsGroupOf"],
            [[image_id, "/m/01yrx", 0.1, 0.9, 0.1, 0.9, 0] for image_id in sorted(ids)],
        ),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("w", newline="") as file:
            csv.writer(file).writerows([header, *rows])
    lines = [f"train/{image_id}" for image_id in ids]
    (folder / "ids.txt").write_text("\n".join(lines))
    return lines


def main() -> None:
    """Run both in turns and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=DataConfig().threads)
    options = parser.parse_args()
    times: dict[str, list[float]] = {"plain": [], "ours": []}
    cpu: dict[str, list[float]] = {"plain": [], "ours": []}
    with tempfile.TemporaryDirectory() as temporary, slow_server(_MEAN_SIZE) as address:
        folder = Path(temporary)
        lines = _mirror(folder / "base", options.images)
        ours(address, folder / "base", folder / "warm", options.threads)  # imports, connections
        shutil.rmtree(folder / "warm")
        for number in range(options.rounds):
            for name in times if number % 2 else reversed(times):
                target = folder / "data"
                began, cpu_began = time.perf_counter(), time.process_time()
                if name == "plain":
                    plain(lines, address, target)
                elif ours(address, folder / "base", target, options.threads) != options.images:
                    raise SystemExit("ours lost images")
                times[name].append(time.perf_counter() - began)
                cpu[name].append((time.process_time() - cpu_began) / options.images)
                shutil.rmtree(target)
                print(
                    f"round {number + 1} {name}: {options.images / times[name][-1]:.0f} images/s", flush=True
                )
    ratios = [slow / fast for slow, fast in zip(*times.values(), strict=True)]
    result = {
        "benchmark": "download",
        "images": options.images,
        "bytes_each": _MEAN_SIZE,
        "delay_s": DELAY,
        "bytes_per_s_and_connection": SPEED,
        "threads": options.threads,
        "cores": len(os.sched_getaffinity(0)),
        "images_per_s": {
            name: round(options.images / statistics.median(found)) for name, found in times.items()
        },
        "cpu_ms_an_image": {name: round(1e3 * statistics.median(found), 2) for name, found in cpu.items()},
        "load_average": os.getloadavg()[0],
        "times_as_fast": round(statistics.median(ratios), 1),
        "goal": GOAL,
        "met": statistics.median(ratios) >= GOAL,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
