import os
import stat
import struct
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import pytest

from trainer.base.errors import DataError, MissingError, StorageError
from trainer.data.sources import files
from trainer.data.sources.files import Zip, open_member


@pytest.fixture
def zip_path(tmp_path) -> Path:
    """A zip of a stored and a deflated member; the local header of one has an extra field."""
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.mkdir("a")
        archive.writestr("a/stored.jpg", bytes(range(256)) * 9)
        item = zipfile.ZipInfo("a/é deflated.jpg")
        item.compress_type = zipfile.ZIP_DEFLATED
        item.extra = struct.pack("<HH", 0x7777, 300) + bytes(300)
        archive.writestr(item, b"abc" * 1000)
        archive.writestr("empty", b"")
    return path


def test_members(zip_path):
    opened = Zip(str(zip_path))
    assert opened.read("a/stored.jpg") == bytes(range(256)) * 9
    assert opened.read("a/é deflated.jpg") == b"abc" * 1000
    assert opened.read("empty") == b""
    assert opened.state("a/stored.jpg") == f"2304 {zlib.crc32(bytes(range(256)) * 9):08x}"
    assert opened.state("nothing") == ""
    with pytest.raises(MissingError, match=r"no such file: nothing in .*x\.zip"):
        opened.read("nothing")


def test_a_local_header_with_a_longer_extra_field_than_the_directory_tells(zip_path):
    data = bytearray(zip_path.read_bytes())
    with zipfile.ZipFile(zip_path) as archive:
        place = archive.getinfo("a/é deflated.jpg").header_offset
    directory = data.index(b"PK\x01\x02", place)
    entry = data.index("a/é deflated.jpg".encode(), directory) - 46
    # The directory's own extra field goes; the local one stays.
    name = len("a/é deflated.jpg".encode())
    struct.pack_into("<H", data, entry + 30, 0)
    del data[entry + 46 + name : entry + 46 + name + 304]
    end = data.rindex(b"PK\x05\x06")
    struct.pack_into("<L", data, end + 12, struct.unpack_from("<L", data, end + 12)[0] - 304)
    zip_path.write_bytes(data)
    assert Zip(str(zip_path)).read("a/é deflated.jpg") == b"abc" * 1000


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (16, 7, "checksum mismatch"),
        (24, 10, "checksum mismatch"),  # a bomb: it unpacks to more than it says
        (10, 12, "packed by the unknown method 12"),
        (10, 8, "invalid"),
    ],
)
def test_a_directory_that_tells_other_things(zip_path, field, value, message):
    data = bytearray(zip_path.read_bytes())
    entry = data.rindex(b"a/stored.jpg") - 46
    struct.pack_into("<H" if field == 10 else "<L", data, entry + field, value)
    zip_path.write_bytes(data)
    with pytest.raises(StorageError, match=message) as caught:
        Zip(str(zip_path)).read("a/stored.jpg")
    assert "a/stored.jpg in" in caught.value.message


def test_what_is_no_zip_or_cut_off(zip_path):
    data = zip_path.read_bytes()
    for content in (b"", b"not a zip", data[:-30]):
        zip_path.write_bytes(content)
        with pytest.raises(StorageError, match="no zip that can be read"):
            Zip(str(zip_path))
    zip_path.write_bytes(data[40:])
    with pytest.raises(DataError, match=r"refused 'a/stored.jpg' .*: it is outside the zip"):
        Zip(str(zip_path))
    zip_path.write_bytes(data)
    patch(zip_path, b"a/stored.jpg", 42, "<L", len(data) - 3)
    with pytest.raises(StorageError, match=r"a/stored\.jpg in .*: the directory says .* outside the zip"):
        Zip(str(zip_path)).read("a/stored.jpg")


def test_what_is_too_large_for_an_image_is_not_read(zip_path, monkeypatch):
    monkeypatch.setattr(files, "_LARGEST", 2000)
    with pytest.raises(StorageError, match="2304 bytes are too many for an image"):
        Zip(str(zip_path)).read("a/stored.jpg")


def member(name: str, mode: int = stat.S_IFREG) -> zipfile.ZipInfo:
    item = zipfile.ZipInfo(name)
    item.external_attr = (mode | 0o644) << 16
    return item


def patch(path: Path, name: bytes, field: int, form: str, value: int) -> None:
    """Change a field of a member in the zip's directory."""
    data = bytearray(path.read_bytes())
    struct.pack_into(form, data, data.rindex(name) - 46 + field, value)
    path.write_bytes(data)


def test_links_encrypted_and_overlapping_members_are_refused(zip_path):
    data = zip_path.read_bytes()
    with zipfile.ZipFile(zip_path, "a") as archive:
        archive.writestr(member("a/link.jpg", stat.S_IFLNK), b"/etc/passwd")
    with pytest.raises(DataError, match=r"refused 'a/link.jpg' in .*x\.zip: it is a link"):
        Zip(str(zip_path))
    zip_path.write_bytes(data)
    patch(zip_path, b"a/stored.jpg", 8, "<H", 1)
    with pytest.raises(DataError, match="it is encrypted"):
        Zip(str(zip_path))
    zip_path.write_bytes(data)
    patch(zip_path, b"a/stored.jpg", 20, "<L", 2**20)  # Its bytes would be those of the next ones as well.
    with pytest.raises(DataError, match="within another member"):
        Zip(str(zip_path))


def test_a_bomb_that_says_to_be_small_is_not_unpacked(zip_path):
    with zipfile.ZipFile(zip_path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/bomb.jpg", bytes(8 * 2**20))
    patch(zip_path, b"a/bomb.jpg", 24, "<L", 10)
    opened = Zip(str(zip_path))
    tracemalloc.start()
    try:
        with pytest.raises(StorageError, match="checksum mismatch"):
            opened.read("a/bomb.jpg")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_member_is_read_as_a_stream(zip_path, bucket):
    text = os.urandom(2**20).hex().encode()
    with zipfile.ZipFile(zip_path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("big.json", text)
    (bucket / "x.zip").write_bytes(zip_path.read_bytes())
    for uri in (str(zip_path), "s3://bucket/x.zip"):
        with open_member(uri, "big.json") as file:
            assert file.read(1000) + file.read() == text
    with (
        pytest.raises(DataError, match=r"no\.json in .* cannot be read: there is none of this name"),
        open_member(str(zip_path), "no.json"),
    ):
        pass
    patch(zip_path, b"big.json", 16, "<L", 7)
    with (
        pytest.raises(DataError, match=r"big.json in .* cannot be read: Bad CRC"),
        open_member(str(zip_path), "big.json") as file,
    ):
        file.read()
