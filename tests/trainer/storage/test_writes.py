"""Writing to a store that stumbles: whole or not at all, and checked."""

import base64
import errno
import hashlib
import os
import re
import socket
import threading
import time
from contextlib import suppress
from functools import partial

import pytest
from at_once import at_once

from trainer import storage
from trainer.base.errors import StorageError
from trainer.storage import objects
from trainer.storage.environment import read_settings

KB = 1024


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(objects, "PART_BYTES", 64 * KB)


def sent(proxy, method, part=""):
    return [line for line in proxy.requests if line.startswith(method) and part in line]


def unfinished():
    return read_settings("s3").client._list_multipart_uploads("bucket").uploads


def test_a_large_file_is_sent_in_parts(proxy, bucket, small_parts, tmp_path):
    content = os.urandom(1000 * KB + 7)
    (tmp_path / "x").write_bytes(content)
    storage.upload(tmp_path / "x", "s3://bucket/x")
    assert (bucket / "x").read_bytes() == content
    assert len(sent(proxy, "PUT", "partNumber=")) == 16
    object_stat = read_settings("s3").client.stat_object("bucket", "x")
    assert object_stat.metadata["x-amz-meta-sha256"] == hashlib.sha256(content).hexdigest()
    assert storage.read_bytes("s3://bucket/x") == content


@pytest.mark.parametrize("kind", ["drop", "lost", "status", "spoil"])
@pytest.mark.parametrize("size", [10 * KB, 300 * KB])
def test_what_arrives_wrongly_is_sent_again(proxy, bucket, small_parts, hurried, kind, size):
    hurried(read_timeout=10.0)  # a loaded store that is given up takes its parts away meanwhile
    content = os.urandom(size)
    proxy.fail(kind, method="PUT", times=3)
    storage.write_bytes("s3://bucket/x", content)
    assert (bucket / "x").read_bytes() == content


@pytest.mark.parametrize("query", ["uploads", "uploadId"])
def test_a_lost_answer_at_the_start_or_the_end_of_an_upload(proxy, bucket, small_parts, query):
    proxy.fail("lost", method="POST", query=query)
    content = os.urandom(300 * KB)
    storage.write_bytes("s3://bucket/x", content)
    assert (bucket / "x").read_bytes() == content


def test_a_store_that_takes_nothing_right_is_an_error(proxy, small_parts):
    proxy.fail("spoil", method="PUT", times=100)
    with pytest.raises(StorageError, match="XAmzContentSHA256Mismatch") as caught:
        storage.write_bytes("s3://bucket/x", b"abc")
    assert "different bytes than were sent" in caught.value.fix


def test_what_nobody_signs_is_compared_too(proxy, bucket, monkeypatch):
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    proxy.answers["/bucket/x"] = b""
    storage.write_bytes("s3://bucket/x", b"abc")
    (headers,) = [headers for method, headers in proxy.heard if method == "PUT"]
    assert headers["x-amz-checksum-sha256"] == base64.b64encode(hashlib.sha256(b"abc").digest()).decode()
    assert "authorization" not in headers


def test_a_failed_upload_leaves_nothing(proxy, bucket, small_parts, hurried):
    storage.write_bytes("s3://bucket/x", b"before")
    proxy.fail("status", method="PUT", query="partNumber=3", times=100, status=403, code="AccessDenied")
    with pytest.raises(StorageError, match="cannot write s3://bucket/x: AccessDenied"):
        storage.write_bytes("s3://bucket/x", bytes(500 * KB))
    assert sent(proxy, "DELETE", "uploadId")
    assert unfinished() == []
    assert (bucket / "x").read_bytes() == b"before"


@pytest.mark.slow
def test_a_slow_link_takes_a_large_part(bucket, hurried, monkeypatch):
    """Two seconds of a link with 12 MB a second: longer than it may be silent."""
    hurried(connect=0.2, read_timeout=1.5, total=20.0)
    content, taken = os.urandom(24 * 2**20), bytearray()
    answer = b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n'

    def serve(listener):
        while listener.fileno() >= 0:
            with suppress(OSError), listener.accept()[0] as connection:
                head = b""
                while b"\r\n\r\n" not in head:
                    head += connection.recv(1)
                length = int((re.search(rb"(?i)content-length: (\d+)", head) or [0, 0])[1])
                del taken[:]
                while len(taken) < length and (more := connection.recv(64 * KB)):
                    taken.extend(more)
                    time.sleep(0.005)
                connection.sendall(answer)

    monkeypatch.setattr(objects, "PART_BYTES", 12 * 2**20)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * KB)
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        objects.forget_locations()
        storage.write_bytes("s3://bucket/x", content)
    assert taken == content


@pytest.mark.parametrize("links", [True, False])
def test_of_several_creators_one_succeeds_on_disk(tmp_path, monkeypatch, links):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "this file system has no links")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    uri = str(tmp_path / "lock" / "x")
    won = []

    def run(number):
        if storage.create(uri, str(number).encode()):
            won.append(number)

    at_once(*(partial(run, number) for number in range(16)))
    assert len(won) == 1
    assert storage.read_bytes(uri) == str(won[0]).encode()
    assert [path.name for path in (tmp_path / "lock").iterdir()] == ["x"]


def test_create_in_a_store(proxy, bucket, monkeypatch):
    assert storage.create("s3://bucket/x", b"first")
    assert not storage.create("s3://bucket/x", b"second")
    proxy.conditions = True
    monkeypatch.setattr(objects, "state", lambda uri: None)  # nobody had written when it was looked at
    assert not storage.create("s3://bucket/x", b"second")
    assert storage.read_bytes("s3://bucket/x") == b"first"
    proxy.fail("lost", method="PUT")
    assert storage.create("s3://bucket/y", b"mine")  # although the repeated request is told that it is there


def test_what_a_store_acknowledges_and_loses_is_written_again(proxy, bucket):
    proxy.answers["/bucket/x"] = b""  # to the write, and to the look at it
    with pytest.raises(StorageError, match=r"s3://bucket/x is missing or differs"):
        storage.write_bytes("s3://bucket/x", b"abc", confirm=True)
    del proxy.answers["/bucket/x"]
    storage.write_bytes("s3://bucket/x", b"abc", confirm=True)
    assert (bucket / "x").read_bytes() == b"abc"


def test_what_a_store_alters_is_written_again(proxy, bucket):
    proxy.fail("alter", method="PUT")
    storage.write_bytes("s3://bucket/x", b"abc", confirm=True)
    assert (bucket / "x").read_bytes() == b"abc" and len(sent(proxy, "PUT")) == 2
