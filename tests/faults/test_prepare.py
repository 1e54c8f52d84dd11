"""Faults while data is prepared: in its files, in the machine, and in its sources."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fault_table import HARMS, cells, contents, each
from faulty_store import go_away, upload_folder
from PIL import Image
from prepared_data import BOTH, CONFIG, SOME_BAD, Prepared, believed, images_of, mounts
from served_model import png

from tests.trainer.data.test_foreign_addresses import SECRET, servers, stored, write_set
from trainer import storage
from trainer.base.errors import DataError, KubedetError, ResourceError, StorageError
from trainer.config.schema import DataConfig
from trainer.data import problem_counts as reasons
from trainer.data.download import download
from trainer.data.shard_index import ShardDataset
from trainer.data.shards import shard
from trainer.data.verification import check, repair, verify


@pytest.mark.parametrize("harm", each(*HARMS, stages=("download",)))
def test_files_of_raw_images(prepared, harm, chance, injected, tmp_path):
    """Each file in turn: the download, or `verify --repair`, makes all as it was."""
    raw, images = prepared.folders[0], Path(prepared.raw.images)
    before = contents(raw, images)
    paths = [path for path in sorted(raw.rglob("*")) if path.is_file() and path.name != "failed.csv"]
    paths += chance.sample(sorted(images.rglob("*.jpg")), 3)
    copy = shutil.copytree(raw, tmp_path / "copy")
    for path in paths:
        HARMS[harm](path, chance)
        prepared.again()
        if contents(raw, images) != before:  # What is looked at only when it is needed, or in each byte.
            check(repair(str(raw)))
        after = contents(raw, images)
        unneeded = {name for name in before if "/fetched/" in name or name.endswith("failed.csv")}
        assert after.keys() | unneeded == before.keys() | unneeded, path
        assert [name for name in after if name not in unneeded and after[name] != before[name]] == [], path
        shutil.rmtree(raw)
        shutil.copytree(copy, raw)
    injected(len(paths))


@pytest.mark.parametrize("harm", each(*HARMS, stages=("shard",)))
def test_files_of_shards(prepared, harm, chance, injected):
    """Each file is read as it was written, or an error names it; then it is repaired."""
    folder = prepared.folders[1]
    before, expected, count = contents(folder), believed(prepared), 0
    for path in [path for path in sorted(folder.rglob("*")) if path.is_file()] * (4 if harm == "flip" else 1):
        count += 1
        HARMS[harm](path, chance)
        try:
            assert believed(prepared) == expected, path
        except KubedetError as error:
            assert path.name in error.message and "delete" not in error.fix, path
        check(repair(str(folder))) if count % 2 else prepared.again()
        if contents(folder) != before:  # Nobody has read the place that was flipped.
            with pytest.raises(DataError, match=path.stem):
                check(verify(str(folder)))
            prepared.again()
        assert contents(folder) == before, path
    injected(count)


@cells("form", "download", "shard")
@pytest.mark.parametrize("text", ["[]", "{}", "7", '{"kind": "shards"}', '{"version": "new"}', "{"])
def test_json_of_another_shape(prepared, text, injected):
    paths = [
        prepared.folders[0] / "plan.json",
        prepared.folders[0] / "manifest.json",
        prepared.folders[1] / "index.json",
    ]
    before = contents(*prepared.folders)
    for path in paths:
        path.write_text(text)
        prepared.again()
    assert contents(*prepared.folders) == before
    injected(len(paths))


@cells("newer", "download", "shard")
@pytest.mark.parametrize("name", ["manifest.json", "plan.json", "index.json"])
def test_files_of_a_newer_program(prepared, name):
    (path,) = (folder / name for folder in prepared.folders if (folder / name).exists())
    storage.write_json(str(path), storage.read_json(str(path)) | {"version": 99})
    before = path.read_bytes()
    with pytest.raises(DataError, match="was written by another version of kubedet: its version is 99"):
        prepared.again()
        (prepared.folders[0] / "manifest.json").unlink()  # With it, the plan is not needed.
        prepared.again()
    assert path.read_bytes() == before


@pytest.mark.parametrize("harm", HARMS)
@cells("image", "shard")
def test_a_raw_image_while_shards_are_made(fifteen_images, tmp_path, harm, chance, injected):
    raw = download(f"coco:{fifteen_images}", str(tmp_path / "data"), CONFIG)
    expected = shard(raw, str(tmp_path / "other"), CONFIG).splits
    for path in chance.sample(sorted(Path(raw.images).rglob("*.jpg")), 4):
        HARMS[harm](path, chance)
    assert shard(raw, str(tmp_path / "data"), CONFIG).splits == expected
    injected(4)


@pytest.mark.parametrize("harm", ["cut", "lost", "flip"])
@cells("image", "shard")
def test_a_raw_image_whose_source_is_gone(fifteen_images, tmp_path, harm, chance):
    raw = download(f"coco:{fifteen_images}", str(tmp_path / "data"), CONFIG)
    image = chance.choice(sorted(Path(raw.images).rglob("*.jpg")))
    HARMS[harm](image, chance)
    shutil.rmtree(fifteen_images)
    with pytest.raises(KubedetError) as caught:
        shard(raw, str(tmp_path / "data"), CONFIG)
    assert "delete" not in str(caught.value)
    assert not list((tmp_path / "data/shards").rglob("index.json"))


@cells("moved", *BOTH)
def test_a_moved_data_root(prepared, fifteen_images, bucket, tmp_path, monkeypatch, injected):
    root, fetched = Path(prepared.root), []
    shutil.copytree(root, bucket / "deep" / "root")
    shutil.move(root, tmp_path / "elsewhere")
    read = storage.read_allowed
    monkeypatch.setattr(storage, "read_allowed", lambda uri: fetched.append(uri) or read(uri))
    for place in (str(tmp_path / "elsewhere"), "s3://bucket/deep/root"):
        moved = Prepared(prepared.source, place)
        assert moved.raw.uri.startswith(place) and moved.index.uri.startswith(place)
        check(verify(moved.index.uri))
    assert not [uri for uri in fetched if uri.startswith(str(fifteen_images)) and uri.endswith(".jpg")]
    injected(2)


KILLED = """
import json, os, random, signal, sys
from trainer.model import recipes
from trainer.data.download import download
from trainer.data.shards import shard

source, root, times, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
config = recipes.load("debug", {"data.processes": 1, "data.shard_bytes": 20000}).data
events = {"open", "os.rename", "os.remove", "os.mkdir", "os.link", "os.truncate"}


def run(root, at):
    # In a process of its own, which dies at its at-th touch of a file; returns whether it died.
    pid = os.fork()
    if not pid:
        passed = 0

        def count(event, arguments):
            nonlocal passed
            if event in events and str(arguments[0]).startswith(root):
                passed += 1
                if passed == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        shard(download(source, root, config), root, config)
        os.write(sender, f"{passed}\\n".encode()) if not at else None
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WIFSIGNALED(status)


receiver, sender = os.pipe()
run(root + "/calm", 0)
points = int(os.read(receiver, 20))
chance, deaths = random.Random(seed), 0
for _ in range(times):
    deaths += run(root + "/killed", chance.randrange(1, points // 2))
run(root + "/killed", -1)
print(json.dumps({"points": points, "deaths": deaths}))
"""
MEMORY = """
import resource, sys
from pathlib import Path
from trainer.model import recipes
from trainer.data.download import download
from trainer.data.shards import shard
from trainer.base.errors import KubedetError

config = recipes.load("debug", {"data.processes": 1, "data.max_bad_fraction": 0.5}).data
raw = download(sys.argv[1], sys.argv[2], config)
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 150_000_000, resource.RLIM_INFINITY))
try:
    shard(raw, sys.argv[2], config)
except KubedetError as error:
    print(error)
    sys.exit(3)
"""
SHARD = """
import json, sys
from trainer.base import json_files
from trainer.config.schema import DataConfig
from trainer.data.raw_manifest import RawManifest
from trainer.data.shards import shard

raw = json_files.parse(RawManifest, "raw", sys.argv[1].encode(), "")
shard(raw, sys.argv[2], DataConfig(processes=2, shard_bytes=20000))
"""
FULL = """
import os, subprocess, sys
from trainer.model import recipes
from trainer.data.download import download
from trainer.data.shards import shard
from trainer.base.errors import KubedetError

config = recipes.load("debug", {"data.processes": 1}).data
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=" + sys.argv[3], "none", sys.argv[2]], check=True)
for room in ("", "remount,size=9m"):
    if room:
        subprocess.run(["mount", "-o", room, sys.argv[2]], check=True)
    try:
        shard(download(sys.argv[1], sys.argv[2], config), sys.argv[2], config)
        print("whole")
    except KubedetError as error:
        print(error)
left = [name for _, _, names in os.walk(sys.argv[2]) for name in names if name.startswith(".")]
print("left:", left)
"""


@contextmanager
def few_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@cells("kill", *BOTH)
def test_kills(fifteen_images, tmp_path, chance, injected):
    arguments = (f"coco:{fifteen_images}", str(tmp_path / "root"), "30", str(chance.random()))
    command = [sys.executable, "-c", KILLED, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["points"] > 50 and result["deaths"] >= 5
    calm, killed = (contents(*(tmp_path / "root" / name).iterdir()) for name in ("calm", "killed"))
    assert killed == calm
    injected(result["deaths"])


@cells("files", "shard", "train", "evaluate")
def test_too_many_open_files(prepared):
    expected = believed(prepared)
    dataset = ShardDataset(prepared.index.uri, "train")
    with few_files(), pytest.raises(ResourceError, match=os.strerror(errno.EMFILE)) as caught:
        dataset.read(0)
    assert "raise the limit" in caught.value.fix and "damaged" not in caught.value.message
    assert believed(prepared) == expected and not list(prepared.folders[1].glob("*.damaged"))


@cells("memory", "shard")
def test_out_of_memory(make_coco, tmp_path):
    coco = make_coco(train=["0.jpg", "1.jpg", "2.jpg"])
    (coco / "train" / "1.jpg").write_bytes(png(13_000))  # 169 MB where it is decoded.
    command = [sys.executable, "-c", MEMORY, f"coco:{coco}", str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "1.jpg" in done.stdout and "not enough memory" in done.stdout
    assert "damaged" not in done.stdout and not list((tmp_path / "data/shards").rglob("index.json"))


@pytest.mark.skipif(not mounts(), reason="mounts nothing: needs root")
@cells("full", *BOTH)
@pytest.mark.parametrize("size", ["20k", "60k", "100k"])
def test_a_full_disk(fifteen_images, tmp_path, size):
    (tmp_path / "root").mkdir()
    command = [sys.executable, "-c", FULL, f"coco:{fifteen_images}", str(tmp_path / "root"), size]
    done = subprocess.run(["unshare", "--mount", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "the disk is full" in done.stdout and "whole" in done.stdout and "left: []" in done.stdout


@cells("worker", "shard")
def test_a_killed_worker(make_coco, tmp_path):
    root = make_coco(train=[f"{number}.jpg" for number in range(12)])
    for number in range(12):
        Image.effect_noise((1000, 1000), 90).save(root / "train" / f"{number}.jpg", progressive=True)
    raw = download(str(root), str(tmp_path / "data"), DataConfig(processes=1))
    command = [sys.executable, "-c", SHARD, json.dumps(raw.to_dict()), str(tmp_path / "data")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
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


__all__ = ["servers"]

WRITTEN = [
    *("plan.json", "train.parquet", "manifest.json", "images-", ".tar", "train-00000.json", "samples.npy"),
    *("annotations", "index.json"),
]
IMAGE = {"query": ".jpg"}
STORE = {
    "swallow": [("swallow", {"method": "PUT", "query": name}) for name in WRITTEN],
    "alter": [("alter", {"method": "PUT", "query": name}) for name in WRITTEN],
    "busy": [("status", {"times": 6}), ("status", {"times": 4, "method": "PUT"})],
    "reset": [("drop", {"times": 6}), ("lost", {"times": 4, "method": "PUT"})],
    "short": [
        ("cut", {"times": 6, "after": 100, **IMAGE}),
        ("short", {"times": 3, "after": 50, **IMAGE}),
        ("corrupt", {"times": 2, "after": 300, **IMAGE}),
        ("spoil", {"times": 2, "method": "PUT"}),
    ],
    "stall": [("stall", {"times": 3, "after": 1, **IMAGE})],
}


@pytest.fixture
def in_store(fifteen_images, bucket, tmp_path):
    """A source in a store, and what its shards are where nothing fails."""
    upload_folder(fifteen_images, "s3://bucket/source")
    calm = Prepared(f"coco:{fifteen_images}", str(tmp_path / "calm"))
    return [data for name, data in contents(Path(calm.index.uri)).items() if name.endswith((".tar", ".npy"))]


def kept(bucket: Path) -> list[bytes]:
    files = contents(*(bucket / "data" / "shards").iterdir())
    return [data for name, data in files.items() if name.endswith((".tar", ".npy"))]


@pytest.mark.parametrize("kind", each(*STORE, stages=BOTH))
def test_a_store_that_fails(kind, in_store, proxy, bucket, injected):
    for fault, details in STORE[kind]:
        proxy.fail(fault, **details)
    if kind in ("swallow", "alter"):
        Prepared("coco:s3://bucket/source", "s3://bucket/data")
        assert proxy.faults == []
    else:
        raw = download("coco:s3://bucket/source", "s3://bucket/data", CONFIG)
        assert proxy.faults == [] and raw.problems == {}
        for fault, details in STORE[kind]:
            proxy.fail(fault, **details)
        shard(raw, "s3://bucket/data", CONFIG)
        assert proxy.faults == []
    assert kept(bucket) == in_store
    injected(sum(details.get("times", 1) for _, details in STORE[kind]))


@cells("away", *BOTH)
@pytest.mark.parametrize("after", [3, 12])
def test_a_store_that_comes_back(after, in_store, proxy, bucket, hurried):
    hurried(first=10.0)
    death = go_away(proxy, after, 0.3)
    raw = download("coco:s3://bucket/source", "s3://bucket/data", CONFIG)
    death.join()
    death = go_away(proxy, after, 0.3)
    shard(raw, "s3://bucket/data", CONFIG)
    death.join()
    assert kept(bucket) == in_store and raw.problems == {}


@cells("dead", "shard")
def test_a_store_that_stays_away(in_store, proxy, hurried, bucket):
    raw = download("coco:s3://bucket/source", "s3://bucket/data", CONFIG)
    hurried(total=0.5)
    proxy.fail("status", times=10**6, query="/images/", status=503)
    with pytest.raises(StorageError) as caught:
        shard(raw, "s3://bucket/data", CONFIG)
    assert "damaged" not in caught.value.message
    assert not list((bucket / "data" / "shards").rglob("index.json"))
    proxy.faults.clear()
    hurried()
    shard(raw, "s3://bucket/data", CONFIG)
    assert kept(bucket) == in_store


@cells("missing", "download")
def test_images_missing_on_the_server(servers, tmp_path, injected):
    server, _ = servers("127.0.0.1", {f"/{number}.jpg": None for number in range(10)})
    source = write_set(tmp_path / "x.json", [f"{server}/{number}.jpg" for number in range(20)])
    config = replace(SOME_BAD, allow_hosts=["127.0.0.1"])
    manifest = download(source, str(tmp_path / "data"), config)
    assert images_of(manifest) == 10 and manifest.problems[reasons.IMAGE_MISSING].count == 10
    with pytest.raises(DataError, match="no such file"):
        download(source, str(tmp_path / "strict"), replace(config, max_bad_fraction=0.1))
    injected(10)


@cells("back", *BOTH)
def test_a_missing_image_that_returns(fifteen_images, tmp_path, injected):
    images = sorted((fifteen_images / "train").iterdir())[:3]
    for image in images:
        image.rename(f"{image}.away")
    first = Prepared(f"coco:{fifteen_images}", str(tmp_path / "data"), SOME_BAD)
    for image in images:
        Path(f"{image}.away").rename(image)
    second = Prepared(f"coco:{fifteen_images}", str(tmp_path / "data"), SOME_BAD)
    assert (images_of(first.raw), images_of(second.raw)) == (12, 15)
    assert sum(split.samples for split in second.index.splits.values()) == 15
    injected(3)


@cells("redirect", "download")
def test_redirects(servers, tmp_path, injected):
    inside, asked = servers("127.0.0.2", {"/latest/meta-data": SECRET})
    answers = {
        "/a.jpg": f"{inside}/latest/meta-data",
        "/b.jpg": "/c.jpg",
        "/c.jpg": f"{inside}/latest/meta-data",
    }
    outside, _ = servers("127.0.0.1", answers | {"/g.jpg": "file:///etc/hostname"})
    source = write_set(tmp_path / "x.json", [f"{outside}/{name}.jpg" for name in "abgk"])
    manifest = download(source, str(tmp_path / "data"), replace(SOME_BAD, allow_hosts=["127.0.0.1"]))
    assert asked == [] and b"hidden" not in stored(tmp_path / "data")
    assert manifest.problems[reasons.IMAGE_REFUSED].count == 3 and images_of(manifest) == 1
    injected(3)


@cells("internal", "download")
def test_internal_addresses(servers, tmp_path, injected):
    server, asked = servers("127.0.0.1", {})
    port = server.rpartition(":")[2]
    hosts = ("127.0.0.1", "localhost", "[::1]", "169.254.169.254", "10.0.0.1", "0.0.0.0", "2130706433")
    for host in hosts:
        source = write_set(tmp_path / "x.json", [f"http://{host}:{port}/{n}.jpg" for n in range(3)])
        with pytest.raises(DataError, match=r"nobody allowed|is not a valid address"):
            download(source, str(tmp_path / "data"), CONFIG)
    assert asked == []
    injected(len(hosts))


@cells("other", "download")
def test_bytes_that_are_no_image(servers, make_jpeg, tmp_path, injected):
    answers = {
        "/1.jpg": SECRET,
        "/2.jpg": b"\xff\xd8\xff" + SECRET,
        "/3.jpg": make_jpeg()[:200],
        "/4.jpg": b"<html>",
    }
    server, _ = servers("127.0.0.1", answers)
    source = write_set(tmp_path / "x.json", [f"{server}/{n}.jpg" for n in range(1, 8)])
    manifest = download(source, str(tmp_path / "data"), replace(SOME_BAD, allow_hosts=["127.0.0.1"]))
    assert b"hidden" not in stored(tmp_path / "data") and images_of(manifest) == 3
    injected(4)
