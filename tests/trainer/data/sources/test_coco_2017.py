import http.server
import json
import re
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_store import Proxy, go_away
from source_rows import kept_rows
from web_server import WebServer

from trainer import storage
from trainer.base.errors import DataError
from trainer.config.schema import DataConfig
from trainer.data import problem_counts as reasons
from trainer.data import raw_manifest, sources
from trainer.data.download import download, fetch, plan
from trainer.data.raw_manifest import SplitCounts
from trainer.data.sources.coco import ANNOTATIONS
from trainer.data.sources.source import Category
from trainer.launching.shared_work import SharedWork

NAMES = {
    "train2017": [f"{number:012}.jpg" for number in range(1, 13)],
    "val2017": [f"{number:012}.jpg" for number in range(20, 24)],
}
CONFIG = DataConfig(threads=4)


@pytest.fixture
def mirror(make_coco, tmp_path) -> Path:
    """COCO 2017's zips, small: images stored in the one, deflated in the other."""
    root = make_coco(**NAMES)
    folder = tmp_path / "mirror"
    (folder / "zips").mkdir(parents=True)
    (folder / "annotations").mkdir()
    with zipfile.ZipFile(folder / ANNOTATIONS, "w", zipfile.ZIP_DEFLATED) as archive:
        for split in NAMES:
            name = f"annotations/instances_{split}.json"
            archive.write(root / name, name)
    for split, method in zip(NAMES, (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED), strict=True):
        with zipfile.ZipFile(folder / "zips" / f"{split}.zip", "w", method) as archive:
            archive.mkdir(split)
            for name in NAMES[split]:
                archive.write(root / split / name, f"{split}/{name}")
    return folder


@pytest.fixture
def server(mirror) -> Iterator[str]:
    """The mirror on the web, with ranges."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = mirror / self.path.strip("/")
            data = path.read_bytes() if path.is_file() else b""
            part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            self.send_response(404 if not data else 206 if part else 200)
            if part and data:
                start, stop = int(part[1]), min(int(part[2] or len(data) - 1), len(data) - 1)
                self.send_header("Content-Range", f"bytes {start}-{stop}/{len(data)}")
                data = data[start : stop + 1]
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        do_HEAD = do_GET

    with WebServer(Handler) as running:
        yield running.url


def test_images_come_one_by_one_from_zips_in_a_store(mirror, bucket, proxy, tmp_path):
    shutil.copytree(mirror, bucket / "coco")
    address = "s3://bucket/coco"
    raw = download(f"coco:2017,base={address}", str(tmp_path / "data"), CONFIG)
    assert raw.splits == {"train": SplitCounts(12, 24), "val": SplitCounts(4, 8)}
    assert raw.categories[1] == raw_manifest.Category(1, "dog", 17)
    assert raw.source == f"coco:2017,base={address}" and raw.problems == {}
    for split, folder in (("train", "train2017"), ("val", "val2017")):
        with zipfile.ZipFile(mirror / "zips" / f"{folder}.zip") as archive:
            expected = {name: archive.read(f"{folder}/{name}") for name in NAMES[folder]}
        for row in kept_rows(raw, split):
            (image,) = Path(raw.images).rglob(f"{row['key']}-*")
            assert image.read_bytes() == expected[row["file_name"]]
            assert row["origin"] == f"{address}/zips/{folder}.zip#{folder}/{row['file_name']}"
    # One answer for each image; the directory takes a few.
    requests = [one for one in proxy.requests if one.startswith("GET") and "zips/train2017.zip" in one]
    assert 12 <= len(requests) <= 18
    assert download(f"coco:2017,base={address}", str(tmp_path / "data"), CONFIG) == raw


@pytest.mark.parametrize("kind", ["none", "corrupt", "death"])
def test_a_web_server_of_zips_that_fails_now_and_then(kind, server, mirror, hurried, tmp_path):
    # Four tries to connect take 2.8 s, so they outlast the server's absence on a busy machine too.
    hurried(first=10.0, read_timeout=10.0, wait=2.0)
    calm = download(f"coco:2017,base={mirror}", str(tmp_path / "calm"), CONFIG)
    proxy = Proxy(server, mirror)
    planned = plan(f"coco:2017,base={proxy.url}", str(tmp_path / "data"), CONFIG)
    proxy.requests.clear()
    if kind == "death":
        go_away(proxy, 5, 0.3)
    elif kind == "corrupt":
        proxy.fail(kind, times=6, after=300)
    raw = fetch(planned, CONFIG, SharedWork())
    proxy.stop()
    assert raw.problems == {} and raw.splits == calm.splits and proxy.faults == []
    assert len(proxy.requests) >= 16
    assert kind != "none" or (len(proxy.requests) <= 28 and all("-" in one for one in proxy.requests))
    images, expected = (
        {path.name.partition("-")[0]: path.read_bytes() for path in Path(manifest.images).rglob("*.jpg")}
        for manifest in (raw, calm)
    )
    assert images == expected and len(images) == 16


def test_a_changed_zip_fetches_what_changed(mirror, make_jpeg, tmp_path):
    source, zips = f"coco:2017,base={mirror}", mirror / "zips"
    before = download(source, str(tmp_path / "data"), CONFIG)
    with zipfile.ZipFile(zips / "val2017.zip") as old, zipfile.ZipFile(zips / "new", "w") as new:
        for item in old.infolist():
            changed = item.filename.endswith("21.jpg")
            new.writestr(item.filename, make_jpeg(50, 50) if changed else old.read(item))
    (zips / "new").rename(zips / "val2017.zip")
    after = download(source, str(tmp_path / "data"), CONFIG)
    assert after.fingerprint != before.fingerprint and after.images == before.images
    assert len(list(Path(after.images).rglob("*.jpg"))) == 17


def test_damaged_and_missing_members_are_reported(mirror, tmp_path):
    path = mirror / "zips" / "train2017.zip"
    with zipfile.ZipFile(path) as archive:
        place = archive.getinfo(f"train2017/{NAMES['train2017'][3]}").header_offset + 200
    data = bytearray(path.read_bytes())
    data[place] ^= 0xFF
    path.write_bytes(data)
    with zipfile.ZipFile(mirror / "zips" / "val2017.zip", "w") as archive:
        archive.writestr("val2017/other.jpg", b"x")
    config = DataConfig(threads=1, max_bad_fraction=0.9)
    raw = download(f"coco:2017,base={mirror}", str(tmp_path / "data"), config)
    assert raw.splits["train"].images == 11 and raw.splits["val"].images == 0
    assert raw.problems[reasons.IMAGE_NOT_FETCHED].count == 1
    assert "checksum" in raw.problems[reasons.IMAGE_NOT_FETCHED].examples[0]
    assert raw.problems[reasons.IMAGE_MISSING].count == 4


def test_zips_that_are_missing_or_none(mirror):
    listing = sources.parse(f"coco:2017,base={mirror}").listing
    assert listing().categories == [Category("cat", 3), Category("dog", 17)]
    (mirror / "zips" / "val2017.zip").write_bytes(b"PK not at all")
    with pytest.raises(storage.StorageError, match="cannot be read as a zip"):
        list(listing().splits["val"].batches())
    (mirror / "zips" / "val2017.zip").unlink()
    with pytest.raises(DataError, match=r"no file .*val2017\.zip"):
        listing()
    (mirror / "zips" / "val2017.zip").write_bytes(b"")
    with zipfile.ZipFile(mirror / ANNOTATIONS, "w") as archive:
        archive.writestr("annotations/x.json", json.dumps({}))
    with pytest.raises(DataError, match=r"instances_val2017\.json .*cannot be read"):
        listing()
    (mirror / ANNOTATIONS).write_bytes(b"x")
    with pytest.raises(DataError, match="cannot be read"):
        listing()
