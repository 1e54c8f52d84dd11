"""What every store must do for us, tried on each that can be had."""

import hashlib
import os
import time

import pytest
from prepared_server import Server

from trainer import storage
from trainer.base import json_files
from trainer.base.errors import MissingError, StorageError
from trainer.storage import objects
from trainer.storage.environment import settings


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
    if storage.scheme(any_store) == "s3":  # Azure removes blocks of no blob by itself, after a week
        assert settings("s3").client._list_multipart_uploads(any_store.removeprefix("s3://")).uploads == []
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
    ("uri", "variables", "names"),
    [
        ("gs://bucket/x", {"GCE_METADATA_HOST": "127.0.0.1:9"}, "GOOGLE_SERVICE_ACCOUNT"),
        ("gs://bucket/x", {"GOOGLE_SERVICE_ACCOUNT": "/none.json"}, "GOOGLE_APPLICATION_CREDENTIALS"),
        ("gs://bucket/x", {"GOOGLE_APPLICATION_CREDENTIALS": "/none.json"}, "GOOGLE_SERVICE_ACCOUNT"),
        ("gs://bucket/x", {"GOOGLE_SERVICE_ACCOUNT_KEY": "[]"}, "GOOGLE_SERVICE_ACCOUNT"),
        ("gs://bucket/x", {"GOOGLE_SERVICE_ACCOUNT_KEY": "{}"}, "GOOGLE_SERVICE_ACCOUNT"),
        ("gs://bucket/x", {"AWS_CA_BUNDLE": "/none.pem"}, "let AWS_CA_BUNDLE name a file"),
        ("az://container/x", {}, "AZURE_STORAGE_ACCOUNT_NAME"),
        ("az://container/x", {"AZURE_STORAGE_ACCOUNT_NAME": "kubedet"}, "AZURE_STORAGE_ACCOUNT_KEY"),
        ("az://container/x", {"AZURE_STORAGE_ACCOUNT_NAME": "a/b"}, "AZURE_STORAGE_ACCOUNT_KEY"),
        ("az://container/x", {"AZURE_STORAGE_ACCOUNT_KEY": "!"}, "AZURE_FEDERATED_TOKEN_FILE"),
        ("az://container/x", {"AZURE_STORAGE_SAS_TOKEN": "x"}, "AZURE_STORAGE_SAS_TOKEN"),
        ("az://container/x", {"AZURE_STORAGE_TOKEN": "a\nb"}, "environment"),
    ],
)
def test_missing_credentials_are_reported_soon(bare_clouds, monkeypatch, uri, variables, names):
    server = Server()
    monkeypatch.setattr(objects, "_CREDENTIAL_SECONDS", 1.0)
    for name in ("GOOGLE_BASE_URL", "AZURE_STORAGE_ENDPOINT"):
        monkeypatch.setenv(name, server.url.removesuffix("/x"))
    if variables and uri.startswith("az"):
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "kubedet")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    with pytest.raises(StorageError) as caught:
        storage.read_bytes(uri)
    assert names in caught.value.fix and not caught.value.passing
    assert time.monotonic() - began < 30
    server.stop()


@pytest.mark.parametrize(
    "url", ["http://", "host:9000", "http://h:99999", "http://a b/", "file:///x", "http://h\n"]
)
@pytest.mark.parametrize("kind", ["gs", "az"])
def test_an_endpoint_that_cannot_be_used_is_named(bare_clouds, monkeypatch, kind, url):
    monkeypatch.setenv("GOOGLE_BASE_URL", url)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "kubedet")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", url)
    with pytest.raises(StorageError, match=f"of {kind}:// cannot be used") as caught:
        storage.exists(f"{kind}://bucket/x")
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


def test_of_two_that_create_one_succeeds(any_cloud, monkeypatch):
    storage.write_bytes(f"{any_cloud}/lock", b"first")
    monkeypatch.setattr(objects, "state", lambda uri: None)  # both looked before either wrote
    assert not storage.create(f"{any_cloud}/lock", b"second")
    assert storage.read_bytes(f"{any_cloud}/lock") == b"first"


def test_what_was_altered_in_the_store_is_found(azure_account, hurried):
    storage.write_bytes("az://container/x", b"whole")
    azure_account.containers["container"]["x"].data = b"holed"
    with pytest.raises(StorageError, match="az://container/x is damaged: its sha256"):
        storage.read_bytes("az://container/x")


def test_keys_that_are_refused_are_told_as_that(azure_account, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "another")
    with pytest.raises(StorageError, match="AuthenticationFailed") as caught:
        storage.read_bytes("az://container/x")
    assert "AZURE_STORAGE_ACCOUNT_KEY" in caught.value.fix and "AWS_" not in caught.value.fix
