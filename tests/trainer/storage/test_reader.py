"""A file on a server that is read as a local one."""

import http.server
import io
import os
import zipfile

import pytest
from web_server import WebServer

from trainer import storage
from trainer.base.errors import StorageError
from trainer.storage import objects

KB = 1024


@pytest.fixture
def data(bucket, monkeypatch):
    monkeypatch.setattr(objects, "PIECE_BYTES", 64 * KB)
    content = os.urandom(1000 * KB + 7)
    (bucket / "big").write_bytes(content)
    return content


def test_from_start_to_end(proxy, data):
    with storage.open_reader("s3://bucket/big") as file:
        assert b"".join(iter(lambda: file.read(10_000), b"")) == data
    assert len(proxy.requests) == len(set(proxy.requests)) == 16  # Each piece once.


def test_anywhere(proxy, data):
    with storage.open_reader("s3://bucket/big") as file:
        for place in (900_000, 0, 123_456, 65_535, 65_536, 500_000, 1):
            assert file.seek(place) == file.tell() == place
            assert file.read(70_000) == data[place : place + 70_000]
        assert file.seek(-5, io.SEEK_END) == len(data) - 5
        assert file.read() == data[-5:]
        assert file.read(1) == b""
        with pytest.raises(ValueError, match="negative"):
            file.seek(-1)


def test_memory_holds_a_window(proxy, data, monkeypatch):
    monkeypatch.setattr(objects, "PIECES_AHEAD", 3)
    with storage.open_reader("s3://bucket/big") as file:
        file.read(100_000)
        assert len(proxy.requests) <= 7


def test_damage_shows_before_the_end(proxy, data):
    storage.write_bytes("s3://bucket/big", data)
    proxy.fail("corrupt", times=8, after=5, parts=True)
    with storage.open_reader("s3://bucket/big") as file, pytest.raises(StorageError, match="is damaged"):
        while file.read(KB):
            pass


def test_an_error_is_no_end(proxy, data, monkeypatch):
    monkeypatch.setattr(objects, "PIECES_AHEAD", 1)
    with storage.open_reader("s3://bucket/big") as file:
        start = file.read(100 * KB)
        storage.write_bytes("s3://bucket/big", data[1:])
        for _ in range(2):
            with pytest.raises(StorageError, match="changed while it was read"):
                file.read()
    assert start == data[: 100 * KB]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cut", "drop", "stall"])
def test_breaks_do_not_show(proxy, data, kind):
    proxy.fail(kind, times=5, after=KB, parts=True)
    with storage.open_reader("s3://bucket/big") as file:
        assert file.read() == data


def test_a_small_file_is_asked_for_once_and_again_if_it_is_altered(proxy):
    storage.write_bytes("s3://bucket/small", b"small")
    proxy.requests.clear()
    for count in (1, 3):
        with storage.open_reader("s3://bucket/small") as file:
            assert file.read() == b"small"
        assert len(proxy.requests) == count
        proxy.fail("corrupt", query="small", after=1)


def test_missing_and_empty(proxy, bucket, tmp_path):
    (bucket / "empty").write_bytes(b"")
    with storage.open_reader("s3://bucket/empty") as file:
        assert file.read() == b""
    for uri in ("s3://bucket/none", str(tmp_path / "none")):
        with pytest.raises(StorageError, match="no such file"):
            storage.open_reader(uri)


def test_a_zip_in_a_store_is_read_without_its_middle(proxy, data, bucket):
    with zipfile.ZipFile(bucket / "x.zip", "w") as archive:
        for number in range(20):
            archive.writestr(f"{number}.bin", data[number * 50_000 : (number + 1) * 50_000])
    proxy.requests.clear()
    with storage.open_reader("s3://bucket/x.zip") as file, zipfile.ZipFile(file) as archive:
        assert archive.read("19.bin") == data[950_000:1_000_000]
    assert len(proxy.requests) < 8


def test_a_web_server_without_ranges(tmp_path, data, hurried):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(data)

    with WebServer(Handler) as server, storage.open_reader(f"{server.url}/x") as file:
        file.seek(400_000)
        assert file.read(10) == data[400_000:400_010]
