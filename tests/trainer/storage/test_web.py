"""Web servers of all kinds."""

import ipaddress
import socket
import time
from collections.abc import Iterator

import pytest
from prepared_server import PLAIN, Server

from trainer import storage
from trainer.base.errors import ConfigError, StorageError
from trainer.storage import web
from trainer.storage.web import Refused, UrlPolicy


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


SPECIAL_IPV4 = [
    "0.0.0.0", "0.255.255.255", "10.0.0.1", "10.255.255.255", "100.64.0.0", "100.100.100.200",
    "100.127.255.255", "127.0.0.1", "127.255.255.255", "169.254.169.254", "172.16.0.0", "172.31.255.255",
    "192.0.0.1", "192.0.0.8", "192.0.0.9", "192.0.0.170", "192.0.0.192", "192.0.0.255", "192.0.2.1",
    "192.88.99.1", "192.168.0.1", "198.18.0.0", "198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1",
    "239.255.255.255", "240.0.0.1", "255.255.255.255", "168.63.129.16",
]  # fmt: skip
"""First, last or known addresses of each range."""

SPECIAL_IPV6 = [
    "::", "::1", "::2", "::8.8.8.8", "::127.0.0.1", "::ffff:0:8.8.8.8", "64:ff9b:1::",
    "64:ff9b:1:ffff::808:808", "100::1", "100:0:0:1::1", "1fff::1", "2001::1", "2001:0:808:808::1",
    "2001:1::1", "2001:2::1", "2001:10::1", "2001:20::1", "2001:1ff:ffff::1", "2001:db8::1", "2002:7f00:1::1",
    "2002:808:808::1", "3fff::1", "3fff:fff:ffff::1", "4000::1", "5f00::1", "fc00::1", "fd00:ec2::254",
    "fe80::1", "fe80::1%eth0", "febf::1", "fec0::1", "feff::1", "ff02::1", "ffff::1",
]  # fmt: skip

PUBLIC_IPV4 = [
    "1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255",
    "128.0.0.0", "169.253.255.255", "169.255.0.0", "172.15.255.255", "172.32.0.0", "192.0.1.0", "192.0.3.0",
    "192.88.98.255", "192.88.100.0", "192.167.255.255", "192.169.0.0", "198.17.255.255", "198.20.0.0",
    "223.255.255.255",
]  # fmt: skip
"""Neighbors of the ranges, and two resolvers."""


@pytest.mark.parametrize(
    "peer",
    [
        *SPECIAL_IPV6,
        *(form.format(address) for address in SPECIAL_IPV4 for form in ("{}", "::ffff:{}", "64:ff9b::{}")),
    ],
)
def test_what_is_not_of_the_public_network_is_refused(peer):
    with pytest.raises(Refused, match="no address of the public network") as caught:
        UrlPolicy().check_peer("http://example.org/a.jpg", peer)
    assert "data.allow_hosts" in caught.value.fix and "example.org" in caught.value.fix


@pytest.mark.parametrize(
    "peer",
    [
        "2000::1",
        "2001:200::1",
        "2001:db7::1",
        "2001:4860:4860::8888",
        "2003::1",
        "2606:4700::1111",
        "3ffe::1",
        *(form.format(address) for address in PUBLIC_IPV4 for form in ("{}", "::ffff:{}", "64:ff9b::{}")),
    ],
)
def test_what_is_public_is_reached(peer):
    UrlPolicy().check_peer("http://example.org/a.jpg", peer)


@pytest.mark.parametrize(
    ("allowed", "uri", "peer"),
    [
        ("example.org", "http://example.org/a", "10.0.0.1"),
        ("Example.org", "http://EXAMPLE.ORG:81/a", "10.0.0.1"),
        ("example.org:81", "http://example.org:81/a", "10.0.0.1"),
        ("10.0.0.0/8", "http://example.org/a", "10.0.0.1"),
        ("10.0.0.1", "http://example.org/a", "10.0.0.1"),
        ("[::1]:81", "http://[::1]:81/a", "::1"),
        ("fd00::/8", "https://example.org/a", "fd00::7"),
    ],
)
def test_what_is_allowed_by_name_is_reached(allowed, uri, peer):
    UrlPolicy((), (allowed,)).check_peer(uri, peer)


@pytest.mark.parametrize(
    ("allowed", "uri"),
    [
        ("example.org:81", "http://example.org:82/a"),
        ("example.org", "http://other.example.org/a"),
        ("example.org", "http://example.org.evil.net/a"),
        ("example.org", "http://example.org@evil.net/a"),
        ("192.168.0.0/16", "http://example.org/a"),
    ],
)
def test_an_allowance_holds_for_what_it_names_alone(allowed, uri):
    with pytest.raises(Refused):
        UrlPolicy((), (allowed,)).check_peer(uri, "10.0.0.1")


@pytest.mark.parametrize(
    "allowed", ["", "http://a", "a/b", "10.0.0.0/99", "s3://", "s3://a/b", "a:0", "a b", "*"]
)
def test_an_allowance_that_is_none_is_named(allowed):
    with pytest.raises(ConfigError, match=r"data\.allow_hosts"):
        UrlPolicy((), (allowed,))


def test_the_servers_and_buckets_that_the_user_named_are_reached_and_no_others():
    policy = UrlPolicy(("http://10.0.0.1:8000/set.json", "s3://own/set"), ("s3://shared", "minio://own/"))
    for uri in [
        "http://10.0.0.1:8000/b.jpg",
        "s3://own/x.jpg",
        "s3://shared/x.jpg",
        "minio://own/x",
        "/a.jpg",
    ]:
        policy.check(uri)
    others = "http://10.0.0.1/b.jpg http://10.0.0.1:6443/ s3://other/x gs://own/x s3://own2/x ftp://a/b"
    inside = "http://169.254.169.254/latest/meta-data http://[::1]/a http://0x7f000001.0.0.1:x/"
    for uri in f"{others} {inside}".split():
        with pytest.raises(StorageError, match=r"refused|not a valid address"):
            policy.check(uri)
    assert policy.is_named("s3://own/a")
    assert not policy.is_named("s3://shared/a") and not policy.is_named("ftp://")


def test_each_address_of_a_name_counts(monkeypatch):
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (peer, 80)) for peer in ("8.8.8.8", "169.254.169.254")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(Refused, match=r"169\.254"):
        UrlPolicy().check_names("http://two-faced.example/a.jpg")
    assert ipaddress.ip_address(UrlPolicy((), ("169.254.169.254",)).check_names("http://x.example/")[0][4][0])


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
    "an address in data": lambda uri: storage.read_within(uri, UrlPolicy((uri,))),
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


def test_many_that_are_no_circle_are_too_many(server):
    server.answers = [redirect(server.url.replace("/x", f"/{number}")) for number in range(60)]
    with pytest.raises(StorageError, match=r"/0 -> .*/1 -> "):
        storage.read_within(server.url, UrlPolicy((server.url,)))


@pytest.fixture
def only_this_is_public(monkeypatch):
    """Let 127.0.0.1 count as an address of the public network."""
    real = web._is_public
    monkeypatch.setattr(web, "_is_public", lambda peer: str(peer) == "127.0.0.1" or real(peer))
    web.forget_stores()
    yield
    web.forget_stores()


@pytest.mark.parametrize(
    "inside",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://127.0.0.2:1/",
        "http://10.0.0.1/x",
        "http://[::1]/x",
    ],
)
@pytest.mark.parametrize("read", [READS["read"], READS["look"], READS["copy"]])
def test_a_public_server_does_not_lead_inside(only_this_is_public, server, read, inside):
    server.answers = [redirect(inside)]
    with pytest.raises(Refused, match="no address of the public network"):
        read(server.url)
    assert len(server.requests) == 1


def test_not_by_a_second_hop_either(only_this_is_public, server, target):
    server.answers, target.answers = [redirect(target.url)], [redirect("http://169.254.169.254/")]
    with pytest.raises(Refused, match=r"169\.254"):
        storage.read_bytes(server.url)


def test_one_public_server_may_lead_to_another_and_is_looked_at_once(only_this_is_public, server, target):
    server.answers = [redirect(target.url)]
    assert [storage.read_bytes(server.url) for _ in range(3)] == [b"hello"] * 3
    assert len(server.requests) == 3


def test_a_server_inside_that_the_user_named_may_lead_where_it_likes(server, target):
    server.answers = [redirect(target.url)]
    assert storage.read_bytes(server.url) == b"hello"
    assert len(server.requests) == 1
