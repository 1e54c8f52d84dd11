"""Reading from a store that stumbles: nothing lost, nothing wrong, and an end to waiting."""

import hashlib
import os
import threading
import time

import pytest

from trainer import storage
from trainer.errors import StorageError
from trainer.storage import transfer

KB = 1024


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(transfer, "PIECE", 64 * KB)


@pytest.fixture
def data(bucket):
    content = os.urandom(1000 * KB + 7)
    (bucket / "big").write_bytes(content)
    return content


def ranges(proxy):
    return [line.split()[2] for line in proxy.requests if line.startswith("GET")]


def test_a_large_object_is_read_in_pieces_side_by_side(proxy, data, tmp_path):
    assert storage.read_bytes("s3://bucket/big") == data
    asked = ranges(proxy)
    assert len(asked) == 16 and asked[0] == "0-65535"
    assert len(set(asked)) == 16
    assert storage.local_copy("s3://bucket/big", tmp_path).read_bytes() == data


def test_a_small_object_takes_one_request(proxy, bucket):
    (bucket / "x").write_bytes(b"small")
    assert storage.read_bytes("s3://bucket/x") == b"small"
    assert len(proxy.requests) == 1


@pytest.mark.parametrize("size", [0, 1, 64 * KB - 1, 64 * KB, 64 * KB + 1, 128 * KB])
def test_sizes_around_a_piece(proxy, bucket, tmp_path, size):
    content = os.urandom(size)
    (bucket / "x").write_bytes(content)
    assert storage.read_bytes("s3://bucket/x") == content
    assert storage.local_copy("s3://bucket/x", tmp_path).read_bytes() == content


def test_a_range(proxy, data):
    assert storage.read_range("s3://bucket/big", 70_000, 300_000) == data[70_000:370_000]
    assert storage.read_range("s3://bucket/big", len(data) - 3, 3) == data[-3:]
    assert storage.read_range("s3://bucket/big", 5, 0) == b""
    with pytest.raises(StorageError, match="ends before byte"):
        storage.read_range("s3://bucket/big", len(data) - 3, 4)
    with pytest.raises(StorageError, match="ends before byte"):
        storage.read_range("s3://bucket/big", len(data), 1)


@pytest.mark.parametrize("kind", ["cut", "short", "stall"])
def test_a_broken_piece_goes_on_where_it_broke(proxy, data, kind):
    proxy.fail(kind, times=3, after=10 * KB)
    assert storage.read_bytes("s3://bucket/big") == data
    assert len(ranges(proxy)) == 19
    continued = [int(asked.partition("-")[0]) % (64 * KB) for asked in ranges(proxy)]
    assert continued.count(10 * KB) == 3


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_busy_store_is_asked_again(proxy, data, status):
    proxy.fail("status", times=20, status=status)
    assert storage.read_bytes("s3://bucket/big") == data


def test_connections_that_are_dropped_are_made_again(proxy, data):
    proxy.fail("drop", times=10)
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
    proxy.fail("corrupt", query="big", after=100)
    assert storage.read_bytes("s3://bucket/big") == data
    assert len(ranges(proxy)) == 32  # all of it again: nobody knows which byte it was


def test_a_damaged_object_is_an_error_and_leaves_no_copy(proxy, data, tmp_path):
    storage.write_bytes("s3://bucket/x", b"as written")
    proxy.fail("corrupt", times=100, after=1)
    with pytest.raises(StorageError, match=r"s3://bucket/x is damaged: its sha256 is \w{64}, not \w{64}"):
        storage.local_copy("s3://bucket/x", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["locks"]


def test_a_hash_that_the_caller_knows_counts(proxy, bucket, tmp_path):
    (bucket / "x").write_bytes(b"x")
    (tmp_path / "x").write_bytes(b"x")
    for uri in ("s3://bucket/x", str(tmp_path / "x")):
        assert storage.read_bytes(uri, sha256=hashlib.sha256(b"x").hexdigest()) == b"x"
        with pytest.raises(StorageError, match="is damaged"):
            storage.read_bytes(uri, sha256="0" * 64)
    with pytest.raises(StorageError, match="is damaged"):
        storage.local_copy("s3://bucket/x", tmp_path, sha256="0" * 64)


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


def test_an_empty_object_has_a_hash_too(proxy, bucket):
    (bucket / "x").write_bytes(b"")
    assert storage.read_bytes("s3://bucket/x", sha256=hashlib.sha256().hexdigest()) == b""
    with pytest.raises(StorageError, match="is damaged"):
        storage.read_bytes("s3://bucket/x", sha256="0" * 64)


@pytest.mark.parametrize("kind", ["drop", "stall", "drip"])
def test_there_is_an_end_to_waiting(proxy, data, hurried, kind, tmp_path):
    assert storage.exists("s3://bucket/big")
    hurried(total=1.0, rate=1e9)
    proxy.fail(kind, times=10_000, after=0)
    start = time.monotonic()
    with pytest.raises(StorageError, match="cannot read s3://bucket/big") as caught:
        storage.local_copy("s3://bucket/big", tmp_path)
    assert time.monotonic() - start < 15
    assert "run again" in caught.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["locks"]


def test_an_interrupted_read_ends_its_threads(proxy, data, hurried, monkeypatch):
    hurried(silence=30, total=30)
    proxy.fail("nothing")
    proxy.fail("stall", times=100, after=KB)
    begin = transfer.Remote.copy

    def interrupted(self, start, *others):
        if start == 0:
            time.sleep(0.1)
            raise KeyboardInterrupt
        return begin(self, start, *others)

    monkeypatch.setattr(transfer.Remote, "copy", interrupted)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        storage.read_bytes("s3://bucket/big")
    assert time.monotonic() - start < 10
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read")]
