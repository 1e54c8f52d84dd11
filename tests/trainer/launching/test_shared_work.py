"""Download and sharding by several processes: the files of one, whatever becomes of the processes."""

import hashlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from patience import until
from PIL import Image

from trainer.config.schema import DataConfig
from trainer.data.download import download
from trainer.data.shards import shard
from trainer.launching.shared_work import SharedWork

CONFIG = DataConfig(processes=1, threads=1, shard_bytes=20_000, max_bad_fraction=0.1)
SETTINGS = [
    f"--set=data.{name}={getattr(CONFIG, name)}"
    for name in ("processes", "threads", "shard_bytes", "max_bad_fraction")
]
IMAGES = 1200


def test_a_process_alone_takes_all_parts():
    work = SharedWork()
    assert list(work.take_parts("images", 3)) == [0, 1, 2] and work.run_on_first(lambda: "result") == "result"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A data set in which one image cannot be read and one is missing."""
    root = tmp_path_factory.mktemp("coco")
    for split, count in (("train", IMAGES), ("val", 3)):
        (root / split).mkdir()
        images = [
            {"id": number, "file_name": f"{number}.jpg", "width": 40, "height": 30} for number in range(count)
        ]
        for number in range(count):
            color = (number % 251, number % 241, number % 239)
            Image.new("RGB", (40, 30), color).save(root / split / f"{number}.jpg")
        boxes = [
            {"id": number, "image_id": number, "category_id": 1, "bbox": [2, 3, 10 + number % 20, 9]}
            for number in range(count)
        ]
        file = root / "annotations" / f"instances_{split}.json"
        file.parent.mkdir(exist_ok=True)
        categories = [{"id": 1, "name": "thing"}]
        file.write_text(json.dumps({"images": images, "annotations": boxes, "categories": categories}))
    (root / "train" / "7.jpg").write_bytes(b"no image")
    (root / "train" / "900.jpg").unlink()
    return f"coco:{root}"


def hashes(root):
    files = (path for path in Path(root).rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def expected(source, tmp_path_factory):
    """The files of one process."""
    root = tmp_path_factory.mktemp("one")
    shard(download(source, str(root), CONFIG), str(root), CONFIG)
    return hashes(root)


@pytest.mark.slow
def test_several_processes_write_the_files_of_one_although_one_is_killed(source, expected, node, tmp_path):
    root = tmp_path / "data"

    def run(verb, *arguments, finished):
        words = [verb, *arguments, "--data-root", str(root), *SETTINGS]
        started = node(words, "--nproc", "3", max_restarts=1)
        until(lambda: len(list(root.rglob(finished))) > 5 or started.process.poll() is not None, 240)
        pids = subprocess.run(
            ["pgrep", "-P", str(started.process.pid)], capture_output=True, text=True, check=True
        )
        os.kill(int(pids.stdout.split()[-1]), signal.SIGKILL)
        there = {path: path.stat().st_mtime_ns for path in root.rglob(finished)}
        assert len(there) < IMAGES / 2
        assert started.wait() == 0, started.output
        assert "was killed (SIGKILL)" in started.output
        assert {path: path.stat().st_mtime_ns for path in there} == there, "finished files were written again"

    run("download", "--source", source, finished="images/**/*.jpg")
    (raw,) = (root / "raw").iterdir()
    run("shard", "--raw", str(raw), finished="shards/*/train-*.json")
    assert hashes(root) == expected
