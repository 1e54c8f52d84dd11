"""Bytes that are counted where they pass: of every way to read and write, of threads and of processes."""

import os
import secrets
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context

import pytest
from at_once import at_once
from prepared_server import Server

from trainer import storage
from trainer.base import worker_pool
from trainer.storage import objects, traffic
from trainer.storage.environment import client, settings
from trainer.storage.url_policy import UrlPolicy

MB = 1024 * 1024


@pytest.fixture
def counted(tmp_path):
    """Tells what was counted since the fixture began."""
    folder = tmp_path / "traffic"
    folder.mkdir()
    traffic.count_in(folder)
    yield partial(traffic.total, folder)
    traffic.count_in(None)


@pytest.fixture
def server(hurried):
    started = Server()
    yield started
    started.stop()


def read_small():
    storage.read_bytes("s3://bucket/small")


def read_one(name):
    return len(storage.read_bytes(f"s3://bucket/{name}"))


@pytest.mark.parametrize(
    ("work", "moved"),
    [
        (read_small, 1000),
        (lambda: storage.read_bytes("s3://bucket/large"), 9 * MB),
        (lambda: storage.local_copy("s3://bucket/large", sha256="").stat(), 9 * MB),
        (lambda: storage.open_reader("s3://bucket/small").read(), 1000),
        (lambda: list(ThreadPoolExecutor(4).map(lambda _: read_small(), range(40))), 40_000),
    ],
    ids=["small", "large", "copy", "reader", "threads"],
)
def test_what_is_read_of_a_store(bucket, counted, work, moved, monkeypatch, tmp_path):
    monkeypatch.setenv("KUBEDET_CACHE_DIR", str(tmp_path / "cache"))
    (bucket / "small").write_bytes(b"x" * 1000)
    (bucket / "large").write_bytes(b"x" * 9 * MB)
    work()
    assert counted() == (moved, 0)


def test_pieces_and_parts_of_a_store_that_gives_them(bucket, moto_server, counted, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_server)
    name = f"kubedet-test-{secrets.token_hex(6)}"
    client(settings("s3")).make_bucket(name)
    storage.write_bytes(f"s3://{name}/large", b"x" * 9 * MB)
    assert counted() == (0, 9 * MB)
    storage.read_range(f"s3://{name}/large", 5, 77)
    assert counted().read == 77
    storage.read_bytes(f"s3://{name}/large")
    assert counted().read == 9 * MB + 77


def test_what_is_read_of_the_web_with_and_without_care(server, counted):
    assert storage.read_bytes(server.url) == b"hello"
    assert counted().read == 5
    server.answer = b"HTTP/1.1 200 OK\r\n\r\nhello"  # of no length
    server.closes = True
    assert storage.read_bytes(server.url) == b"hello"
    assert counted().read == 10
    policy = UrlPolicy((server.url,))
    assert storage.read_within(server.url, policy) == b"hello"
    assert counted() == (15, 0)


@pytest.mark.parametrize("size", [1000, 2 * objects.PART + 1])
def test_what_is_written_and_read_back(bucket, counted, size):
    storage.write_bytes("s3://bucket/new", b"x" * size)
    assert counted() == (0, size)
    storage.write_bytes("s3://bucket/new", b"x" * size, confirm=True)
    assert counted() == (size, 2 * size)


def test_a_file_that_is_uploaded(bucket, counted, tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 3000)
    storage.upload(tmp_path / "file", "s3://bucket/file")
    assert counted() == (0, 3000)


def test_what_lies_on_a_disk_is_not_counted(counted, tmp_path):
    storage.write_bytes(str(tmp_path / "x"), b"x" * 1000)
    assert storage.read_bytes(str(tmp_path / "x")) == b"x" * 1000
    assert counted() == (0, 0)


def test_workers_of_a_pool_count_too(bucket, counted):
    (bucket / "small").write_bytes(b"x" * 1000)
    sizes = worker_pool.run(read_one, ["small"] * 6, 2, processes=True)
    assert list(sizes) == [1000] * 6
    assert counted() == (6000, 0)


def test_a_process_that_was_killed_has_counted(bucket, counted):
    (bucket / "small").write_bytes(b"x" * 1000)
    program = (
        "import os, signal\nfrom trainer import storage\nstorage.read_bytes('s3://bucket/small')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert counted() == (1000, 0)


def test_a_forked_child_and_its_parent_do_not_write_over_each_other(counted):
    traffic.read(10)
    child = get_context("fork").Process(target=traffic.read, args=(5,))
    child.start()
    child.join()
    traffic.written(2)
    assert counted() == (15, 2)


def test_no_count_of_a_thread_is_lost(counted):
    def add():
        for _ in range(2000):
            traffic.read(1)

    at_once(*[add] * 8)
    assert counted() == (16_000, 0)


def test_without_anybody_who_wants_to_know_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv(traffic.FOLDER, str(tmp_path / "gone"))
    traffic._counters.clear()
    traffic.read(10)
    assert not os.path.exists(tmp_path / "gone")
    traffic.count_in(None)
