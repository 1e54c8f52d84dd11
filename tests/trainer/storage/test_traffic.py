"""Bytes that are counted, of every way to read and write, of threads and of processes."""

import subprocess
import sys
from functools import partial
from multiprocessing import get_context

import pytest
from at_once import at_once
from prepared_server import Server

from trainer import storage
from trainer.base import traffic
from trainer.storage import objects
from trainer.storage.web import UrlPolicy

MB = 1024 * 1024


@pytest.fixture
def counted(tmp_path):
    """Returns the counts since the fixture began."""
    folder = tmp_path / "traffic"
    folder.mkdir()
    traffic.count_in(folder)
    yield partial(traffic.total, folder)
    traffic.count_in(None)


def test_what_is_read_of_a_store(bucket, counted, tmp_path):
    (bucket / "small").write_bytes(b"x" * 1000)
    (bucket / "large").write_bytes(b"x" * 9 * MB)
    storage.read_bytes("s3://bucket/small")
    storage.open_reader("s3://bucket/small").read()
    assert counted() == (2000, 0)
    storage.local_copy("s3://bucket/large")
    assert counted() == (2000 + 9 * MB, 0)


def test_what_is_read_of_the_web(hurried, counted):
    server = Server()
    assert storage.read_bytes(server.url) == b"hello"
    server.answer = b"HTTP/1.1 200 OK\r\n\r\nhello"  # without its length
    server.closes = True
    assert storage.read_bytes(server.url) == b"hello"
    assert storage.read_within(server.url, UrlPolicy((server.url,))) == b"hello"
    assert counted() == (15, 0)
    server.stop()


@pytest.mark.parametrize("size", [1000, 2 * objects.PART + 1])
def test_what_is_written_and_read_back(bucket, counted, size):
    storage.write_bytes("s3://bucket/new", b"x" * size, confirm=True)
    assert counted() == (size, size)


def test_a_killed_process_and_a_forked_child_count_too(bucket, counted):
    (bucket / "small").write_bytes(b"x" * 1000)
    program = (
        "import os, signal\nfrom trainer import storage\nstorage.read_bytes('s3://bucket/small')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert counted() == (1000, 0)
    traffic.read(10)
    child = get_context("fork").Process(target=traffic.read, args=(5,))
    child.start()
    child.join()
    traffic.written(2)
    assert counted() == (1015, 2)


def test_no_count_of_a_thread_is_lost(counted):
    def add():
        for _ in range(2000):
            traffic.read(1)

    at_once(*[add] * 8)
    assert counted() == (16_000, 0)
