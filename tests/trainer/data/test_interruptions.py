"""Download and sharding into an object store that are killed: nothing lost, nothing half-written."""

import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time

import pytest

from trainer import storage

pytestmark = pytest.mark.usefixtures("forked_processes")

COMMAND = """
import sys
from trainer.config.schema import DataConfig
from trainer.data.download import download
from trainer.data.shards import shard

config = DataConfig(processes=2, shard_bytes=60000)
shard(download("coco:s3://bucket/source", sys.argv[1], config), sys.argv[1], config)
"""


def results(root: str) -> dict[str, bytes]:
    """All files under a data root, without the root's name."""
    return {
        name: storage.read_bytes(f"{root}/{name}").replace(root.encode(), b"ROOT")
        for name in storage.list_files(root)
    }


@pytest.mark.slow
@pytest.mark.extra
def test_killed_at_random_points_the_result_is_the_same(make_coco, bucket):
    """Killed without warning in download and in sharding; tests/faults does the same with a local folder."""
    shutil.copytree(make_coco(train=[f"{number}.jpg" for number in range(60)]), bucket / "source")

    def command(name: str) -> list[str]:
        return [sys.executable, "-c", COMMAND, f"s3://bucket/{name}"]

    def files(name: str) -> int:
        return sum(path.is_file() for path in (bucket / name).rglob("*"))

    subprocess.run(command("calm"), check=True, stderr=subprocess.DEVNULL)
    chance = random.Random()
    killed = 0
    for _ in range(2):
        # A killed writer may leave files under other names: there can be more of them than in the end.
        enough = chance.randrange(min(files("killed"), files("calm") - 5), files("calm") - 4)
        process = subprocess.Popen(command("killed"), stderr=subprocess.DEVNULL)
        while process.poll() is None and files("killed") <= enough:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        for path in (bucket / "killed").rglob("[!.]*.tar"):
            with tarfile.open(path) as tar:  # what has its name is complete
                assert len(tar.getnames()) % 2 == 0
    assert killed >= 1
    subprocess.run(command("killed"), check=True, stderr=subprocess.DEVNULL)
    calm, after = results("s3://bucket/calm"), results("s3://bucket/killed")
    assert calm.keys() == after.keys() and len(calm) > 60
    assert [name for name in calm if calm[name] != after[name]] == []
