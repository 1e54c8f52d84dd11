import hashlib
import os
import shutil
import time
from pathlib import Path

import pytest

from trainer import storage
from trainer.base.errors import MissingError, StorageError
from trainer.storage import check_uri
from trainer.storage.uris import host_or_bucket


def everything_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_file_uri_is_a_path(tmp_path):
    (tmp_path / "a b").write_bytes(b"x")
    assert storage.read_bytes(f"file://{tmp_path}/a%20b") == b"x"
    assert storage.absolute(f"file:{tmp_path}/") == str(tmp_path)


def test_join():
    assert storage.join("/", "a") == "/a"
    assert storage.join("/data/", "raw", "a/b.json") == "/data/raw/a/b.json"
    assert storage.join("s3://bucket", "a") == "s3://bucket/a"


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", "a\\..\\b", "\\x", "", "a\0b", "."])
def test_join_refuses_names_that_climb_out(name):
    with pytest.raises(StorageError, match="invalid name"):
        storage.join("s3://bucket/data", name)


def test_local_round_trip(tmp_path):
    uri = str(tmp_path / "deep" / "er" / "x.json")
    storage.write_json(uri, {"é": [1, 2.5, None]})
    assert storage.exists(uri)
    assert storage.read_json(uri) == {"é": [1, 2.5, None]}
    assert storage.size(uri) == Path(uri).stat().st_size
    assert storage.local_copy(uri) == Path(uri)
    assert storage.list_files(str(tmp_path)) == ["deep/er/x.json"]
    assert list(storage.list_states(str(tmp_path))) == []
    storage.delete(uri)
    storage.delete(uri)
    assert not storage.exists(uri)


@pytest.mark.parametrize("action", [storage.read_bytes, storage.size, storage.local_copy, storage.read_json])
def test_a_missing_file_is_named(tmp_path, action):
    with pytest.raises(StorageError, match=r"no such file: .*nothing\.json"):
        action(str(tmp_path / "nothing.json"))


def test_broken_json_is_named(tmp_path):
    (tmp_path / "x.json").write_text('{"a": ')
    with pytest.raises(StorageError, match=r"x\.json is not JSON"):
        storage.read_json(str(tmp_path / "x.json"))


def test_an_unknown_scheme_is_named():
    with pytest.raises(StorageError, match="unknown scheme 'ftp'"):
        storage.read_bytes("ftp://bucket/key")


def test_a_failed_write_leaves_the_old_content_and_nothing_else(tmp_path):
    uri = str(tmp_path / "x")
    storage.write_bytes(uri, b"old")
    with pytest.raises(RuntimeError), storage.new_file(uri) as path:
        path.write_bytes(b"half of the ne")
        raise RuntimeError
    assert storage.read_bytes(uri) == b"old"
    assert everything_under(tmp_path) == ["x"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full to stand for a full disk")
def test_a_full_disk_is_named_with_its_remedy(tmp_path):
    uri = str(tmp_path / "x")
    with pytest.raises(StorageError, match="No space left") as caught, storage.new_file(uri) as path:
        path.symlink_to("/dev/full")
        path.write_bytes(b"0" * 100_000)
    assert uri in caught.value.message
    assert "disk is full" in caught.value.fix
    assert everything_under(tmp_path) == []


def test_stale_temporary_files_are_removed_and_fresh_ones_left(tmp_path):
    old, fresh = tmp_path / ".a.1-x.tmp", tmp_path / ".b.1-x.tmp"
    old.write_bytes(b"")
    fresh.write_bytes(b"")
    os.utime(old, (0, 0))
    storage.remove_stale(str(tmp_path))
    assert everything_under(tmp_path) == [".b.1-x.tmp"]
    assert storage.list_files(str(tmp_path)) == []


def test_an_address_of_no_object_is_named(bucket):
    with pytest.raises(StorageError, match="has no object key"):
        storage.read_bytes("s3://bucket")


def test_minio_uris_take_their_own_endpoint(bucket, monkeypatch):
    storage.write_bytes("s3://bucket/x", b"1")
    endpoint = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    monkeypatch.setenv("MINIO_ENDPOINT", endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert storage.read_bytes("minio://bucket/x") == b"1"


def test_what_is_known_of_a_file(bucket, tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    os.utime(tmp_path / "x", ns=(0, 1_500_000_000_000_000_001))
    assert storage.state(str(tmp_path / "x")) == (5, 1.5e9, "1500000000000000001")
    storage.write_bytes("s3://bucket/x", b"12345")
    file_state = storage.state("s3://bucket/x")
    assert file_state.size == 5 and file_state.etag == hashlib.md5(b"12345").hexdigest()
    assert abs(file_state.modified - time.time()) < 60
    for nothing in (str(tmp_path / "none"), str(tmp_path), "s3://bucket/none"):
        assert storage.state(nothing) is None
    assert storage.FileState(1, 2.0, "").version == "2.0"
    assert storage.FileState(1, None, "").version == ""


def test_large_folders_are_listed_page_by_page(proxy, bucket):
    (bucket / "many").mkdir()
    names = [f"{number:04d}" for number in range(1100)]
    for name in names:
        (bucket / "many" / name).write_text("x")
    listing = storage.scan("s3://bucket/many")
    assert next(listing)[0] == "0000" and len(proxy.requests) == 1
    proxy.fail("cut", after=500)
    proxy.fail("status", times=2)
    assert [name for name, _ in listing] == names[1:]
    assert len(proxy.requests) == 5


def test_a_file_of_another_machine_is_refused():
    with pytest.raises(StorageError, match="machine 'host'") as caught:
        storage.read_bytes("file://host/x")
    assert "file:///host/x" in caught.value.fix
    assert storage.absolute("file://localhost/x") == "/x"


def test_files_that_are_deleted_while_they_are_listed_are_left_out(tmp_path):
    for number in range(5):
        (tmp_path / "folder" / str(number)).mkdir(parents=True)
        (tmp_path / "folder" / str(number) / "file").write_text("x")
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").write_text("x")
    listing = storage.scan(str(tmp_path))
    next(listing)
    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert len(list(listing)) < 6


def test_a_fifo_or_device_is_refused_instead_of_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("fifo", "zero"):
        for read in (storage.read_bytes, storage.read_json, lambda uri: storage.read_range(uri, 0, 4)):
            with pytest.raises(StorageError, match="is not a regular file"):
                read(str(tmp_path / name))


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket",
        "s3://my-bucket.2/Any_Key//x",
        f"minio://{'a' * 63}/x",
        "s3://1.2.3/x",
        "s3://My_Bucket/x",
        "/My_Bucket/x",
        "file:///A_b",
        "https://a.b/x",
        "sample",
        "",
        "gs://my_bucket-1/x",
        f"gs://{'a' * 60}.example.org",
    ],
)
def test_places_that_exist(uri):
    check_uri(uri)


@pytest.mark.parametrize(
    "uri",
    [
        "s3:///x", "s3:bucket/x", "minio://ä-b/x", "minio://My..Bucket/x", "s3://1.2.3.4/x", "s3://a/x",
        "s3://-ab/x", "gs://ab/x", "gs://10.0.0.1/x", "gs://a..b/x", "gs:///x",
    ],
)  # fmt: skip
def test_a_name_that_no_bucket_can_have_is_refused(uri):
    with pytest.raises(StorageError, match=r"invalid bucket name|has no bucket") as caught:
        check_uri(uri)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("uri", "place"),
    [
        ("http://Example.org/a b", "example.org:80"), ("http://example.org:81?x", "example.org:81"),
        ("HTTPS://[2001:DB8::0:1]#x", "[2001:db8::0:1]:443"),
        ("http://xn--bcher-kva.example", "xn--bcher-kva.example:80"),
        ("s3://bucket/a/b", "s3://bucket"),
    ],
)  # fmt: skip
def test_place_of_an_address(uri, place):
    assert host_or_bucket(uri) == place


@pytest.mark.parametrize(
    "host", ["", ":80", "[]", "[::1", "[::g]", "a:99999", "a:-1", "a:1:1", "a:0", "\ud800.b"]
)
def test_hosts_that_no_server_can_have(host):
    with pytest.raises(MissingError) as caught:
        host_or_bucket(f"http://{host}/i.jpg")
    assert not caught.value.transient and caught.value.fix
