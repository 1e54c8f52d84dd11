"""Download and sharding that are killed, and stores that fail: nothing lost, nothing half-written."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from faulty_store import go_away, upload_folder
from openimages_mirror import source
from PIL import Image

from trainer import storage
from trainer.base.errors import StorageError
from trainer.config.schema import DataConfig
from trainer.data.download import download
from trainer.data.raw_folder import RawManifest
from trainer.data.shards import shard

pytestmark = pytest.mark.usefixtures("forked_processes")

CONFIG = DataConfig(processes=1, threads=4, shard_bytes=3000)
NAMES = [f"{number}.jpg" for number in range(12)]


def convert(source: str | Path, root: str | Path, config: DataConfig = CONFIG) -> dict:
    return shard(download(str(source), str(root), config), str(root), config)


def results(root: str | Path) -> dict[str, bytes]:
    """All that lies under a data root, the root's name left out of it."""
    own = storage.absolute(str(root)).encode()
    names = [name for name in storage.list_files(str(root)) if not name.startswith("source/")]
    return {name: storage.read_bytes(f"{root}/{name}").replace(own, b"ROOT") for name in names}


def tars(files: dict[str, bytes]) -> list[bytes]:
    return [data for name, data in sorted(files.items()) if name.endswith(".tar")]


@pytest.fixture
def expected(make_coco, bucket, tmp_path):
    """A source in the bucket, and the shards that it gives where nothing fails."""
    root = make_coco(train=NAMES, val=["v.jpg"])
    upload_folder(root, "s3://bucket/source")
    convert(root, tmp_path / "calm")
    calm_tars = tars(results(tmp_path / "calm"))
    assert len(calm_tars) > 3
    return calm_tars


def assert_whole(root: str, index: dict, expected: list[bytes]) -> None:
    assert index.problems == {} and index.quarantined == []
    assert tars(results(root)) == expected


IMAGE = {"query": ".jpg"}
FAULTS = {
    "busy": [("status", {"times": 6}), ("status", {"times": 4, "method": "PUT"})],
    "reset": [("drop", {"times": 6}), ("lost", {"times": 4, "method": "PUT"})],
    "cut": [("cut", {"times": 6, "after": 100, **IMAGE}), ("short", {"times": 3, "after": 50, **IMAGE})],
    # No more: an image that arrives damaged three times is one that is damaged.
    "corrupt": [("corrupt", {"times": 2, "after": 300, **IMAGE}), ("spoil", {"times": 2, "method": "PUT"})],
    "stall": [("stall", {"times": 3, "after": 1, **IMAGE})],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_open_images_from_a_store_that_fails_now_and_then(kind, mirror, bucket, proxy, tmp_path):
    """In their genuine layout: CSVs, train/<16 hex>.jpg, and one image that is not there."""
    next((mirror / "pixels" / "test").iterdir()).unlink()
    config = replace(CONFIG, max_bad_fraction=0.5)
    calm = convert(source(mirror).uri, tmp_path / "calm", config)
    for folder in ("base", "pixels"):
        upload_folder(mirror / folder, f"s3://bucket/mirror/{folder}")
    for fault, details in FAULTS[kind]:
        proxy.fail(fault, **details)
    mirror_uri = source("s3://bucket/mirror").uri
    index = convert(mirror_uri, "s3://bucket/data", config)
    assert proxy.faults == []
    assert calm.problems.keys() == index.problems.keys() and len(index.problems) > 0
    assert tars(results("s3://bucket/data")) == tars(results(tmp_path / "calm")) != []


@pytest.mark.parametrize("after", [3, 20])
def test_a_store_that_dies_and_comes_back(after, expected, proxy, hurried):
    hurried(first=10.0)
    death = go_away(proxy, after, 0.3)
    raw = download("coco:s3://bucket/source", "s3://bucket/data", CONFIG)
    death.join()
    assert raw.problems == {}
    death = go_away(proxy, after, 0.3)
    index = shard(raw, "s3://bucket/data", CONFIG)
    death.join()
    assert_whole("s3://bucket/data", index, expected)


def test_a_store_that_stays_away_costs_no_image(expected, proxy, hurried, bucket):
    raw = download("coco:s3://bucket/source", "s3://bucket/data", CONFIG)
    hurried(total=0.5)
    proxy.fail("status", times=10**6, query="/images/", status=503)
    with pytest.raises(StorageError):
        shard(raw, "s3://bucket/data", CONFIG)
    assert [path for path in (bucket / "data" / "shards").rglob("*") if path.is_file()] == []
    proxy.faults.clear()
    hurried()
    assert_whole("s3://bucket/data", shard(raw, "s3://bucket/data", CONFIG), expected)


WHOLE = (
    "import sys; from trainer.data.download import download; from trainer.data.shards import shard\n"
    "from trainer.config.schema import DataConfig\n"
    "config = DataConfig(processes=2, shard_bytes=60000)\n"
    "shard(download(sys.argv[2], sys.argv[1], config), sys.argv[1], config)\n"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "images", "times", "drawn"),
    [("folder", 80, 3, True), ("bucket", 40, 2, True), ("folder", 80, 2, False), ("bucket", 60, 2, False)],
)
def test_killed_at_random_points_the_result_is_the_same(
    place, images, times, drawn, make_coco, bucket, tmp_path
):
    """Killed without warning, again and again, in download and in sharding; drawn, or read from a store."""
    folder = bucket if place == "bucket" else tmp_path
    root = "s3://bucket" if place == "bucket" else str(tmp_path)
    taken = f"sample:images={images},size=160" if drawn else "coco:s3://bucket/source"
    if not drawn:
        shutil.copytree(make_coco(train=[f"{number}.jpg" for number in range(images)]), bucket / "source")

    def command(name: str) -> list[str]:
        return [sys.executable, "-c", WHOLE, f"{root}/{name}", taken]

    def files(name: str) -> int:
        return sum(path.is_file() for path in (folder / name).rglob("*"))

    subprocess.run(command("calm"), check=True, stderr=subprocess.DEVNULL)
    chance = random.Random()
    killed = 0
    for _ in range(times):
        # A killed writer may leave files under other names: there can be more of them than in the end.
        enough = chance.randrange(min(files("killed"), files("calm") - 5), files("calm") - 4)
        process = subprocess.Popen(command("killed"), stderr=subprocess.DEVNULL)
        while process.poll() is None and files("killed") <= enough:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        for path in (folder / "killed").rglob("[!.]*.tar"):
            with tarfile.open(path) as tar:  # what has its name is whole
                assert len(tar.getnames()) % 2 == 0
    assert killed >= 1
    subprocess.run(command("killed"), check=True, stderr=subprocess.DEVNULL)
    calm, after = results(f"{root}/calm"), results(f"{root}/killed")
    assert calm.keys() == after.keys() and len(calm) > images
    assert [name for name in calm if calm[name] != after[name]] == []


def start_sharding(raw: RawManifest, root: Path) -> subprocess.Popen[bytes]:
    code = (
        "import json, sys; from trainer.data.shards import shard\n"
        "from trainer.config.schema import DataConfig; from trainer.data.raw_folder import RawManifest\n"
        "raw = RawManifest.load(json.loads(sys.argv[1]), 'raw')\n"
        "shard(raw, sys.argv[2], DataConfig(processes=2, shard_bytes=20000))\n"
    )
    command = [sys.executable, "-c", code, json.dumps(raw.to_json()), str(root)]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_a_killed_conversion_goes_on_where_it_was(make_coco, tmp_path):
    root = make_coco(train=[f"{number}.jpg" for number in range(12)])
    for number in range(12):
        Image.effect_noise((1000, 1000), 90).save(root / "train" / f"{number}.jpg", progressive=True)
    config = replace(CONFIG, processes=2, shard_bytes=20_000)
    raw = download(str(root), str(tmp_path / "data"), config)
    process = start_sharding(raw, tmp_path / "data")
    shards = tmp_path / "data" / "shards"
    deadline = time.monotonic() + 60
    while len(list(shards.rglob("train-*.json"))) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(1)
    before = {path: path.stat().st_mtime_ns for path in shards.rglob("train-*.json")}
    assert 3 <= len(before) < 11 and list(shards.rglob("index.json")) == []
    index = shard(raw, str(tmp_path / "data"), config)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    fresh = shard(raw, str(tmp_path / "fresh"), config)
    for item in fresh.splits["train"].shards:
        again, anew = (Path(shard_index.uri) / item.name for shard_index in (index, fresh))
        assert again.read_bytes() == anew.read_bytes()


@pytest.mark.slow
def test_a_killed_worker_is_told_of(make_coco, tmp_path):
    root = make_coco(train=[f"{number}.jpg" for number in range(12)])
    for number in range(12):
        Image.effect_noise((1000, 1000), 90).save(root / "train" / f"{number}.jpg", progressive=True)
    raw = download(str(root), str(tmp_path / "data"), CONFIG)
    process = start_sharding(raw, tmp_path / "data")
    deadline = time.monotonic() + 60
    while not list((tmp_path / "data").rglob("train-*.json")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [
        pid for pid in map(int, children) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(workers[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "a worker process was killed" in errors.decode()
    assert list((tmp_path / "data").rglob("index.json")) == []


def test_the_report_of_a_partition_does_not_depend_on_who_was_first(make_coco, tmp_path):
    root = make_coco(train=NAMES)
    reports = []
    for threads in (1, 4):
        config = replace(CONFIG, threads=threads)
        manifest = download(str(root), str(tmp_path / str(threads)), config)
        reports.append(storage.read_bytes(f"{manifest.uri}/fetched/0-of-1.parquet"))
    assert reports[0] == reports[1]
