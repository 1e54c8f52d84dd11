"""What the tests of stores share; the fixtures `proxy` and `hurried` are in tests/support."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_store import hurried, proxy

__all__ = ["hurried", "proxy"]


@pytest.fixture
def unhashed_store(bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A store of its own for large objects: the shared one hashes the whole object for every request."""
    (tmp_path / "store" / "bucket").mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [str(Path(sys.executable).with_name("rclone")), "serve", "s3", "--config", "/dev/null"]
    command += ["--etag-hash", "", "--auth-key", "key,secretsecret", "--addr", address]
    server = subprocess.Popen([*command, str(tmp_path / "store")], stderr=subprocess.DEVNULL)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{address}")
    yield
    server.terminate()
    server.wait()
