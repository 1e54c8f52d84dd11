"""One request at once: plain answers are taken, all others are left to those who know them."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import urllib3
from prepared_server import PLAIN, Server

from trainer import storage
from trainer.errors import StorageError
from trainer.storage import connections, handles, quick


@pytest.fixture
def server(hurried) -> Iterator[Server]:
    made = Server()
    yield made
    made.stop()


def quickly(server):
    return quick.get(connections.pool(server.url), server.url, {})


def test_requests_follow_each_other_over_one_connection(server):
    for _ in range(5):
        assert storage.read_bytes(server.url) == b"hello"
    assert (server.connections, len(server.requests)) == (1, 5)


def test_threads_have_connections_of_their_own_and_keep_them(server):
    server.together = threading.Barrier(3)
    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda _: quickly(server), range(3)))
    server.together = None
    assert [answer.read1() for answer in answers] == [b"hello"] * 3
    for _ in range(3):
        storage.read_bytes(server.url)
    assert server.connections == 3


def test_no_more_connections_are_kept_than_the_pool_has(server, monkeypatch):
    monkeypatch.setattr(quick, "POOL", 1)
    server.together = threading.Barrier(3)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda _: quickly(server), range(3)))
    (line,) = (line for name, line in connections.pool(server.url).lines.items() if name[0][1] in server.url)
    assert len(line.idle) == 1


def test_an_answer_that_breaks_off_gives_what_came_and_then_the_error(server):
    server.answers = [PLAIN[:-1]]
    server.closes = True
    answer = quickly(server)
    assert answer.read1() == b"hell"
    with pytest.raises(urllib3.exceptions.ProtocolError, match="broken"):
        answer.read1()


def test_what_is_too_large_for_memory_is_left_to_the_careful_way(server, monkeypatch):
    monkeypatch.setattr(handles, "LARGEST", 4)
    assert quickly(server) is None
    assert storage.read_bytes(server.url) == b"hello"


def test_a_connection_on_which_more_came_than_was_asked_for_is_not_used_again(server):
    server.after = PLAIN.replace(b"hello", b"WRONG")
    for _ in range(2):
        assert storage.read_bytes(server.url) == b"hello"
        time.sleep(0.1)
    assert server.connections == 2


def test_a_thread_that_reads_can_be_ended(server, hurried):
    hurried(silence=20.0)
    server.answers = [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n"]
    given_up = threading.Event()
    threading.Timer(0.1, given_up.set).start()
    start = time.monotonic()
    with connections.until(connections.Deadline(60, given_up)):
        assert quickly(server) is None
    assert time.monotonic() - start < 5  # it looks every second


def test_a_signal_ends_a_request(server, hurried):
    hurried(silence=20.0)
    server.answers = [PLAIN[:-1]]
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        quickly(server)
    assert time.monotonic() - start < 5


def test_connections_that_the_server_closed_meanwhile_are_made_again_at_once(server, monkeypatch):
    monkeypatch.setattr(quick, "backoff", lambda _: pytest.fail("it waited"))
    server.closes = True
    for _ in range(4):
        assert storage.read_bytes(server.url) == b"hello"
        time.sleep(0.02)
    assert len(server.requests) == server.connections == 4


CLOSED = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
TO_THE_END = b"HTTP/1.1 200 OK\r\n\r\nhello"


def test_a_connection_that_the_server_will_close_is_not_kept(server):
    server.answers = [CLOSED]
    assert [storage.read_bytes(server.url) for _ in range(3)] == [b"hello"] * 3
    assert (server.connections, len(server.requests)) == (3, 3)


@pytest.mark.parametrize("answer", [CHUNKED, TO_THE_END])
def test_a_server_of_another_kind_is_asked_in_the_careful_way_from_then_on(server, answer):
    server.answers = [answer]
    assert [storage.read_bytes(server.url) for _ in range(3)] == [b"hello"] * 3
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: five\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\nhello",
        b"\r\n\r\n",
        b"x" * 400_000,
    ],
)
def test_what_is_no_plain_answer_is_not_read(server, answer):
    server.answers = [answer]
    assert quickly(server) is None


@pytest.mark.parametrize("status", [b"404 Gone", b"503 Busy", b"301 Moved", b"206 Part"])
def test_only_success_is_an_answer(server, status):
    server.answers = [b"HTTP/1.1 %b\r\nContent-Length: 5\r\n\r\nhello" % status]
    assert (quickly(server) is None) == (status[:2] != b"20")
    assert server.connections == 1


def test_a_redirect_is_followed_and_not_asked_for_again(server, hurried):
    target = Server()
    moved = f"HTTP/1.1 302 Found\r\nLocation: {target.url}\r\nContent-Length: 0\r\n\r\n".encode()
    server.answers = [moved]
    assert [storage.read_bytes(server.url) for _ in range(3)] == [b"hello"] * 3
    assert (len(server.requests), len(target.requests)) == (4, 3)
    target.stop()


def test_a_busy_server_is_left_alone_for_as_long_as_it_asks(server):
    busy = b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"
    server.answers = [busy, PLAIN]
    start = time.monotonic()
    assert storage.read_bytes(server.url) == b"hello"
    assert 0.9 < time.monotonic() - start < 5


def test_a_head_that_never_ends_is_given_up(server, hurried):
    server.answers = [b"HTTP/1.1 200 OK\r\nX: "]
    hurried(total=1.0)
    start = time.monotonic()
    with pytest.raises(StorageError, match="cannot read"):
        storage.read_bytes(server.url)
    assert time.monotonic() - start < 8


def test_a_proxy_is_not_passed_by(server, monkeypatch):
    target = Server()
    monkeypatch.setenv("HTTP_PROXY", server.url.removesuffix("/x"))
    assert storage.read_bytes(target.url) == b"hello"
    assert server.requests[0].startswith(f"GET {target.url}".encode()) and target.requests == []
    target.stop()


@pytest.mark.parametrize("path", ["/a b", "/é", "/a/../x", "/x#part"])
def test_addresses_that_have_to_be_encoded_are_left_to_the_careful_way(server, path):
    url = server.url.removesuffix("/x") + path
    assert quick.get(connections.pool(url), url, {}) is None
    assert storage.read_bytes(url) == b"hello"


def test_a_forked_child_has_connections_of_its_own(server):
    code = (
        "import os, sys; from trainer import storage\n"
        "assert storage.read_bytes(sys.argv[1]) == b'hello'; child = os.fork()\n"
        "assert storage.read_bytes(sys.argv[1]) == b'hello'\n"
        "os._exit(child and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", code, server.url], check=False).returncode == 0
    assert (server.connections, len(server.requests)) == (2, 3)
