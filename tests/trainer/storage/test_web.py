"""Web servers of all kinds."""

import time
from collections.abc import Iterator

import pytest
from prepared_server import PLAIN, Server

from trainer import storage
from trainer.base.errors import StorageError


@pytest.fixture
def server(hurried, monkeypatch) -> Iterator[Server]:
    started = Server()
    yield started
    started.stop()


CLOSED = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
TO_THE_END = b"HTTP/1.1 200 OK\r\n\r\nhello"
BUSY = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize("answer", [CHUNKED, TO_THE_END])
def test_a_server_that_tells_no_length_is_read_whole(server, answer, tmp_path):
    server.answers = [answer]
    assert storage.read_bytes(server.url) == b"hello"
    assert storage.read_range(server.url, 1, 3) == b"ell"
    assert storage.local_copy(server.url).read_bytes() == b"hello"
    with storage.open_reader(server.url) as file:
        file.seek(2)
        assert file.read() == b"llo"
    with pytest.raises(StorageError, match="is damaged"):
        storage.read_bytes(server.url, sha256="0" * 64)


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 200 OK\r\nContent-Length: five\r\n\r\nhello", b"\r\n\r\n", b"x" * 400_000],
)
def test_what_is_no_answer_is_an_error(server, hurried, answer):
    hurried(total=1.0)
    server.answers = [answer]
    start = time.monotonic()
    with pytest.raises(StorageError, match="cannot read") as caught:
        storage.read_bytes(server.url)
    assert caught.value.fix and time.monotonic() - start < 10


def test_a_busy_server_is_asked_again(server):
    server.answers = [BUSY, BUSY, PLAIN]
    assert storage.read_bytes(server.url) == b"hello"
    server.answers = [BUSY] * 12 + [PLAIN]  # more often than the library asks by itself
    assert storage.read_bytes(server.url) == b"hello"


def test_a_head_that_never_ends_is_given_up(server, hurried):
    server.answers = [b"HTTP/1.1 200 OK\r\nX: "]
    hurried(total=1.0)
    start = time.monotonic()
    with pytest.raises(StorageError, match="cannot read"):
        storage.read_bytes(server.url)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("answer", [PLAIN, CHUNKED])
def test_a_proxy_is_not_passed_by(server, monkeypatch, answer):
    target = Server()
    monkeypatch.setenv("HTTP_PROXY", server.url.removesuffix("/x"))
    server.answers = [answer]
    assert storage.read_bytes(target.url) == b"hello"
    assert all(request.startswith(f"GET {target.url}".encode()) for request in server.requests)
    assert server.requests and target.requests == []
    target.stop()


def test_a_proxy_that_is_not_there_is_named(server, monkeypatch, hurried):
    hurried(first=0.1)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match="no answer from the proxy") as caught:
        storage.read_bytes(server.url)
    assert "HTTP_PROXY" in caught.value.fix


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/a b", b"/a%20b"), ("/é", b"/%C3%A9"), ("/x#part", b"/x"),
        ("/a%20b?sig=1%2B2&x=%2F", b"/a%20b?sig=1%2B2&x=%2F"),
        ("/a/../x", b"/x"), ("/a//b/", b"/a//b/"), ("", b"/"),
    ],
)  # fmt: skip
def test_addresses_of_all_kinds(server, path, asked):
    assert storage.read_bytes(server.url.removesuffix("/x") + path) == b"hello"
    assert server.requests[-1].split()[1] == asked


def test_an_answer_that_is_cut_off_is_asked_for_again(server):
    server.answers = [CLOSED[:-2], CLOSED[:-2], PLAIN]
    assert storage.read_bytes(server.url) == b"hello"


@pytest.mark.parametrize(("status", "said"), [(b"404 No", "no such file"), (b"503 Busy", "answers 503")])
def test_a_refusal_names_the_address(server, hurried, status, said):
    hurried(total=1.0)
    server.answers = [b"HTTP/1.1 %b\r\nContent-Length: 0\r\n\r\n" % status]
    with pytest.raises(StorageError, match=said) as caught:
        storage.read_bytes(server.url)
    assert server.url in caught.value.message and caught.value.fix


def test_files_that_are_gone_are_asked_for_on_one_connection(server):
    server.answers = [b"HTTP/1.1 410 Gone\r\nContent-Length: 0\r\n\r\n"]
    assert storage.state(server.url) is None
    server.answers = [b"HTTP/1.1 410 Gone\r\nContent-Length: 4\r\n\r\ngone"]
    for _ in range(3):
        with pytest.raises(StorageError, match="no such file"):
            storage.read_bytes(server.url)
    assert len(server.requests) == 4 and server.connections == 1


def test_an_empty_answer_is_not_the_file_of_a_hash(server):
    server.answers = [b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]
    with pytest.raises(StorageError, match="is damaged"):
        storage.local_copy(server.url, sha256="0" * 64)
