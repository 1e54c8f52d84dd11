"""Archives read member by member, good ones and bad ones."""

import io
import os
import struct
import tarfile
import tracemalloc
import zipfile

import pytest

from trainer import storage
from trainer.data.archives import Limits, members
from trainer.errors import DataError, StorageError

FILES = {"train/a.jpg": os.urandom(5000), "train/ü b.jpg": b"", "instances.json": b"{}" * 4000}


def zip_of(path, files, method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.mkdir("train")
        for name, data in files.items():
            archive.writestr(name, data)
    return str(path)


def tar_of(path, files, mode="w", change=lambda info: None, form=tarfile.PAX_FORMAT):
    with tarfile.open(path, mode, format=form) as archive:
        folder = tarfile.TarInfo("train")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            change(info)
            archive.addfile(info, io.BytesIO(data))
    return str(path)


def content(uri, **options):
    return {member.name: member.read() for member in members(uri, **options)}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_zip(tmp_path, method):
    assert content(zip_of(tmp_path / "x.zip", FILES, method)) == FILES


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar(tmp_path, mode, form):
    files = FILES | {"long/" + "n" * 90 + "/x": b"1", "512": bytes(512), "1024": bytes(1024)}
    assert content(tar_of(tmp_path / "named as you like", files, mode, form=form)) == files


def test_in_an_object_store(bucket, tmp_path):
    zip_of(bucket / "x.zip", FILES)
    tar_of(bucket / "x.tgz", FILES, "w:gz")
    assert content("s3://bucket/x.zip") == content("s3://bucket/x.tgz") == FILES


def test_only_what_is_wanted_is_given_and_some_need_not_be_read(tmp_path):
    for uri in (zip_of(tmp_path / "x.zip", FILES), tar_of(tmp_path / "x.tar", FILES)):
        assert list(content(uri, wanted=lambda name: name.endswith("json"))) == ["instances.json"]
        assert [member.name for member in members(uri)] == list(FILES)


def test_a_large_member_in_blocks(tmp_path):
    data = os.urandom(3_000_000)
    uri = tar_of(tmp_path / "x.tar", {"x": data})
    (member,) = [(member.size, list(member.blocks(10**6))) for member in members(uri)]
    assert member[0] == len(data) and b"".join(member[1]) == data and len(member[1]) == 3
    with pytest.raises(DataError, match="more than 1,000 bytes"):
        next(members(uri)).read(limit=1000)


def test_memory_does_not_grow_with_the_members(tmp_path):
    uri = tar_of(tmp_path / "x.tar", {f"{number:06d}": bytes(64) for number in range(3000)})
    tracemalloc.start()
    try:
        assert sum(1 for _ in members(uri)) == 3000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


BAD_NAMES = ["../x", "a/../../x", "/etc/passwd", "a\\..\\..\\x", "\\\\host\\x"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_climb_out_are_refused(tmp_path, name):
    for uri in (zip_of(tmp_path / "x.zip", {name: b""}), tar_of(tmp_path / "x.tar", {name: b""})):
        with pytest.raises(DataError, match="leads out") as caught:
            content(uri)
        assert uri in caught.value.message and caught.value.fix


def test_names_are_given_in_one_spelling(tmp_path):
    assert list(content(tar_of(tmp_path / "x.tar", {"./a//b.jpg": b""}))) == ["a/b.jpg"]
    assert list(content(zip_of(tmp_path / "x.zip", {"a\\b.jpg": b""}))) == ["a/b.jpg"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_in_a_tar_are_refused(tmp_path, kind):
    def change(info):
        info.type, info.linkname = kind, "/etc/passwd"

    with pytest.raises(DataError, match="a link, a device"):
        content(tar_of(tmp_path / "x.tar", {"x": b""}, change=change))


def test_links_in_a_zip_are_refused(tmp_path):
    info = zipfile.ZipInfo("x")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(DataError, match="it is a link"):
        content(str(tmp_path / "x.zip"))


def test_bombs_are_refused(tmp_path):
    files = {"a": bytes(3_000_000), "b": b""}
    limits = Limits(from_bytes=1_000_000)
    for uri in (
        zip_of(tmp_path / "x.zip", files),
        tar_of(tmp_path / "x.tgz", files, "w:gz"),
        tar_of(tmp_path / "x.txz", files, "w:xz"),
    ):
        with pytest.raises(DataError, match="are packed into"):
            content(uri, limits=limits)
        assert content(uri) == files
    with pytest.raises(DataError, match="more than 1,000"):
        content(tar_of(tmp_path / "x.tar", files), limits=Limits(member=1000))


def entry_of(data, name):
    """Return where the directory of a zip tells of a member."""
    place = data.rindex(name) - 46
    assert data[place : place + 4] == b"PK\x01\x02"
    return place


def test_members_that_overlap_are_refused(tmp_path):
    names = {"one": b"1" * 1000, "two": b"2" * 1000}
    uri = zip_of(tmp_path / "x.zip", names, zipfile.ZIP_STORED)
    data = bytearray((tmp_path / "x.zip").read_bytes())
    one, two = entry_of(data, b"one"), entry_of(data, b"two")
    data[two + 42 : two + 46] = data[one + 42 : one + 46]
    (tmp_path / "x.zip").write_bytes(data)
    with pytest.raises(DataError, match=r"overlaps|Overlap"):
        list(members(uri))


def test_an_encrypted_zip_is_refused(tmp_path):
    uri = zip_of(tmp_path / "x.zip", {"one": b"1"})
    data = bytearray((tmp_path / "x.zip").read_bytes())
    data[entry_of(data, b"one") + 8] |= 1
    (tmp_path / "x.zip").write_bytes(data)
    with pytest.raises(DataError, match="encrypted"):
        content(uri)


@pytest.mark.parametrize("said", [4999, 5001])
def test_a_wrong_size_in_a_zip(tmp_path, said):
    uri = zip_of(tmp_path / "x.zip", FILES)
    data = bytearray((tmp_path / "x.zip").read_bytes())
    entry = entry_of(data, b"train/a.jpg")
    data[entry + 24 : entry + 28] = struct.pack("<I", said)
    (tmp_path / "x.zip").write_bytes(data)
    with pytest.raises(DataError, match=r"train/a\.jpg.*damaged"):
        content(uri)


@pytest.mark.parametrize("kind", ["zip", "tar", "tgz", "tbz2", "txz"])
def test_an_archive_that_is_cut_off_anywhere_is_an_error(tmp_path, kind):
    uri = str(tmp_path / f"x.{kind}")
    if kind == "zip":
        zip_of(uri, FILES)
    else:
        tar_of(uri, FILES, {"tar": "w", "tgz": "w:gz", "tbz2": "w:bz2", "txz": "w:xz"}[kind])
    data = (tmp_path / f"x.{kind}").read_bytes()
    end = len(data.rstrip(b"\0")) if kind == "tar" else len(data) - 1
    for length in [*range(0, end, max(1, end // 40)), 512, 1024, 1536]:
        (tmp_path / f"x.{kind}").write_bytes(data[:length])
        with pytest.raises(DataError, match="no archive or damaged"):
            content(uri)


@pytest.mark.parametrize("kind", ["zip", "tgz"])
def test_a_changed_byte_is_noticed(tmp_path, kind):
    uri = str(tmp_path / f"x.{kind}")
    zip_of(uri, FILES) if kind == "zip" else tar_of(uri, FILES, "w:gz")
    data = bytearray((tmp_path / f"x.{kind}").read_bytes())
    data[len(data) // 3] ^= 1  # within the incompressible image
    (tmp_path / f"x.{kind}").write_bytes(data)
    with pytest.raises(DataError, match="damaged"):
        content(uri)


def test_a_broken_header_in_the_midst_of_a_tar_is_not_its_end(tmp_path):
    uri = tar_of(tmp_path / "x.tar", FILES)
    data = bytearray((tmp_path / "x.tar").read_bytes())
    data[data.index(b"instances.json") + 1] ^= 1
    (tmp_path / "x.tar").write_bytes(data)
    with pytest.raises(DataError, match="does not end as it should"):
        content(uri)


def test_something_else_and_nothing(tmp_path):
    (tmp_path / "x.zip").write_bytes(b"<html>not found</html>" * 100)
    with pytest.raises(DataError, match="no archive"):
        content(str(tmp_path / "x.zip"))
    with pytest.raises(StorageError, match="no such file"):
        content(str(tmp_path / "none.zip"))
    assert storage.exists(str(tmp_path / "x.zip"))
