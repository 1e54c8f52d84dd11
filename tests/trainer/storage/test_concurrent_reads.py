"""Many files read in one thread: what one request does not bring is read with care, and nothing is lost."""

import hashlib
import os
import signal
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from faulty_store import Fault
from prepared_server import PLAIN, Server

from trainer import storage
from trainer.base.errors import MissingError, StorageError
from trainer.storage import many as many_of
from trainer.storage import reads
from trainer.storage.addresses import Addresses


@pytest.fixture
def server(hurried) -> Iterator[Server]:
    started = Server()
    yield started
    started.stop()


def read(uris, threads=4, at_once=8):
    """What comes of each, with at most so many under way."""
    contents = {}
    with many_of(threads) as many:
        for number, uri in enumerate(uris):
            many.read(number, uri)
            while many.busy >= at_once:
                contents.update(many.wait())
        while many.busy:
            contents.update(many.wait())
    return [contents[number] for number in range(len(uris))]


@pytest.fixture
def no_care(monkeypatch):
    """Fails whatever is read in a thread."""

    def refuse(uri, **_):
        raise StorageError(f"{uri} was read with care")

    monkeypatch.setattr(storage, "read_bytes", refuse)


def test_files_follow_each_other_over_few_connections(server, no_care):
    assert read([server.url] * 30, threads=3) == [b"hello"] * 30
    assert server.connections < 10 and len(server.requests) == 30


def test_as_many_are_under_way_as_were_begun(server, no_care):
    server.together = threading.Barrier(8)
    assert read([server.url] * 8, threads=8, at_once=9) == [b"hello"] * 8
    assert server.connections == 8


@pytest.mark.slow
def test_objects_of_a_store_are_signed_checked_and_equal(any_store, monkeypatch):
    content = {f"{any_store}/a b/{number}é.bin": os.urandom(1000 * number) for number in range(12)}
    for uri, data in content.items():
        storage.write_bytes(uri, data)
    with monkeypatch.context() as patched:
        if any_store.startswith("s3://"):  # of others obstore signs no addresses
            patched.setattr(storage, "read_bytes", None)
        assert read(list(content)) == list(content.values())


@pytest.mark.parametrize("endpoint", [True, False])
def test_a_public_bucket_is_read_without_keys(server, monkeypatch, no_care, endpoint):
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AWS_REGION", "eu-west-3")
    if endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url.rpartition("/")[0])
        assert read(["s3://bucket/a b/1+2.jpg"]) == [b"hello"]
        assert server.requests[0].startswith(b"GET /bucket/a%20b/1%2B2.jpg HTTP/1.1")
    else:
        url = Addresses()("s3://bucket/a b/1.jpg").url
        assert url == "https://s3.eu-west-3.amazonaws.com/bucket/a%20b/1.jpg"


def test_local_files_and_servers_files_may_be_mixed(server, tmp_path):
    (tmp_path / "a").write_bytes(b"local")
    uris = [str(tmp_path / "a"), server.url, str(tmp_path / "none"), "ftp://host/x"]
    local, remote, none, unknown = read(uris)
    assert (local, remote) == (b"local", b"hello")
    assert isinstance(none, MissingError) and "unknown scheme" in unknown.message


@pytest.mark.parametrize("environment", [{"AWS_ENDPOINT_URL": "http://"}, {"AWS_SECRET_ACCESS_KEY": ""}])
def test_a_wrong_environment_fails_the_file_and_not_the_others(server, monkeypatch, environment):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    refused, good = read(["s3://bucket/key", server.url])
    assert isinstance(refused, StorageError) and refused.fix and good == b"hello"


FAULTS = [
    Fault("status", times=2),
    Fault("status", status=429, headers=(("Retry-After", "0"),)),
    Fault("drop", times=2),
    Fault("cut", after=3000),
    Fault("short", after=3000),
    Fault("stall", after=3000),
    Fault("corrupt", after=3000),
    Fault("drip"),
]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.kind} {fault.status}")
def test_after_a_fault_every_file_comes_whole(proxy, hurried, fault):
    hurried(silence=1.0, total=6.0)
    content = [os.urandom(9000) for _ in range(10)]
    uris = [f"s3://bucket/{number}" for number in range(10)]
    for uri, data in zip(uris, content, strict=True):
        storage.write_bytes(uri, data)
    proxy.faults.append(fault)
    assert read(uris) == content
    assert proxy.faults == []


def test_what_is_missing_or_refused_says_so_and_the_rest_comes(proxy, hurried):
    storage.write_bytes("s3://bucket/there", b"data")
    proxy.faults.append(Fault("status", query="refused", times=9, status=403, code="AccessDenied"))
    there, missing, refused, again = read(
        [f"s3://bucket/{name}" for name in ("there", "no", "refused", "there")]
    )
    assert there == again == b"data" and isinstance(missing, MissingError)
    assert "AccessDenied" in refused.message and not isinstance(refused, MissingError)


def test_a_server_that_dies_and_comes_back_is_waited_for(proxy, hurried):
    hurried(total=30.0)
    content = [os.urandom(200_000) for _ in range(20)]
    uris = [f"s3://bucket/{number}" for number in range(20)]
    for uri, data in zip(uris, content, strict=True):
        storage.write_bytes(uri, data)
    port = proxy.port
    with ThreadPoolExecutor(1) as thread, many_of(4) as many:
        contents = {}
        for number, uri in enumerate(uris[:10]):
            many.read(number, uri)
        contents.update(many.wait())
        proxy.stop()
        back = thread.submit(lambda: (time.sleep(1), proxy.start(port)))
        for number, uri in enumerate(uris[10:], 10):
            many.read(number, uri)
        while many.busy:
            contents.update(many.wait())
        back.result()
    assert [contents[number] for number in range(20)] == content


def test_a_large_file_among_small_ones(bucket, monkeypatch):
    monkeypatch.setattr(reads, "PIECE", 1000)
    content = [os.urandom(size) for size in (10, 50_000, 20)]
    for number, data in enumerate(content):
        storage.write_bytes(f"s3://bucket/{number}", data)
    assert read([f"s3://bucket/{number}" for number in range(3)], threads=2) == content


@pytest.mark.parametrize("status", [b"206 Part", b"204 None"])
def test_a_part_that_nobody_asked_for_is_not_the_file_whose_hash_is_known(server, status):
    """The library takes it for the file."""
    server.answers = [
        b"HTTP/1.1 %b\r\nContent-Range: bytes 0-1/5\r\nContent-Length: 2\r\n\r\nhe" % status,
        PLAIN,
    ]
    assert storage.read_bytes(server.url, sha256=hashlib.sha256(b"hello").hexdigest()) == b"hello"


def test_a_server_that_answers_in_chunks_is_read_whole(server):
    server.answers = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"]
    assert read([server.url] * 6, at_once=1) == [b"hello"] * 6
    assert len(server.requests) == 6


@pytest.mark.slow
def test_a_silent_server_fails_within_the_deadline_and_others_do_not_wait(server, hurried):
    hurried(silence=0.5, total=1.5)
    quiet = Server()
    quiet.answers = [PLAIN[:-1]]
    began = time.monotonic()
    with many_of(2) as many:
        many.read("quiet", quiet.url)
        many.read("good", server.url)
        assert many.wait() == [("good", b"hello")] and time.monotonic() - began < 1
        ((_, failed),) = many.wait()
    assert isinstance(failed, StorageError) and time.monotonic() - began < 12
    quiet.stop()


def test_calls_run_beside_the_reads_and_give_what_they_return(server):
    with many_of(3) as many:
        many.call("sum", sum, [1, 2])
        many.call("error", storage.read_bytes, "/nowhere/at/all")
        many.read("file", server.url)
        contents = {}
        while many.busy:
            contents.update(many.wait())
    assert (
        contents["sum"] == 3 and contents["file"] == b"hello" and isinstance(contents["error"], MissingError)
    )


def test_a_call_that_fails_otherwise_is_raised():
    with pytest.raises(ZeroDivisionError), many_of(1) as many:
        many.call(1, lambda: 1 / 0)
        many.wait()


def test_waiting_ends_at_its_time_and_with_nothing_under_way_at_once(server):
    with many_of(1) as many:
        assert many.wait() == []
        many.call("slow", time.sleep, 0.5)
        began = time.monotonic()
        assert many.wait(0.1) == [] and many.wait(0) == [] and time.monotonic() - began < 0.4
        assert many.wait() == [("slow", None)]


def test_a_signal_ends_the_waiting(server, hurried):
    hurried(silence=20.0)
    server.answers = [PLAIN[:-1]]
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), many_of(2) as many:
        many.read(1, server.url)
        many.wait()
    assert time.monotonic() - began < 5


def test_a_proxy_is_not_passed_by(server, monkeypatch):
    target = Server()
    monkeypatch.setenv("HTTP_PROXY", server.url.removesuffix("/x"))
    assert read([target.url]) == [b"hello"]
    assert server.requests[0].startswith(f"GET {target.url}".encode()) and target.requests == []
    target.stop()


def test_an_object_that_the_store_spoils_is_not_taken(proxy, hurried):
    storage.write_bytes("s3://bucket/a", b"a" * 5000)
    proxy.faults.append(Fault("corrupt", after=100, times=99))
    (failed,) = read(["s3://bucket/a"])
    assert "is damaged" in failed.message and hashlib.sha256(b"a" * 5000).hexdigest() in failed.message


def test_more_files_than_a_process_may_have_in_select_are_no_trouble(server):
    """Sockets with numbers above 1023 are waited for as well."""
    held = [os.dup(0) for _ in range(1100)]
    try:
        assert read([server.url] * 4) == [b"hello"] * 4
    finally:
        for descriptor in held:
            os.close(descriptor)


def test_what_was_read_is_not_held_by_what_is_kept(server):
    server.answers = [b"HTTP/1.1 200 OK\r\nContent-Length: 3000000\r\n\r\n" + bytes(3_000_000)]
    tracemalloc.start()
    try:
        with many_of(2) as many:
            for number in range(6):
                many.read(number, server.url)
            while many.busy:
                many.wait()
            assert tracemalloc.get_traced_memory()[0] < 2_000_000
        for _ in range(3):
            storage.read_bytes(server.url)
        assert tracemalloc.get_traced_memory()[0] < 2_000_000
    finally:
        tracemalloc.stop()


BUSY = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("answers", "silence", "seconds", "most"),
    [([PLAIN[:-1]], 20.0, 0.2, 5), ([BUSY], 5.0, 1.5, 12), ([BUSY, PLAIN[:-1]], 5.0, 1.5, 12)],
    ids=["at once", "with care, busy", "with care, silent"],
)
def test_what_is_under_way_ends_with_the_block(server, hurried, answers, silence, seconds, most):
    hurried(silence=silence, total=60.0)
    server.answers = answers
    began = time.monotonic()
    with pytest.raises(RuntimeError), many_of(2) as many:
        for number in range(3):
            many.read(number, server.url)
        many.wait(seconds)
        raise RuntimeError
    assert time.monotonic() - began < most


@pytest.mark.parametrize("url", ["http://[x/1.jpg", "http:///1.jpg", "http://host:port/x"])
def test_an_address_that_is_none_fails_alone(server, hurried, url):
    hurried(first=0.5, total=2.0)
    failed, good = read([url, server.url])
    assert isinstance(failed, StorageError) and failed.fix and good == b"hello"


@pytest.mark.parametrize("length", [b"5, 5", b"5 bytes"])
def test_a_length_that_is_none_is_no_plain_answer(server, hurried, length):
    hurried(total=2.0)
    server.answers = [b"HTTP/1.1 200 OK\r\nContent-Length: %b\r\n\r\nhello" % length, PLAIN]
    assert read([server.url]) == [b"hello"]


def test_after_a_call_that_failed_the_others_can_be_waited_for(server):
    with many_of(1) as many:
        many.call(1, lambda: 1 / 0)
        many.read(2, server.url)
        with pytest.raises(ZeroDivisionError):
            while many.busy:
                assert many.wait() == [(2, b"hello")]
        while many.busy:
            assert many.wait() == [(2, b"hello")]


def test_a_server_that_cannot_be_asked_holds_up_no_other(server, monkeypatch):
    def slow(*_):
        time.sleep(0.3)
        raise StorageError("no keys")

    monkeypatch.setattr("trainer.storage.environment.settings", slow)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    began = time.monotonic()
    contents = read([*(f"s3://bucket/{number}" for number in range(16)), server.url], threads=16, at_once=32)
    assert contents[-1] == b"hello" and all(isinstance(one, StorageError) for one in contents[:-1])
    assert time.monotonic() - began < 3
