import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from trainer import storage
from trainer.base.errors import StorageError
from trainer.config.schema import DataConfig
from trainer.data import problem_counts as reasons
from trainer.data.download import download, plan

CONFIG = DataConfig(processes=1, threads=4, allow_hosts=["127.0.0.1"])


@pytest.fixture
def broken_reads(monkeypatch):
    """Make the reading of some images of a COCO source fail a number of times; with the reads by name."""
    reads: dict[str, int] = {}
    read_buffer = storage.read_buffer

    def breaks(failures: dict[str, int]) -> dict[str, int]:
        def read(uri: str, **options: str) -> memoryview:
            name = uri.rpartition("/")[2]
            if not name.endswith(".jpg"):
                return read_buffer(uri, **options)
            reads[name] = reads.get(name, 0) + 1
            if reads[name] <= failures.get(name, 0):
                raise StorageError(f"cannot read {uri}: connection reset")
            return read_buffer(uri, **options)

        monkeypatch.setattr(storage, "read_buffer", read)
        return reads

    return breaks


def test_what_fails_is_tried_again_and_what_is_missing_is_not(make_coco, broken_reads, tmp_path):
    root = make_coco(train=[f"{number}.jpg" for number in range(20)])
    (root / "train" / "3.jpg").unlink()
    config = replace(CONFIG, max_bad_fraction=0.2)
    reads = broken_reads({"1.jpg": 1, "2.jpg": 3})
    manifest = download(str(root), str(tmp_path / "data"), config)
    assert reads["1.jpg"] == reads["2.jpg"] == 2 and reads["4.jpg"] == 1
    assert manifest.problems[reasons.IMAGE_NOT_FETCHED].count == 1
    assert manifest.problems[reasons.IMAGE_MISSING].count == 1
    # Good enough, but the next run goes on with what failed.
    manifest = download(str(root), str(tmp_path / "data"), config)
    assert reads["2.jpg"] == 4 and reads["1.jpg"] == 2 and reads["4.jpg"] == 1
    assert list(manifest.problems) == [reasons.IMAGE_MISSING]


def test_a_source_that_goes_down_ends_it_early_and_keeps_what_came(make_coco, broken_reads, tmp_path):
    names = [f"{number}.jpg" for number in range(400)]
    root = make_coco(train=names)
    reads = broken_reads(dict.fromkeys(names[100:], 99))
    config = replace(CONFIG, max_bad_fraction=1.0)
    with pytest.raises(StorageError, match="58 images in a row could not be fetched") as caught:
        download(str(root), str(tmp_path / "data"), config)
    assert "run again" in caught.value.fix and 150 < len(reads) < 300
    came = len(list((tmp_path / "data").rglob("*.jpg")))
    reads.clear()
    broken_reads({})
    download(str(root), str(tmp_path / "data"), config)
    assert 80 < came <= 100 and len(reads) == 400 - came


def test_many_that_fail_among_others_do_not_end_it(make_coco, broken_reads, tmp_path):
    names = [f"{number}.jpg" for number in range(210)]
    broken_reads(dict.fromkeys(names[::3], 99))
    config = replace(CONFIG, max_bad_fraction=0.5)
    manifest = download(str(make_coco(train=names)), str(tmp_path / "data"), config)
    assert manifest.problems[reasons.IMAGE_NOT_FETCHED].count == 70


@pytest.fixture
def image_server(make_jpeg, monkeypatch) -> Iterator[tuple[str, list[int]]]:
    """Serves /<n>.jpg, but 404 for those above 90; with the number of requests at the same time."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    busy, most, lock = [0], [0, 0], threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            with lock:
                busy[0] += 1
                most[:] = max(most[0], busy[0]), most[1] + 1
            time.sleep(0.02)
            number = int(self.path.strip("/").removesuffix(".jpg"))
            body = make_jpeg(seed=number) if number <= 90 else b""
            self.send_response(200 if body else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with lock:
                busy[0] -= 1
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}", most
    httpd.shutdown()
    httpd.server_close()


def form_of_urls(server: str, numbers: range) -> dict:
    images = [
        {"id": n, "width": 40, "height": 30, "file_name": f"{n}.jpg", "coco_url": f"{server}/{n}.jpg"}
        for n in numbers
    ]
    boxes = [{"id": n, "image_id": n, "category_id": 1, "bbox": [1, 1, 5, 5]} for n in numbers]
    return {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "x"}]}


def test_images_by_url_come_over_many_connections(image_server, make_jpeg, tmp_path):
    server, most = image_server
    (tmp_path / "x.json").write_text(json.dumps(form_of_urls(server, range(1, 92))))
    config = replace(CONFIG, threads=8)
    manifest = download(str(tmp_path / "x.json"), str(tmp_path / "data"), config)
    assert sum(counts.images for counts in manifest.splits.values()) == 90
    assert manifest.problems[reasons.IMAGE_MISSING].count == 1
    assert "no such file" in manifest.problems[reasons.IMAGE_MISSING].examples[0]
    assert most[0] > 4
    (path,) = Path(manifest.images).rglob("17-*.jpg")
    assert path.read_bytes() == make_jpeg(seed=17)


def test_what_a_killed_download_left_is_cleared_away(make_coco, tmp_path):
    root = make_coco(train=["1.jpg", "2.jpg"])
    images = Path(plan(str(root), str(tmp_path / "data"), CONFIG).images)
    old, new = images / "ab" / ".1.jpg.7-aa.tmp", images / "ab" / ".2.jpg.8-bb.tmp"
    for path in (old, new):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    download(str(root), str(tmp_path / "data"), CONFIG)
    assert not old.exists() and new.exists()  # which another download may be writing


@pytest.mark.slow
def test_a_killed_download_by_url_goes_on_where_it_was(image_server, make_jpeg, tmp_path):
    server, _ = image_server
    (tmp_path / "x.json").write_text(json.dumps(form_of_urls(server, range(1, 91))))
    code = (
        "import sys; from trainer.data.download import download\n"
        "from trainer.config.schema import DataConfig\n"
        "download(sys.argv[1], sys.argv[2], DataConfig(threads=2, allow_hosts=['127.0.0.1']))\n"
    )
    data = tmp_path / "data"
    for count in (10, 40, 70):
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "x.json"), str(data)])
        deadline = time.monotonic() + 60
        while len(list(data.rglob("*.jpg"))) < count and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert list(data.rglob("manifest.json")) == []
    before = {path: path.stat().st_mtime_ns for path in data.rglob("*.jpg")}
    manifest = download(str(tmp_path / "x.json"), str(data), CONFIG)
    assert sum(counts.images for counts in manifest.splits.values()) == 90
    assert {path: path.stat().st_mtime_ns for path in before} == before and 70 <= len(before) < 90
    images = sorted(Path(manifest.images).rglob("*.jpg"))
    assert [path.read_bytes() for path in images] == [
        make_jpeg(seed=int(path.name.partition("-")[0])) for path in images
    ]
