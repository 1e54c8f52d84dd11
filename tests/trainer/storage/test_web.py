"""Web servers of all kinds."""

import threading
import time
from collections.abc import Iterator

import pytest
from prepared_server import PLAIN, Server

from trainer import storage
from trainer.base.errors import ConfigError, StorageError
from trainer.storage import objects, web
from trainer.storage.web import AddressNotAllowed


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
    "answer", [b"HTTP/1.1 200 OK\r\nContent-Length: five\r\n\r\nhello", b"\r\n\r\n", b"x" * 400_000]
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


NAMED = ("http://10.0.0.1:8000/set.json", "http://plain.lan/set.json", "s3://own/set", "/local")
HOST_VARIABLES = ("Example.org", "other.net:81", "[::1]:81", "s3://shared", "minio://Own/")


@pytest.mark.parametrize(
    "uri",
    [
        "/a.jpg", "file:///a.jpg", "http://10.0.0.1:8000/b.jpg", "s3://own/x.jpg", "s3://shared/x.jpg",
        "minio://own/x", "http://EXAMPLE.org:8080/a", "https://example.org/a", "http://other.net:81/a",
        "http://[::1]:81/a", "https://plain.lan/a", "http://images.cocodataset.org/a.jpg", "https://farm7.staticflickr.com/a.jpg",
    ],
)  # fmt: skip
def test_hosts_and_buckets_on_the_list_are_allowed(uri):
    web.allow(NAMED, HOST_VARIABLES)
    web.check_allowed(uri)


@pytest.mark.parametrize(
    "uri",
    [
        "http://10.0.0.1/b.jpg", "http://10.0.0.1:6443/", "s3://other/x", "gs://own/x", "s3://own2/x",
        "ftp://a/b", "http://169.254.169.254/latest/meta-data", "http://[::1]/a", "http://[::ffff:a00:1]:8000/",
        "http://167772161:8000/", "http://0x0a000001:8000/", "http://8.8.8.8/", "http://sub.example.org/a",
        "http://example.org.evil.net/a", "http://example.org@evil.net/a", "http://evil.net/@example.org/",
        "http://example.org\\@evil.net/", "http://evil.net#@example.org/", "http://other.net:82/a",
        "http://xstaticflickr.com/", "https://plain.lan:8443/a", "http://plain.lan:81/a", "https://images.cocodataset.org.evil.net/",
    ],
)  # fmt: skip
def test_all_other_addresses_are_refused(uri):
    web.allow(NAMED, HOST_VARIABLES)
    with pytest.raises(AddressNotAllowed) as caught:
        web.check_allowed(uri)
    assert caught.value.fix


def test_a_refusal_names_the_key_that_allows_the_host():
    with pytest.raises(AddressNotAllowed) as caught:
        web.check_allowed("http://images.lan:81/a.jpg")
    assert "data.allow_hosts" in caught.value.fix and "images.lan" in caught.value.fix


@pytest.mark.parametrize(
    "host", ["", "http://a", "a/b", "10.0.0.0/8", "s3://", "s3://a/b", "a:0", "a b", "*", "user@a"]
)
def test_an_entry_that_is_no_host_is_an_error(host):
    with pytest.raises(ConfigError, match=r"data\.allow_hosts"):
        web.allow((), (host,))


@pytest.fixture
def target(hurried) -> Iterator[Server]:
    started = Server()
    yield started
    started.stop()


def redirect(url: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {url}\r\nContent-Length: 0\r\n\r\n".encode()


READS = {
    "read": storage.read_bytes,
    "look": storage.state,
    "copy": storage.local_copy,
    "open": storage.open_reader,
    "an address in data": lambda uri: (web.allow([uri]), storage.read_allowed(uri)),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_one_without_end_is_told_with_its_hops_and_not_tried_again(server, read, hurried):
    hurried(first=1000.0, total=1000.0)  # As long as a busy server would be asked again.
    there, back = server.url, server.url.replace("/x", "/y")
    server.answers = [redirect(back), redirect(there)] * 30
    with pytest.raises(StorageError, match="too many redirects") as caught:
        read(server.url)
    assert f" -> {there}" in caught.value.message or f" -> {back}" in caught.value.message
    assert not caught.value.transient and "retrying does not help" in caught.value.fix
    assert len(server.requests) < 20  # obstore follows ten; then each is looked at once


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_redirects_to_other_hosts_are_refused_until_they_are_allowed(server, target, read):
    server.answers = [redirect(target.url)] * 9
    with pytest.raises(AddressNotAllowed) as caught:
        read(server.url)
    assert "data.allow_hosts" in caught.value.fix and not target.requests
    web.allow((), [target.url.removeprefix("http://").removesuffix("/x")])
    read(server.url)
    assert target.requests


def test_a_server_may_redirect_to_its_own_https(server, monkeypatch):
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, server.url.removesuffix("/x"))
    server.answers = [redirect("https://images.lan/x"), PLAIN.replace(b"200 OK", b"403 No")]
    with pytest.raises(StorageError, match="no answer from the proxy"):
        storage.read_bytes("http://images.lan/x")
    assert server.requests[1].startswith(b"CONNECT images.lan:443 ")


def test_a_second_redirect_is_checked_too(server, target):
    web.allow([target.url])
    server.answers, target.answers = [redirect(target.url)], [redirect("http://169.254.169.254/")]
    with pytest.raises(AddressNotAllowed, match=r"169\.254"):
        storage.read_bytes(server.url)


def test_a_store_may_take_longer_to_answer_than_to_connect(server, monkeypatch, hurried):
    hurried(connect=0.1, first=5.0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url.removesuffix("/x"))
    server.answers = [b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"]
    barrier = server.together = threading.Barrier(2)
    timer = threading.Timer(0.5, barrier.wait)
    timer.start()
    objects.Location("s3://bucket/x")
    timer.join()
    assert len(server.requests) == 1, "the first request was answered"
