"""What a user reads when a server or a network refuses."""

import http.server
import ssl
import threading
import time

import pytest

from trainer import storage
from trainer.base.errors import StorageError

REFUSALS = [
    (403, "AccessDenied", "AWS_SKIP_SIGNATURE=true"),
    (403, "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
    (400, "ExpiredToken", "log in again"),
    (404, "NoSuchBucket", "create the bucket"),
    (301, "PermanentRedirect", "AWS_REGION"),
    (403, "InvalidObjectState", "archive tier"),
    (418, "Teapot", "endpoint is one of S3"),
]


@pytest.mark.parametrize(("status", "code", "fix"), REFUSALS)
def test_a_refusal_names_the_object_the_cause_and_the_remedy(proxy, status, code, fix):
    for method in ("GET", "PUT", "HEAD"):
        proxy.fail("status", method=method, times=100, status=status, code=code)
    for action in (
        lambda: storage.read_bytes("s3://bucket/a b"),
        lambda: storage.write_bytes("s3://bucket/a b", b""),
        lambda: storage.list_files("s3://bucket/a b"),
    ):
        with pytest.raises(StorageError) as caught:
            action()
        assert "s3://bucket/a b" in caught.value.message
        assert ("no such bucket" if status == 404 else code) in caught.value.message
        assert fix in caught.value.fix
    assert len(proxy.requests) <= 6  # One for each, and one for the bucket's region: none is repeated.


def test_a_refused_look_at_an_object_says_why(proxy):
    proxy.fail("status", method="HEAD", status=400)
    proxy.fail("status", method="GET", status=400, code="ExpiredToken")
    with pytest.raises(StorageError, match="ExpiredToken"):
        storage.state("s3://bucket/x")


def test_a_store_that_stays_busy_is_given_up(proxy, hurried):
    hurried(total=1.0)
    proxy.fail("status", times=10_000, headers=(("Content-Type", "application/xml"), ("Retry-After", "3600")))
    start = time.monotonic()
    with pytest.raises(StorageError, match="cannot read s3://bucket/x: SlowDown") as caught:
        storage.read_bytes("s3://bucket/x")
    assert time.monotonic() - start < 10
    assert "run again later" in caught.value.fix


def test_something_that_is_no_store(proxy):
    proxy.fail("status", times=100, status=200, headers=(("Content-Type", "text/html"),), code="x")
    with pytest.raises(StorageError, match="no answer of an object store") as caught:
        storage.list_files("s3://bucket/x")
    assert "endpoint" in caught.value.fix


@pytest.mark.parametrize("uri", ["s3://bucket/a/../b", "s3://bucket/./x", "s3://bucket/.."])
def test_keys_that_would_become_others_are_refused(proxy, uri):
    with pytest.raises(StorageError, match="refused key"):
        storage.read_bytes(uri)
    with pytest.raises(StorageError, match="refused key"):
        storage.write_bytes(uri, b"")
    assert proxy.requests == []


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/x"])
def test_listed_names_that_climb_out_are_refused(proxy, name):
    listing = f"""<?xml version='1.0'?><ListBucketResult><Contents><Key>data/{name}</Key><Size>1</Size>
    <LastModified>2026-11-22T16:00:00Z</LastModified></Contents></ListBucketResult>"""
    proxy.answers["/bucket?list-type=2&prefix=data%2F"] = listing.encode()
    with pytest.raises(StorageError, match=r"invalid path|empty path") as caught:
        storage.list_files("s3://bucket/data")
    assert "rename the object" in caught.value.fix


def at(monkeypatch, endpoint):
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    start = time.monotonic()
    with pytest.raises(StorageError) as caught:
        storage.read_bytes("s3://bucket/x")
    assert time.monotonic() - start < 20
    assert "cannot read s3://bucket/x" in caught.value.message
    return caught.value


def test_a_server_that_is_not_there(proxy, monkeypatch, hurried):
    hurried(total=60)  # a server that has never answered is given up much sooner
    error = at(monkeypatch, "http://127.0.0.1:9")
    assert "no answer from the server: Connection refused" in error.message
    assert "address" in error.fix


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for 127.0.0.1 that signed itself, with its key, in one file."""
    pytest.importorskip("cryptography")
    from certificates import self_signed

    path = tmp_path_factory.mktemp("tls") / "server.pem"
    path.write_bytes(self_signed())
    return path


@pytest.fixture
def tls_server(certificate):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "5")
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *_):
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def test_a_private_authority_is_trusted_when_it_is_named(
    proxy, tls_server, certificate, monkeypatch, hurried
):
    hurried(total=60, first=60)
    error = at(monkeypatch, f"https://127.0.0.1:{tls_server}")
    assert "self-signed certificate" in error.message and "AWS_CA_BUNDLE" in error.fix
    with pytest.raises(StorageError, match="no trusted connection"):
        storage.read_bytes(f"https://127.0.0.1:{tls_server}/x")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    address = f"https://127.0.0.1:{tls_server}/x"
    assert storage.read_bytes("s3://bucket/x") == storage.read_bytes(address) == b"hello"
    error = at(monkeypatch, f"https://localhost:{tls_server}")
    assert "certificate is not valid for 'localhost'" in error.message
