"""What every store must do for us, tried on each that can be had, and what a user reads when one refuses."""

import datetime
import hashlib
import http.server
import ipaddress
import os
import ssl
import threading
import time

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from prepared_server import Server

from trainer import storage
from trainer.base import json_files
from trainer.base.errors import MissingError, StorageError
from trainer.storage import objects
from trainer.storage.environment import read_settings


def test_a_file_and_its_folder(any_store):
    uri = f"{any_store}/data/a b/x+é~'(1).json"
    assert storage.state(uri) is None and storage.list_files(f"{any_store}/data") == []
    storage.write_json(uri, {"a": 1})
    storage.write_bytes(f"{any_store}/data/empty", b"")
    assert storage.read_json(uri) == {"a": 1}
    assert storage.read_bytes(f"{any_store}/data/empty") == b""
    assert storage.state(uri).size == len(json_files.encode({"a": 1}))
    assert storage.list_files(f"{any_store}/data") == ["a b/x+é~'(1).json", "empty"]
    assert list(storage.list_states(f"{any_store}/data")) == ["empty"]
    first = storage.state(uri).version
    storage.write_json(uri, {"a": 2})
    assert storage.read_json(uri) == {"a": 2} and storage.state(uri).version != first
    storage.delete(uri)
    storage.delete(uri)
    assert not storage.exists(uri)


def test_a_large_file_in_parts_and_pieces(any_store, tmp_path):
    content = os.urandom(18 * 2**20 + 7)
    (tmp_path / "x").write_bytes(content)
    uri = f"{any_store}/large"
    storage.upload(tmp_path / "x", uri)
    assert storage.read_bytes(uri, sha256=hashlib.sha256(content).hexdigest()) == content
    assert storage.read_range(uri, 2**22 - 5, 10) == content[2**22 - 5 : 2**22 + 5]
    assert storage.local_copy(uri).read_bytes() == content
    with storage.open_reader(uri) as file:
        file.seek(-7, os.SEEK_END)
        assert file.read() == content[-7:]


def test_an_upload_that_is_interrupted_leaves_nothing(any_store, interrupt_part):
    interrupt_part(2)
    with pytest.raises(KeyboardInterrupt):
        storage.write_bytes(f"{any_store}/x", bytes(18 * 2**20))
    if storage.scheme(any_store) == "s3":
        bucket = any_store.removeprefix("s3://")
        assert read_settings("s3").client._list_multipart_uploads(bucket).uploads == []
    assert not storage.exists(f"{any_store}/x")


def test_a_file_is_created_once(any_store):
    assert storage.create(f"{any_store}/lock", b"first")
    assert not storage.create(f"{any_store}/lock", b"second")
    assert storage.read_bytes(f"{any_store}/lock") == b"first"


def test_what_is_not_there_is_named(any_store, request):
    with pytest.raises(MissingError, match=f"no such file: {any_store}/none"):
        storage.read_bytes(f"{any_store}/none")
    if request.node.callspec.params["any_store"] == "seaweedfs":
        return  # it makes buckets as they are written to
    with pytest.raises(StorageError, match="no such bucket"):
        storage.write_bytes(f"{any_store}-that-is-not-there/x", b"")


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({"GCE_METADATA_HOST": "127.0.0.1:9"}, "GOOGLE_SERVICE_ACCOUNT"),
        ({"GOOGLE_SERVICE_ACCOUNT": "/none.json"}, "GOOGLE_APPLICATION_CREDENTIALS"),
        ({"GOOGLE_SERVICE_ACCOUNT_KEY": "{}"}, "GOOGLE_SERVICE_ACCOUNT"),
        ({"AWS_CA_BUNDLE": "/none.pem"}, "set AWS_CA_BUNDLE to a file"),
    ],
)
def test_missing_credentials_are_reported_soon(bare_clouds, monkeypatch, variables, names):
    server = Server()
    monkeypatch.setattr(objects, "_CREDENTIAL_SECONDS", 1.0)
    monkeypatch.setenv("GOOGLE_BASE_URL", server.url.removesuffix("/x"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    with pytest.raises(StorageError) as caught:
        storage.read_bytes("gs://bucket/x")
    assert names in caught.value.fix and not caught.value.transient
    assert time.monotonic() - began < 30
    server.stop()


@pytest.mark.parametrize("url", ["http://", "host:9000", "http://h\n"])
def test_an_endpoint_that_cannot_be_used_is_named(bare_clouds, monkeypatch, url):
    monkeypatch.setenv("GOOGLE_BASE_URL", url)
    with pytest.raises(StorageError, match="of gs:// cannot be used") as caught:
        storage.exists("gs://bucket/x")
    assert "https://host:port" in caught.value.fix


def test_workload_identity_of_google_needs_no_variable(google_bucket, monkeypatch):
    server, token = Server(), '{"access_token": "t", "expires_in": 3600, "token_type": "Bearer"}'
    head = f"HTTP/1.1 200 OK\r\nMetadata-Flavor: Google\r\nContent-Length: {len(token)}\r\n\r\n"
    server.answers = [f"{head}{token}".encode()]
    monkeypatch.setenv("GCE_METADATA_HOST", server.url.split("/")[2])
    monkeypatch.delenv("GOOGLE_SERVICE_ACCOUNT")
    storage.write_bytes(f"{google_bucket}/x", b"1")
    assert storage.read_bytes(f"{google_bucket}/x") == b"1"
    assert server.requests and all(b"token" in request.split()[1] for request in server.requests)
    server.stop()


REFUSALS = [
    (403, "AccessDenied", "AWS_SKIP_SIGNATURE=true"),
    (403, "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
    (400, "ExpiredToken", "log in again"),
    (404, "NoSuchBucket", "create the bucket"),
    (301, "PermanentRedirect", "AWS_REGION"),
    (418, "Teapot", "endpoint is an S3 endpoint"),
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
    with pytest.raises(StorageError, match="not from an object store") as caught:
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
    objects.forget_locations()
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


def self_signed():
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test server")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM) + private


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for 127.0.0.1 that signed itself, with its key, in one file."""
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
    with pytest.raises(StorageError, match="the connection is not trusted"):
        storage.read_bytes(f"https://127.0.0.1:{tls_server}/x")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    objects.forget_locations()
    address = f"https://127.0.0.1:{tls_server}/x"
    assert storage.read_bytes("s3://bucket/x") == storage.read_bytes(address) == b"hello"
    error = at(monkeypatch, f"https://localhost:{tls_server}")
    assert "certificate is not valid for 'localhost'" in error.message
