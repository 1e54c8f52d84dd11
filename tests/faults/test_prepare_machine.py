"""Faults of the machine in download and sharding: kills, and want of files, memory and room."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from fault_table import cells, contents
from PIL import Image
from prepared_data import BOTH, believed, mounts

from tests.trainer.export.test_serving_limits import png
from trainer.base.errors import ResourceError
from trainer.config.schema import DataConfig
from trainer.data.download import download
from trainer.data.shard_index import ShardDataset

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
from trainer.base import typed_json
from trainer.config.schema import DataConfig
from trainer.data.raw_folder import RawManifest
from trainer.data.shards import shard

raw = typed_json.load(RawManifest, json.loads(sys.argv[1]), "raw", "")
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
    command = [
        sys.executable,
        "-c",
        KILLED,
        f"coco:{fifteen_images}",
        str(tmp_path / "root"),
        "30",
        str(chance.random()),
    ]
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
    assert "1.jpg" in done.stdout and "there is not enough memory" in done.stdout
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
    command = [sys.executable, "-c", SHARD, json.dumps(raw.to_json()), str(tmp_path / "data")]
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
