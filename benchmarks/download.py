"""Compare our download with Open Images' official downloader over a slow link, interleaved.

    python -m benchmarks.download
    python -m benchmarks.download --images 5000 --rounds 3 --connections 32

The official downloader (https://github.com/openimages/dataset/blob/main/downloader.py) calls boto3's
`download_file` in five threads: a HEAD and a GET per image. `official` does this with urllib3, which is
faster than boto3; `plain` omits the HEAD, and the goal compares with it. `ours` is the whole `download` step.
All write to /dev/shm, or to TMPDIR. The ratio is the median of the rounds' ratios.
"""

import csv
import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import urllib3

from benchmarks.common import arguments, report
from benchmarks.slow_server import DELAY, SPEED, slow_server
from trainer.config.schema import DataConfig
from trainer.data.download import download
from trainer.data.sources.openimages import BOXES, DESCRIPTIONS

GOAL = 10
_MEAN_SIZE = 294_000  # Bytes of a training image of Open Images: 513 GB / 1,743,042.


def download_plain(lines: list[str], address: str, folder: Path, *, head: bool) -> None:
    """Fetch the images of lines `split/image_id` as the official downloader does."""
    pool = urllib3.PoolManager(maxsize=5)
    folder.mkdir(parents=True)

    def fetch(line: str) -> None:
        url = f"{address}/{line}.jpg"
        if head and pool.request("HEAD", url).status != 200:
            raise SystemExit(f"error when downloading image {line}")
        response = pool.request("GET", url)
        if response.status != 200:
            raise SystemExit(f"error when downloading image {line}")
        (folder / f"{line.partition('/')[2]}.jpg").write_bytes(response.data)

    with ThreadPoolExecutor(5) as threads:
        list(threads.map(fetch, lines))


def download_ours(address: str, base: Path, folder: Path, connections: int) -> int:
    """Fetch the same images with `download`; return the number of images."""
    source = f"openimages:images={base}/ids.txt,base={base},pixels={address},labels=none,hierarchy=none"
    manifest = download(source, str(folder), DataConfig(threads=connections))
    return sum(split.images for split in manifest.splits.values())


def _mirror(folder: Path, count: int) -> list[str]:
    """Write CSV files with one box per image; return the lines of the image list."""
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
    """Run the downloaders in turn and print the figures."""
    options = arguments(__doc__, images=2000, connections=DataConfig().threads)
    times: dict[str, list[float]] = {"official": [], "plain": [], "ours": []}
    cpu: dict[str, list[float]] = {name: [] for name in times}
    load = os.getloadavg()[0]
    memory = None if os.environ.get("TMPDIR") or not os.path.isdir("/dev/shm") else "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory) as temporary, slow_server(_MEAN_SIZE) as address:
        folder = Path(temporary)
        lines = _mirror(folder / "base", options.images)
        download_ours(address, folder / "base", folder / "warm", options.connections)  # imports, connections
        shutil.rmtree(folder / "warm")
        for number in range(options.rounds):
            for name in times if number % 2 else reversed(times):
                target = folder / "data"
                began, cpu_began = time.perf_counter(), time.process_time()
                if name != "ours":
                    download_plain(lines, address, target, head=name == "official")
                elif download_ours(address, folder / "base", target, options.connections) != options.images:
                    raise SystemExit("error: the download lost images")
                times[name].append((time.perf_counter() - began) / options.images)
                cpu[name].append((time.process_time() - cpu_began) / options.images)
                shutil.rmtree(target)
    ratios = {
        name: [slow / fast for slow, fast in zip(times[name], times["ours"], strict=True)]
        for name in ("official", "plain")
    }
    figures: dict[str, Any] = {
        "bytes_each": _MEAN_SIZE,
        "delay_s": DELAY,
        "bytes_per_s_and_connection": SPEED,
        "ratio": statistics.median(ratios["plain"]),
        "lowest_ratio": min(ratios["plain"]),
        "official_ratio": statistics.median(ratios["official"]),
        "load_before": load,
        "load_after": os.getloadavg()[0],
    }
    for name, values in times.items():
        figures[f"{name}_images_per_s"] = 1 / statistics.median(values)
        figures[f"{name}_cpu_ms_an_image"] = 1e3 * statistics.median(cpu[name])
    report("download", figures["ratio"], figures, options, at_least={"ratio": GOAL})


if __name__ == "__main__":
    main()
