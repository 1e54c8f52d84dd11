"""Objects of a store: a large one over a slow link against one GET, and small ones.

    python -m benchmarks.storage
    python -m benchmarks.storage --megabytes 256 --delay 0.05 --speed 20e6 --small 0

SeaweedFS serves S3 on this machine. The large object is read through a link of 20 ms and 60 MB/s per
connection by one request and by `trainer.storage`, interleaved; the ratio is the median of the rounds'
ratios. Then, without the link, 64 threads read objects of 140 KB.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from minio import Minio

from benchmarks.common import arguments, report
from benchmarks.local_store import KEYS, store, use
from benchmarks.slow_link import slow_link
from trainer import storage

GOAL = 4.0
_SMALL = 140_000  # Bytes of a small object: an image of COCO.


def main() -> None:
    """Measure, and print the figures."""
    options = arguments(__doc__, megabytes=64, delay=0.020, speed=60e6, small=300)
    size, load = options.megabytes * 2**20, os.getloadavg()[0]
    content = os.urandom(size)
    with store() as port:
        use(port)
        storage.write_bytes("s3://bucket/object", content)
        with slow_link(port, delay=options.delay, speed=options.speed) as far:
            rounds = _over_the_link(far, content, options.rounds)
        use(port)
        near = _small_objects(options.small) if options.small else {}
    single, pieces = (statistics.median(times) for times in zip(*rounds, strict=True))
    ratios = [one / other for one, other in rounds]
    figures = {
        "megabytes": options.megabytes,
        "single_mb_s": size / single / 1e6,
        "storage_mb_s": size / pieces / 1e6,
        "ratio": statistics.median(ratios),
        "lowest_ratio": min(ratios),
        **near,
        "load_before": load,
        "load_after": os.getloadavg()[0],
    }
    report("storage", figures["ratio"], figures, options, at_least={"ratio": GOAL})


def _over_the_link(far: int, content: bytes, count: int) -> list[tuple[float, float]]:
    """Return the seconds that one request and `trainer.storage` take, for each round."""
    use(far)
    client = Minio(
        f"127.0.0.1:{far}", access_key=KEYS[0], secret_key=KEYS[1], secure=False, region="us-east-1"
    )
    rounds = []
    for number in range(count + 1):
        single = seconds(lambda: single_get(client), content)
        pieces = seconds(lambda: storage.read_bytes("s3://bucket/object"), content)
        if number:  # the first opens connections and warms the store's cache
            rounds.append((single, pieces))
    return rounds


def _small_objects(count: int) -> dict[str, float]:
    """Return milliseconds to read an object, by the clock and of this process's CPU time."""
    uris = [f"s3://bucket/small/{number % 100}" for number in range(count)]
    for uri in uris[:100]:
        storage.write_bytes(uri, os.urandom(_SMALL))
    start, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(64) as threads:
        list(threads.map(storage.read_bytes, uris))
    took, used = time.perf_counter() - start, time.process_time() - cpu
    return {"get_64_ms": 1e3 * took / count, "get_64_cpu_ms": 1e3 * used / count}


def single_get(client: Minio) -> bytes:
    """Read the object with one request."""
    response = client.get_object("bucket", "object")
    try:
        return response.read()
    finally:
        response.close()
        response.release_conn()


def seconds(read: Callable[[], bytes], content: bytes) -> float:
    """Return how long a way takes to read the object."""
    start = time.perf_counter()
    data = read()
    taken = time.perf_counter() - start
    if data != content:
        sys.exit("error: the bytes that were read are not those that were written")
    return taken


if __name__ == "__main__":
    main()
