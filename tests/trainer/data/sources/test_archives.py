"""A zip or tar of a data set: read like the folder that it was, and never trusted."""

import io
import json
import os
import random
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import pytest
from source_rows import rows_of

from trainer.base.errors import DataError, MissingError, StorageError
from trainer.config.schema import DataConfig
from trainer.data import sources
from trainer.data.download import plan
from trainer.data.sources import ArchiveSource, files
from trainer.data.sources.files import ZipReader, open_member

XML = (
    "<annotation><filename>a.jpg</filename><size><width>40</width><height>30</height></size><object>"
    "<name>cat</name><bndbox><xmin>1</xmin><ymin>2</ymin><xmax>3</xmax><ymax>4</ymax></bndbox></object>"
    "</annotation>"
)
METHODS = {"zip": zipfile.ZIP_DEFLATED, "stored.zip": zipfile.ZIP_STORED, "lzma.zip": zipfile.ZIP_LZMA}
FORMS = ("zip", "tar", "tar.gz", "tgz", "tar.bz2", "tar.xz")


def pack(folder: Path, form: str, top: str = "") -> Path:
    """Pack the files of a folder, below a folder `top`, as operating systems do."""
    path = folder.parent / f"{folder.name}.{form}"
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    if form in METHODS:
        with zipfile.ZipFile(path, "w", METHODS[form]) as archive:
            for file in files:
                archive.write(file, f"{top}{file.relative_to(folder).as_posix()}")
            archive.writestr(f"__MACOSX/{top}._data.yaml", b"x")
            archive.writestr(f"{top}.DS_Store", b"x")
    else:
        modes = {"tar": "w", "tar.gz": "w:gz", "tgz": "w:gz", "tar.bz2": "w:bz2", "tar.xz": "w:xz"}
        with tarfile.open(path, modes[form]) as archive:
            archive.add(folder, top.rstrip("/") or ".")
    return path


@pytest.fixture
def make_set(tmp_path, make_coco, make_jpeg):
    """A small set of each kind, whose one image of train has one or two boxes."""

    def make(kind: str) -> Path:
        if kind == "coco":
            return make_coco(train=["a.jpg"], val=["b.jpg"])
        root = tmp_path / kind
        for split, stem in (("train", "a"), ("val", "b")):
            (root / split).mkdir(parents=True)
            (root / split / f"{stem}.jpg").write_bytes(make_jpeg())
            if kind == "voc":
                (root / split / f"{stem}.xml").write_text(XML)
            else:
                (root / split / f"{stem}.txt").write_text("0 0.5 0.5 0.25 0.5\n")
        if kind == "yolo":
            (root / "data.yaml").write_text("train: train\nval: val\nnames: [cat]\n")
        return root

    return make


def rows(text: str, split: str = "train") -> list[dict]:
    return rows_of(sources.parse(text).listing().splits[split])


@pytest.mark.parametrize("kind", ["coco", "voc", "yolo"])
@pytest.mark.parametrize(("form", "top"), [("zip", "my set/"), ("tar", "")])
def test_sets_of_each_kind_are_read_like_their_folder(make_set, make_jpeg, kind, form, top):
    folder = make_set(kind)
    archive = pack(folder, form, top)
    plain = rows(str(folder))
    for text in (f"{kind}:{archive}", str(archive)):
        source = sources.parse(text)
        packed = rows(text)
        assert source.uri == f"{kind}:{archive}"
        same = ("file_name", "width", "height", "boxes", "fault_reason", "original_id")
        assert [[row[name] for name in same] for row in packed] == [
            [row[name] for name in same] for row in plain
        ]
        assert source.read(packed[0]["origin"]) == make_jpeg()


@pytest.mark.parametrize(
    ("kind", "added"),
    [
        ("coco", {"annotations/instances_train.json": "\n"}),
        ("voc", {"train/a.xml": "\n", "ImageSets/Main/train.txt": "a\n"}),
        ("yolo", {"data.yaml": "# changed\n", "train/a.txt": "0 0.5 0.5 0.1 0.125\n"}),
    ],
)
def test_the_state_changes_with_the_files_of_a_set_and_its_images(make_set, make_jpeg, kind, added):
    root = make_set(kind)
    states = [sources.parse(f"{kind}:{root}").listing().state for _ in range(2)]
    assert states[0] == states[1]
    for name, text in added.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        with (root / name).open("a") as file:
            file.write(text)
        states.append(sources.parse(f"{kind}:{root}").listing().state)
    (root / "train" / "a.jpg").write_bytes(make_jpeg(seed=9))
    states.append(sources.parse(f"{kind}:{root}").listing().state)
    assert len(set(states)) == 2 + len(added)


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_archives(make_set, form):
    assert len(rows(str(pack(make_set("yolo"), form)))) == 1


def test_what_is_found_does_not_depend_on_the_machine(make_set, tmp_path, monkeypatch):
    archive = pack(make_set("yolo"), "zip")
    listing = sources.parse(str(archive)).listing()
    before, state = rows(str(archive)), listing.state
    monkeypatch.setattr(files, "_unpacked", {})  # As in another pod.
    again = sources.parse(str(archive))
    assert rows(str(archive)) == before and again.listing().state == state
    assert before[0]["origin"] == f"{archive}#train/a.jpg" and str(tmp_path / "yolo") in str(archive)
    assert again.read(before[0]["origin"])


def test_an_archive_in_a_bucket(make_set, bucket):
    (bucket / "set.zip").write_bytes(pack(make_set("voc"), "zip").read_bytes())
    (row,) = rows("s3://bucket/set.zip")
    assert row["origin"] == "s3://bucket/set.zip#train/a.jpg"
    assert sources.parse("voc:s3://bucket/set.zip").read(row["origin"])


def test_an_image_that_is_listed_and_not_in_the_archive_is_missing(make_set):
    folder = make_set("yolo")
    (folder / "data.yaml").write_text("train: train.txt\nnames: [cat]\n")
    (folder / "train.txt").write_text("train/a.jpg\ntrain/gone.jpg\n")
    sound, gone = rows(str(pack(folder, "zip")))
    assert (sound["fault_reason"], gone["fault_reason"], gone["version"]) == ("", "image missing", "")


def test_messages_name_the_archive(make_set, tmp_path):
    folder = make_set("yolo")
    (folder / "train" / "a.txt").write_text("0 0.5 0.5\n")
    archive = pack(folder, "zip")
    with pytest.raises(DataError, match=f"{archive}/train/a.txt:1: '0 0.5 0.5' has 2 numbers"):
        plan(str(archive), str(tmp_path / "data"), DataConfig())
    (folder / "data.yaml").write_text("train: gone\nnames: [cat]\n")
    with pytest.raises(DataError, match=f"{pack(folder, 'zip')}/data.yaml: there are no images for train"):
        sources.parse(str(archive)).listing()


def zip_of(path: Path, **members: bytes | str) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def tar_of(path: Path, name: str, kind: bytes = tarfile.REGTYPE) -> Path:
    with tarfile.open(path, "w") as archive:
        item = tarfile.TarInfo(name)
        item.type, item.linkname = kind, "/etc/passwd"
        archive.addfile(item, io.BytesIO(b""))
    return path


@pytest.mark.parametrize("name", ["../x.jpg", "/x.jpg", "a/../../x.jpg", "..\\x.jpg", "C:\\x.jpg", "C:x.jpg"])
def test_names_that_climb_out_are_refused(tmp_path, name):
    before = {path.name for path in tmp_path.parent.iterdir()}
    for archive in (zip_of(tmp_path / "x.zip", **{name: b"x"}), tar_of(tmp_path / "x.tar", name)):
        with pytest.raises(DataError, match=r"refused .*: its name leads out of"):
            sources.parse(f"yolo:{archive}").listing()
    assert {path.name for path in tmp_path.parent.iterdir()} == before


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(tmp_path, kind):
    with pytest.raises(DataError, match="it is a link or device"):
        sources.parse(f"yolo:{tar_of(tmp_path / 'x.tar', 'a.jpg', kind)}").listing()


def test_more_than_the_disk_holds_or_an_archive_can_is_refused(tmp_path, make_set, monkeypatch):
    parts = {f"{number}.jpg": bytes(10_000_000) for number in range(4)}
    bombs = [zip_of(tmp_path / "bomb.zip", **parts), tmp_path / "bomb.tar.gz"]
    with tarfile.open(bombs[1], "w:gz") as archive:
        for name, data in parts.items():
            item = tarfile.TarInfo(name)
            item.size = len(data)
            archive.addfile(item, io.BytesIO(data))
    for bomb in bombs:
        with pytest.raises(DataError, match="0,000,000 bytes are packed into"):
            sources.parse(f"yolo:{bomb}").listing()
    archive = pack(make_set("yolo"), "zip")
    monkeypatch.setattr(files, "_MIN_FREE_BYTES", 2**60)
    with pytest.raises(DataError, match=r"GB unpacked, but .* has 0\.00 GB") as caught:
        sources.parse(str(archive)).listing()
    assert "TMPDIR" in caught.value.fix


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 nothing more", b"x" * 5000])
def test_what_is_no_archive(tmp_path, content):
    for name in ("x.zip", "x.tgz"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match="not a readable zip or tar"):
            sources.parse(str(tmp_path / name)).listing()


@pytest.fixture
def packed(tmp_path):
    """A set of one file of noise: nearly every byte of its archive is in it."""

    def make(form: str) -> Path:
        (tmp_path / "set").mkdir()
        (tmp_path / "set" / "a.jpg").write_bytes(random.Random(0).randbytes(40_000))
        return pack(tmp_path / "set", form)

    return make


@pytest.mark.parametrize("form", [*METHODS, "tar.gz", "tar.bz2"])
@pytest.mark.parametrize("place", [0.3, 0.9])
def test_a_changed_byte_is_damage(form, place, packed):
    archive = packed(form)
    data = bytearray(archive.read_bytes())
    data[int(place * len(data))] ^= 0x10
    archive.write_bytes(data)
    # Of bzip2 already the first block is unreadable, and nothing tells that a tar is in it.
    with pytest.raises(DataError, match=r"(cannot be unpacked: .|is not a readable zip or tar)") as caught:
        files.unpack(str(archive))
    assert caught.value.fix == "create or download it again"


def test_a_way_of_packing_that_is_not_known_is_no_damage(packed):
    """Method 93, Zstandard: other programs have it; the archive fetched again would be the same."""
    archive = packed("zip")
    data = bytearray(archive.read_bytes())
    for signature, field in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        struct.pack_into("<H", data, data.index(signature) + field, 93)
    archive.write_bytes(data)
    with pytest.raises(DataError, match=r"cannot be unpacked: .*not supported") as caught:
        files.unpack(str(archive))
    assert caught.value.fix == "compress it again with deflate, as zip -r does"


def test_an_archive_without_a_set(tmp_path):
    archive = zip_of(tmp_path / "x.zip", **{"a/photo.jpg": b"x"})
    with pytest.raises(DataError, match="contains no known data set"):
        sources.parse(str(archive)).listing()
    with pytest.raises(DataError, match="contains no COCO JSON"):
        sources.parse(f"coco:{archive}").listing()


def test_nothing_in_an_archive_leads_to_files_outside(make_set, tmp_path, make_jpeg):
    (tmp_path / "mine.jpg").write_bytes(make_jpeg())
    folder = make_set("coco")
    path = folder / "annotations" / "instances_train.json"
    form = json.loads(path.read_text())
    form["images"][0]["file_name"] = str(tmp_path / "mine.jpg")
    path.write_text(json.dumps(form))
    with pytest.raises(DataError, match="leads outside the image folder"):
        sources.parse(str(pack(folder, "zip"))).listing()
    yolo = make_set("yolo")
    (yolo / "data.yaml").write_text(f"train: {yolo}/train\nnames: [cat]\n")
    with pytest.raises(DataError, match="no images for train"):
        sources.parse(str(pack(yolo, "zip"))).listing()
    with pytest.raises(StorageError, match="invalid name"):
        ArchiveSource("yolo", str(yolo.parent / "yolo.zip")).read(
            f"{yolo.parent}/yolo.zip#../../../etc/passwd"
        )


def test_names_in_utf_8_that_do_not_say_so(tmp_path, make_jpeg):
    """As the Finder of macOS writes them."""
    path = zip_of(
        tmp_path / "x.zip",
        **{
            "data.yaml": "train: images\nnames: [cat]\n",
            "images/\u00fcber.jpg": make_jpeg(),
            "images/\u00fcber.txt": "0 0.5 0.5 0.1 0.1\n",
        },
    )
    # The same archive without the flag, in the headers and in the directory.
    patched = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = -1
        while (at := patched.find(signature, at + 1)) >= 0:
            patched[at + offset + 1] &= ~0x08
    path.write_bytes(bytes(patched))
    (row,) = rows(str(path))
    assert row["file_name"] == "images/\u00fcber.jpg" and len(row["boxes"]) == 1


def patch(path: Path, name: bytes, field: int, form: str, value: int) -> None:
    """Change a field of a member in the zip's directory."""
    data = bytearray(path.read_bytes())
    struct.pack_into(form, data, data.rindex(name) - 46 + field, value)
    path.write_bytes(data)


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
    opened = ZipReader(str(zip_path))
    assert opened.read("a/stored.jpg") == bytes(range(256)) * 9
    assert opened.read("a/é deflated.jpg") == b"abc" * 1000
    assert opened.read("empty") == b""
    assert opened.version("a/stored.jpg") == f"2304 {zlib.crc32(bytes(range(256)) * 9):08x}"
    assert opened.version("nothing") == ""
    with pytest.raises(MissingError, match=r"no such file: nothing in .*x\.zip"):
        opened.read("nothing")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (16, 7, "checksum mismatch"),
        (24, 10, "checksum mismatch"),  # a bomb: it unpacks to more than it says
        (10, 12, "compressed with the unknown method 12"),
        (10, 8, "invalid"),
    ],
)
def test_a_directory_that_tells_other_things(zip_path, field, value, message):
    patch(zip_path, b"a/stored.jpg", field, "<H" if field == 10 else "<L", value)
    with pytest.raises(StorageError, match=message) as caught:
        ZipReader(str(zip_path)).read("a/stored.jpg")
    assert "a/stored.jpg in" in caught.value.message


def test_what_is_no_zip_or_cut_off(zip_path):
    data = zip_path.read_bytes()
    for content in (b"", b"not a zip", data[:-30]):
        zip_path.write_bytes(content)
        with pytest.raises(StorageError, match="cannot be read as a zip"):
            ZipReader(str(zip_path))
    zip_path.write_bytes(data[40:])
    with pytest.raises(DataError, match=r"refused 'a/stored.jpg' .*: it is outside the zip"):
        ZipReader(str(zip_path))
    zip_path.write_bytes(data)
    patch(zip_path, b"a/stored.jpg", 42, "<L", len(data) - 3)
    with pytest.raises(
        StorageError, match=r"a/stored\.jpg in .*: its directory entry points outside the zip"
    ):
        ZipReader(str(zip_path)).read("a/stored.jpg")


@pytest.mark.parametrize(
    ("field", "form", "value", "message"),
    [
        (38, "<L", 0o120777 << 16, r"refused 'a/stored.jpg' in .*x\.zip: it is a link"),
        (8, "<H", 1, "it is encrypted"),
        (20, "<L", 2**20, "within another member"),  # Its bytes would be those of the next ones as well.
    ],
)
def test_links_encrypted_and_overlapping_members_are_refused(zip_path, field, form, value, message):
    patch(zip_path, b"a/stored.jpg", field, form, value)
    with pytest.raises(DataError, match=message):
        ZipReader(str(zip_path))


def test_a_local_header_with_a_longer_extra_field_than_the_directory_tells(zip_path):
    data, name = bytearray(zip_path.read_bytes()), "a/é deflated.jpg".encode()
    entry = data.rindex(name) - 46
    struct.pack_into("<H", data, entry + 30, 0)  # The directory's extra field goes; the local one stays.
    del data[entry + 46 + len(name) : entry + 46 + len(name) + 304]
    end = data.rindex(b"PK\x05\x06")
    struct.pack_into("<L", data, end + 12, struct.unpack_from("<L", data, end + 12)[0] - 304)
    zip_path.write_bytes(data)
    assert ZipReader(str(zip_path)).read("a/é deflated.jpg") == b"abc" * 1000


def test_what_is_too_large_for_an_image_is_not_read(zip_path, monkeypatch):
    monkeypatch.setattr(files, "_MAX_BYTES", 2000)
    with pytest.raises(StorageError, match="2304 bytes exceed the limit for an image"):
        ZipReader(str(zip_path)).read("a/stored.jpg")


def test_a_bomb_that_says_to_be_small_is_not_unpacked(zip_path):
    with zipfile.ZipFile(zip_path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/bomb.jpg", bytes(8 * 2**20))
    patch(zip_path, b"a/bomb.jpg", 24, "<L", 10)
    opened = ZipReader(str(zip_path))
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
        pytest.raises(DataError, match=r"no\.json in .* cannot be read: there is no such file"),
        open_member(str(zip_path), "no.json"),
    ):
        pass
    patch(zip_path, b"big.json", 16, "<L", 7)
    with (
        pytest.raises(DataError, match=r"big.json in .* cannot be read: Bad CRC"),
        open_member(str(zip_path), "big.json") as file,
    ):
        file.read()
