"""Redirects: followed, told where they have no end, and refused where they lead out of the public network."""

from collections.abc import Iterator

import pytest
from prepared_server import Server

from trainer import storage
from trainer.base.errors import StorageError
from trainer.storage import web
from trainer.storage.web import Refused, UrlPolicy


@pytest.fixture
def server(hurried) -> Iterator[Server]:
    started = Server()
    yield started
    started.stop()


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
    with pytest.raises(StorageError, match="redirected without end") as caught:
        read(server.url)
    assert f" -> {there}" in caught.value.message or f" -> {back}" in caught.value.message
    assert not caught.value.transient and "no use to try again" in caught.value.fix
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
