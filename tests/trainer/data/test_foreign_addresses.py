"""Addresses in annotations, and redirects, are read only if their host is on the allow-list."""

import http.server
import json
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from web_server import WebServer

from trainer.base import events, log
from trainer.base.errors import DataError
from trainer.config.schema import DataConfig
from trainer.data import problem_counts as reasons
from trainer.data.download import download
from trainer.storage import web

SECRET = b'{"AccessKeyId": "AKIA-of-the-node", "SecretAccessKey": "hidden"}'
CONFIG = DataConfig(processes=1, threads=4, max_bad_fraction=0.9)


@pytest.fixture
def servers(make_jpeg) -> Iterator[Callable[[str, dict], str]]:
    """Start servers of answers by path: bytes, where a redirect leads, or None; with the paths asked for."""
    running = []

    def start(host: str, answers: dict, delay: float = 0) -> tuple[str, list[str]]:
        asked: list[str] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                asked.append(self.path)
                time.sleep(delay)
                answer = answers.get(self.path, make_jpeg(seed=3))
                body = answer if isinstance(answer, bytes) else b""
                self.send_response(200 if body else 404 if answer is None else 302)
                if isinstance(answer, str):
                    self.send_header("Location", answer)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        running.append(WebServer(Handler, host))
        return running[-1].url, asked

    yield start
    for server in running:
        server.server_close()


def write_set(path: Path, urls: list[str]) -> str:
    images = [
        {"id": n, "width": 40, "height": 30, "file_name": f"{n}.jpg", "coco_url": url}
        for n, url in enumerate(urls, 1)
    ]
    boxes = [{"image_id": image["id"], "category_id": 1, "bbox": [1, 1, 5, 5]} for image in images]
    form = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "x"}]}
    path.write_text(json.dumps(form))
    return str(path)


def stored(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in (folder / "images").rglob("*") if path.is_file())


def test_internal_addresses_are_refused_until_they_are_allowed(servers, tmp_path):
    server, asked = servers("127.0.0.1", {})
    source = write_set(tmp_path / "x.json", [f"{server}/{n}.jpg" for n in range(8)])
    with pytest.raises(DataError, match="nobody allowed") as caught:
        download(source, str(tmp_path / "data"), replace(CONFIG, max_bad_fraction=0.1))
    assert "127.0.0.1" in caught.value.message and "data.allow_hosts" in caught.value.fix
    assert asked == [] and not (tmp_path / "data" / "images").exists()
    # The same run, allowed, takes up what it had left out.
    manifest = download(source, str(tmp_path / "data"), replace(CONFIG, allow_hosts=["127.0.0.1"]))
    assert len(asked) == 8 and reasons.IMAGE_REFUSED not in manifest.problems


def test_redirects_of_the_users_own_server_are_looked_at_too(servers, tmp_path):
    inside, asked_inside = servers("127.0.0.2", {"/x.jpg": SECRET})
    form = tmp_path / "x.json"
    own, _ = servers("127.0.0.1", answers := {"/1.jpg": f"{inside}/x.jpg"})
    write_set(form, [f"{own}/{n}.jpg" for n in (1, 2, 3)])
    answers["/x.json"] = form.read_bytes()
    manifest = download(f"coco:{own}/x.json", str(tmp_path / "data"), CONFIG)
    assert asked_inside == [] and manifest.problems[reasons.IMAGE_REFUSED].count == 1


@pytest.mark.slow
def test_a_slow_server_is_never_waited_for_in_silence(servers, tmp_path, monkeypatch, caplog):
    """Its annotations and its images take 1.2 s an answer; a line comes every 0.3 s."""
    monkeypatch.setattr(log, "_LINE_SECONDS", 0.3)
    monkeypatch.delenv(events.FILE, raising=False)
    form = tmp_path / "x.json"
    server, _ = servers("127.0.0.1", answers := {}, delay=1.2)
    write_set(form, [f"{server}/{n}.jpg" for n in range(4)])
    answers["/x.json"] = form.read_bytes()
    with caplog.at_level("INFO"):
        start = time.time()
        download(f"coco:{server}/x.json", str(tmp_path / "data"), CONFIG)
    times = [start, *(record.created for record in caplog.records), time.time()]
    assert times[-1] - start > 2.4 and max(after - before for before, after in pairwise(times)) < 1
    assert f"listing coco:{server}/x.json, 0:01" in caplog.text and "download 0/4 images" in caplog.text


def test_what_is_too_large_is_not_read_to_its_end(servers, tmp_path):
    web.allow((), ["127.0.0.1"])
    server, _ = servers("127.0.0.1", {"/1.jpg": b"x" * 3_000_000})
    with pytest.raises(Exception, match="more than 1000000 bytes"):
        web.read_allowed(f"{server}/1.jpg", 1_000_000)
    assert len(web.read_allowed(f"{server}/1.jpg")) == 3_000_000


def test_a_bucket_that_is_not_the_sources_needs_an_allowance(tmp_path, monkeypatch):
    source = write_set(tmp_path / "x.json", [f"s3://others/{n}.jpg" for n in range(6)])
    with pytest.raises(DataError, match="nobody allowed") as caught:
        download(source, str(tmp_path / "data"), CONFIG)
    assert "s3://others" in caught.value.message


def test_addresses_in_an_archive_are_no_more_trusted(servers, tmp_path):
    server, asked = servers("127.0.0.1", {})
    write_set(tmp_path / "instances_train.json", [f"{server}/{n}.jpg" for n in range(6)])
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
        archive.write(tmp_path / "instances_train.json", "annotations/instances_train.json")
    with pytest.raises(DataError, match="nobody allowed"):
        download(f"coco:{tmp_path}/set.zip", str(tmp_path / "data"), CONFIG)
    assert asked == []
    allowed = replace(CONFIG, allow_hosts=["127.0.0.1"])
    download(f"coco:{tmp_path}/set.zip", str(tmp_path / "data"), allowed)
    assert len(asked) == 6


def test_a_yolo_set_does_not_lead_into_other_buckets(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "data.yaml").write_text("train: s3://others/images\nnames: [a]\n")
    with pytest.raises(Exception, match="refused s3://others/images") as caught:
        download(f"yolo:{tmp_path}/set", str(tmp_path / "data"), CONFIG)
    assert "data.allow_hosts" in caught.value.fix
