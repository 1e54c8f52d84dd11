"""What every store must do for us, tried on each that can be had."""

import hashlib
import os

import pytest

from trainer import storage
from trainer.base import json_files
from trainer.base.errors import MissingError, StorageError
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
