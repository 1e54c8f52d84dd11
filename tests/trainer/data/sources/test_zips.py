import struct
import zipfile
import zlib
from pathlib import Path

import pytest

from trainer.data.sources.zips import Zip
from trainer.errors import MissingError, StorageError


@pytest.fixture
def made(tmp_path) -> Path:
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


def test_members(made):
    found = Zip(str(made))
    assert found.names() == ["a/stored.jpg", "a/é deflated.jpg", "empty"]
    assert found.read("a/stored.jpg") == bytes(range(256)) * 9
    assert found.read("a/é deflated.jpg") == b"abc" * 1000
    assert found.read("empty") == b""
    assert found.state("a/stored.jpg") == f"2304 {zlib.crc32(bytes(range(256)) * 9):08x}"
    assert found.state("nothing") == ""
    with pytest.raises(MissingError, match=r"no such file: nothing in .*x\.zip"):
        found.read("nothing")


def test_a_local_header_with_a_longer_extra_field_than_the_directory_tells(made):
    data = bytearray(made.read_bytes())
    with zipfile.ZipFile(made) as archive:
        place = archive.getinfo("a/é deflated.jpg").header_offset
    directory = data.index(b"PK\x01\x02", place)
    entry = data.index("a/é deflated.jpg".encode(), directory) - 46
    # The directory's own extra field goes; the local one stays.
    name = len("a/é deflated.jpg".encode())
    struct.pack_into("<H", data, entry + 30, 0)
    del data[entry + 46 + name : entry + 46 + name + 304]
    end = data.rindex(b"PK\x05\x06")
    struct.pack_into("<L", data, end + 12, struct.unpack_from("<L", data, end + 12)[0] - 304)
    made.write_bytes(data)
    assert Zip(str(made)).read("a/é deflated.jpg") == b"abc" * 1000


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (16, 7, "its checksum is another one"),
        (24, 10, "its checksum is another one"),  # a bomb: it unpacks to more than it says
        (24, 2**31, "too many for an image"),
        (10, 12, "packed by method 12"),
        (10, 8, "invalid"),
    ],
)
def test_a_directory_that_tells_other_things(made, field, value, message):
    data = bytearray(made.read_bytes())
    entry = data.rindex(b"a/stored.jpg") - 46
    struct.pack_into("<H" if field == 10 else "<L", data, entry + field, value)
    made.write_bytes(data)
    with pytest.raises(StorageError, match=message) as caught:
        Zip(str(made)).read("a/stored.jpg")
    assert "a/stored.jpg in" in caught.value.message


def test_what_is_no_zip_or_cut_off(made):
    data = made.read_bytes()
    for content in (b"", b"not a zip", data[:-30]):
        made.write_bytes(content)
        with pytest.raises(StorageError, match="no zip that can be read"):
            Zip(str(made))
    made.write_bytes(data[40:])
    with pytest.raises(StorageError, match="outside the zip"):
        Zip(str(made)).read("a/stored.jpg")
