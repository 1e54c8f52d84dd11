"""Reading from a store that stumbles: nothing lost, nothing wrong, and an end to waiting."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest

from trainer import storage
from trainer.base import json_files
from trainer.base.errors import StorageError
from trainer.storage import objects

KB = 1024


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(objects, "PIECE_BYTES", 64 * KB)


@pytest.fixture
def data(bucket):
    content = os.urandom(1000 * KB + 7)
    (bucket / "big").write_bytes(content)
    return content


def ranges(proxy):
    return [[*line.split(), ""][2] for line in proxy.requests if line.startswith("GET")]


def test_a_large_object_is_read_in_pieces_side_by_side(proxy, data, tmp_path):
    assert storage.read_bytes("s3://bucket/big") == data
    requested = ranges(proxy)
    # The first tells how large it is.
    assert requested[0] == "0-65535" and len(set(requested)) == 16
    assert storage.local_copy("s3://bucket/big").read_bytes() == data


@pytest.mark.parametrize("size", [0, 1, 64 * KB - 1, 64 * KB, 64 * KB + 1, 128 * KB])
def test_sizes_around_a_piece(proxy, bucket, tmp_path, size):
    content = os.urandom(size)
    (bucket / "x").write_bytes(content)
    assert storage.read_bytes("s3://bucket/x") == content
    assert storage.local_copy("s3://bucket/x").read_bytes() == content


def test_a_range(proxy, data):
    assert storage.read_range("s3://bucket/big", 70_000, 300_000) == data[70_000:370_000]
    assert storage.read_range("s3://bucket/big", len(data) - 3, 3) == data[-3:]
    with pytest.raises(StorageError, match="ends before byte"):
        storage.read_range("s3://bucket/big", len(data) - 3, 4)
    with pytest.raises(StorageError, match="ends before byte"):
        storage.read_range("s3://bucket/big", len(data), 1)


@pytest.mark.parametrize("kind", ["cut", "short", "stall"])
def test_a_broken_piece_goes_on_where_it_broke(proxy, data, kind):
    proxy.fail(kind, times=3, after=10 * KB, parts=True)
    assert storage.read_bytes("s3://bucket/big") == data
    assert 10 * KB in {int(requested.partition("-")[0]) for requested in ranges(proxy)}


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_store_is_asked_again(proxy, data, status):
    proxy.fail("status", times=20, status=status)
    assert storage.read_bytes("s3://bucket/big") == data


def test_a_server_that_dies_and_comes_back_loses_nothing(proxy, data, hurried):
    hurried(first=0.0)
    proxy.fail("cut", times=16, after=1 * KB)
    proxy.fail("drop", times=1000)
    port = proxy.port

    def restart():
        proxy.stop()
        proxy.faults = []
        time.sleep(0.2)
        proxy.start(port)

    assert storage.exists("s3://bucket/big")  # a server that never answered is given up sooner
    timer = threading.Timer(0.3, restart)
    timer.start()
    assert storage.read_bytes("s3://bucket/big") == data
    timer.join()


def test_a_byte_that_was_changed_on_the_way_is_noticed(proxy, data):
    storage.write_bytes("s3://bucket/big", data)
    proxy.fail("corrupt", query="big", after=100, parts=True)
    assert storage.read_bytes("s3://bucket/big") == data
    asked = Counter(ranges(proxy))  # all of it again: nobody knows which byte it was
    assert len([piece for piece, times in asked.items() if times > 1]) == 16


def test_json_that_was_changed_on_the_way_is_read_again(proxy, bucket):
    """Objects that other programs copied lack the attribute, and the file's own hash counts."""
    (bucket / "x.json").write_bytes(json_files.encode({"a": "b"}))
    proxy.fail("corrupt", query="x.json", times=2, after=8)
    assert storage.read_json("s3://bucket/x.json") == {"a": "b"} and not proxy.faults


def test_a_damaged_object_is_an_error_and_leaves_no_copy(proxy, data, copies):
    storage.write_bytes("s3://bucket/x", b"as written")
    proxy.fail("corrupt", times=100, after=1)
    with pytest.raises(StorageError, match=r"s3://bucket/x is damaged: its sha256 is \w{64}, not \w{64}"):
        storage.local_copy("s3://bucket/x")
    assert [path.name for path in copies.iterdir()] == ["lock"]


def test_a_hash_that_the_caller_knows_counts(proxy, bucket, tmp_path):
    (bucket / "x").write_bytes(b"x")
    (tmp_path / "x").write_bytes(b"x")
    for uri in ("s3://bucket/x", str(tmp_path / "x")):
        assert storage.read_bytes(uri, sha256=hashlib.sha256(b"x").hexdigest()) == b"x"
        with pytest.raises(StorageError, match="is damaged"):
            storage.read_bytes(uri, sha256="0" * 64)
    with pytest.raises(StorageError, match="is damaged"):
        storage.local_copy("s3://bucket/x", sha256="0" * 64)


def test_an_object_that_is_replaced_meanwhile_is_read_whole_from_one_version(proxy, data, bucket):
    other = os.urandom(len(data))

    def replace():
        while len(proxy.requests) < 3:
            time.sleep(0.001)
        (bucket / "big").write_bytes(other)

    thread = threading.Thread(target=replace)
    thread.start()
    assert storage.read_bytes("s3://bucket/big") in (data, other)
    thread.join()


@pytest.mark.parametrize("times", [1, 2, 4])
def test_an_answer_that_there_is_nothing_is_not_believed_at_once(proxy, data, times):
    proxy.fail("cut", query="big", after=KB)
    proxy.fail("status", query="big", times=times, status=416, code="InvalidRange")
    assert storage.read_bytes("s3://bucket/big") == data


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stall", "drip"])
def test_there_is_an_end_to_waiting(proxy, data, hurried, kind, copies):
    assert storage.exists("s3://bucket/big")
    hurried(total=1.0)
    proxy.fail(kind, times=10_000, after=0)
    start = time.monotonic()
    with pytest.raises(StorageError, match="cannot read s3://bucket/big") as caught:
        storage.local_copy("s3://bucket/big")
    assert time.monotonic() - start < 15
    assert "run again" in caught.value.fix
    assert [path.name for path in copies.iterdir()] == ["lock"]


@pytest.mark.parametrize("size", [5, 1000 * KB])
def test_a_signal_ends_a_read_at_once(proxy, bucket, hurried, size):
    (bucket / "x").write_bytes(bytes(size))
    assert storage.exists("s3://bucket/x")
    hurried(read_timeout=30, total=30)
    proxy.fail("stall", times=100, parts=size > 5)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        storage.read_bytes("s3://bucket/x")
    assert time.monotonic() - start < 5


def test_a_store_that_gives_objects_only_whole(proxy, data, bucket, tmp_path):
    proxy.careless = True
    storage.write_bytes("s3://bucket/ours", data)
    for name in ("big", "ours"):
        uri = f"s3://bucket/{name}"
        assert storage.read_bytes(uri) == data
        assert storage.read_range(uri, 70_000, 300_000) == data[70_000:370_000]
        assert storage.read_range(uri, 70_000, 30) == data[70_000:70_030]
        assert storage.local_copy(uri).read_bytes() == data
        with storage.open_reader(uri) as file:
            file.seek(500_000)
            assert file.read() == data[500_000:]
    assert proxy.requests


def test_a_child_that_was_forked_after_a_read_gets_an_error(bucket):
    (bucket / "x").write_bytes(b"hello")
    code = (
        "import multiprocessing, sys; from trainer import storage\n"
        "def read(): print(storage.read_bytes('s3://bucket/x'), flush=True)\n"
        "context = multiprocessing.get_context('fork')\n"
        "before = context.Process(target=read); before.start(); before.join(20)\n"
        "read(); child = context.Process(target=read); child.start(); child.join(20)\n"
        "sys.exit(child.exitcode)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.count("b'hello'") == 2, done.stderr
    assert done.returncode and "forked after its parent had read" in done.stderr
