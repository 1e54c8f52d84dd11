"""Measure reads from an object store: a large object over a slow link, and small ones.

    python -m benchmarks.storage
    python -m benchmarks.storage --megabytes 256 --delay 0.05 --speed 20e6 --small 0

SeaweedFS serves S3 on this machine. The large object is read through a link of 20 ms and 60 MB/s per
connection, by one request and by `trainer.storage`, interleaved; the ratio is the median of the rounds'
ratios. Then, without the link, 64 threads read objects of 140 KB and check their hashes, alternating with
plain obstore.
"""

import hashlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import obstore
from minio import Minio
from obstore.store import S3Store

from benchmarks.common import arguments, report
from benchmarks.local_store import KEYS, store, use
from benchmarks.slow_link import slow_link
from trainer import storage

GOAL = 4.0
_SMALL = 140_000  # Bytes of a small object: an image of COCO.


def main() -> None:
    """Measure and print the figures."""
    options = arguments(__doc__, megabytes=64, delay=0.020, speed=60e6, small=400)
    size, load = options.megabytes * 2**20, os.getloadavg()[0]
    content = os.urandom(size)
    with store() as port:
        use(port)
        storage.write_bytes("s3://bucket/object", content)
        with slow_link(port, delay=options.delay, speed=options.speed) as far:
            rounds = _time_large_object(far, content, options.rounds)
        use(port)
        near = _time_small_objects(port, options.small, 2 * options.rounds) if options.small else {}
    single, pieces = (statistics.median(times) for times in zip(*rounds, strict=True))
    ratios = [single / pieces for single, pieces in rounds]
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
    report(
        "storage",
        figures["ratio"],
        figures,
        options,
        at_least={"ratio": GOAL},
        at_most={"read_bytes_cpu_ms": 0.40},
    )


def _time_large_object(far: int, content: bytes, count: int) -> list[tuple[float, float]]:
    """Return the seconds that one request and `trainer.storage` take, for each round."""
    use(far)
    client = Minio(
        f"127.0.0.1:{far}", access_key=KEYS[0], secret_key=KEYS[1], secure=False, region="us-east-1"
    )
    rounds = []
    for number in range(count + 1):
        single = time_read(lambda: single_get(client), content)
        pieces = time_read(lambda: storage.read_bytes("s3://bucket/object"), content)
        if number:  # the first round opens connections and warms the store's cache
            rounds.append((single, pieces))
    return rounds


def _time_small_objects(port: int, count: int, rounds: int) -> dict[str, float]:
    """Return the CPU milliseconds per object to read and hash it, by plain obstore and by `read_bytes`."""
    uris = [f"s3://bucket/small/{number}" for number in range(count)]
    sums = {}
    for uri in uris:
        content = os.urandom(_SMALL)
        storage.write_bytes(uri, content)
        sums[uri] = hashlib.sha256(content).hexdigest()
    bucket = S3Store(
        "bucket",
        endpoint=f"http://127.0.0.1:{port}",
        region="us-east-1",
        access_key_id=KEYS[0],
        secret_access_key=KEYS[1],
        client_options={"allow_http": True},
    )

    def plain(uri: str) -> None:
        data = obstore.get(bucket, uri.removeprefix("s3://bucket/")).bytes()
        if hashlib.sha256(data).hexdigest() != sums[uri]:
            sys.exit("error: the bytes read differ from those written")

    used: dict[str, list[float]] = {"plain_obstore": [], "read_bytes": []}
    with ThreadPoolExecutor(64) as threads:
        for number in range(rounds + 1):
            for name, read in (("plain_obstore", plain), ("read_bytes", storage.read_bytes)):
                cpu = time.process_time()
                list(threads.map(read, uris))
                if number:  # the first round opens connections
                    used[name].append(1e3 * (time.process_time() - cpu) / count)
    return {f"{name}_cpu_ms": statistics.median(times) for name, times in used.items()}


def single_get(client: Minio) -> bytes:
    """Read the object with one request."""
    response = client.get_object("bucket", "object")
    try:
        return response.read()
    finally:
        response.close()
        response.release_conn()


def time_read(read: Callable[[], bytes], content: bytes) -> float:
    """Return the seconds that `read` takes to read the object."""
    start = time.perf_counter()
    data = read()
    taken = time.perf_counter() - start
    if data != content:
        sys.exit("error: the bytes read differ from those written")
    return taken


if __name__ == "__main__":
    main()
