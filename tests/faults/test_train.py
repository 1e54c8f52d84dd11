"""Faults in training: its checkpoints, its other files, its data, its machine."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fault_table import HARMS, cells, each
from finished_runs import assert_same_weights, final_weights, losses, stopped_after
from prepared_data import mounts

from trainer import storage
from trainer.base.errors import CheckpointError, KubedetError, StorageError
from trainer.config import parsing
from trainer.trackers.training_log import read_rows
from trainer.training import checkpoint
from trainer.training.loop import train


@pytest.fixture(scope="module")
def whole(tmp_path_factory, shards, tiny):
    """A whole run, and its result."""
    output = str(tmp_path_factory.mktemp("whole"))
    return output, train(tiny(), shards, output)


@pytest.fixture
def stopped(tiny, shards, tmp_path):
    """A run that was stopped after step 7, with checkpoints of steps 6 and 8."""
    output = tmp_path / "run"
    with stopped_after(7):
        train(tiny(), shards, str(output))
    return output


def assert_same(output, whole):
    assert_same_weights(final_weights(str(output)), final_weights(whole[0]))
    assert losses(str(output)) == losses(whole[0])
    best, other = (checkpoint.read(f"{folder}/best.pt") for folder in (output, whole[0]))
    assert all(torch.equal(value, other["model"][name]) for name, value in best["model"].items())
    assert best["metrics"] == other["metrics"]


@pytest.mark.parametrize("harm", each(*HARMS, stages=("train",)))
def test_checkpoints(harm, stopped, whole, shards, tiny, chance, injected, tmp_path, caplog):
    """The newest of a stopped run, and its best: a resumed run ends as one that nothing befell."""
    times = 6 if harm == "flip" else 2
    for number in range(times):
        run = Path(shutil.copytree(stopped, tmp_path / f"copy-{number}"))
        HARMS[harm](run / "checkpoints" / "step-00000008.pt", chance)
        HARMS[harm](run / "best.pt", chance)
        caplog.clear()
        assert train(tiny(), shards, str(run))["resumed_from"] == 6
        assert "best.pt" in caplog.text and "restored" in caplog.text
        assert "step-00000008.pt" in caplog.text or harm == "lost"
        assert_same(run, whole)
    injected(2 * times)


@pytest.mark.parametrize("harm", each(*HARMS, stages=("train", "evaluate")))
def test_damaged_checkpoints_are_refused(harm, whole, chance, injected, tmp_path):
    path = tmp_path / "best.pt"
    for _ in range(60):
        shutil.copy(f"{whole[0]}/best.pt", path)
        HARMS[harm](path, chance)
        with pytest.raises(KubedetError, match=r"best\.pt") as caught:
            checkpoint.load_model(str(path))
        assert "delete" not in caught.value.fix
    injected(60)


@pytest.mark.parametrize("harm", each(*HARMS, stages=("train",)))
@pytest.mark.parametrize("name", ["metrics.jsonl", "trackers.json", "result.json"])
def test_other_files_of_a_run(harm, name, stopped, whole, shards, tiny, chance, tmp_path):
    """None of them ends a run, and none changes its weights."""
    if name != "metrics.jsonl":
        storage.write_json(str(stopped / name), {"kind": "trackers", "version": 1, "ids": {"mlflow": "a"}})
    before = read_rows(str(stopped))
    HARMS[harm](stopped / name, chance)
    assert all(row in before for row in read_rows(str(stopped)))
    train(tiny(), shards, str(stopped))
    assert_same_weights(final_weights(str(stopped)), final_weights(whole[0]))
    assert storage.read_json(str(stopped / "result.json"))["steps"] == 12


@cells("form", "train")
@pytest.mark.parametrize("text", ["[]", '{"train": 7}', '{"train": {"lr": "high"}}', "{", '{"model": []}'])
def test_a_configuration_of_another_shape(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(KubedetError, match=r"config\.json") as caught:
        parsing.read(str(tmp_path / "config.json"))
    assert caught.value.exit_code == 2 and caught.value.fix


@pytest.mark.parametrize("harm", each("flip", "cut", stages=("train",)))
def test_damaged_configurations(harm, tiny, chance, injected, tmp_path):
    path = tmp_path / "config.json"
    for _ in range(100):
        parsing.write(str(path), tiny())
        HARMS[harm](path, chance)
        with pytest.raises(KubedetError, match=r"config\.json"):
            parsing.read(str(path))
    injected(100)


@cells("best", "train")
def test_a_lost_best_checkpoint(whole, shards, tiny, tmp_path, caplog):
    run = shutil.copytree(whole[0], tmp_path / "run")
    newest = checkpoint.read_step(f"{run}/checkpoints", 12)
    newest["best"] = {**newest["best"], "step": 3, "epoch": 0}
    checkpoint.write_step(newest, f"{run}/checkpoints", 12, keep=2)
    (run / "best.pt").unlink()
    assert train(tiny(), shards, str(run))["best_step"] == 12
    assert (
        "the next validation writes a new best.pt" in caplog.text
        and checkpoint.read(f"{run}/best.pt")["step"] == 12
    )


@cells("every", "train")
def test_every_checkpoint_damaged(stopped, shards, tiny, chance, injected):
    paths = list((stopped / "checkpoints").iterdir())
    for path in paths:
        HARMS["flip"](path, chance)
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints .* all are damaged") as caught:
        train(tiny(), shards, str(stopped))
    assert "delete" not in caught.value.fix
    injected(len(paths))


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), OSError(errno.EMFILE, "x")],
)
@cells("memory", "train", "evaluate")
def test_out_of_memory_while_reading_a_checkpoint(error, stopped, shards, tiny, monkeypatch):
    """It goes neither back to the checkpoint before nor on without: what is there is whole."""

    def fail(*_, **__):
        raise error

    before = {path: path.read_bytes() for path in stopped.rglob("*.pt")}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", fail)
        with pytest.raises(StorageError) as caught:
            train(tiny(), shards, str(stopped))
    assert "damaged" not in str(caught.value) and "delete" not in str(caught.value)
    assert {path: path.read_bytes() for path in stopped.rglob("*.pt")} == before
    assert train(tiny(), shards, str(stopped))["resumed_from"] == 8


@cells("flip", "train", "evaluate")
def test_shards_while_they_are_read(whole, shards, tiny, chance, injected, tmp_path):
    """A training on flipped shards ends with the file's name, or as if nothing had happened."""
    flips = 6
    for number in range(flips):
        copy = Path(shutil.copytree(shards, tmp_path / f"data-{number}/shards" / Path(shards).name))
        path = chance.choice([*copy.glob("train-*.tar"), *copy.glob("*.npy"), copy / "annotations/val.json"])
        HARMS["flip"](path, chance)
        try:
            train(tiny(), str(copy), str(tmp_path / f"run-{number}"))
            assert losses(str(tmp_path / f"run-{number}")) == losses(whole[0])
        except KubedetError as error:
            assert path.name in error.message and "--repair" in error.fix
    injected(flips)


@cells("stop", "train")
@pytest.mark.parametrize("step", [2, 6, 9])
def test_sigterm(step, whole, shards, tiny, tmp_path):
    with stopped_after(step):
        train(tiny(), shards, str(tmp_path))
    train(tiny(), shards, str(tmp_path))
    assert_same(tmp_path, whole)


@cells("moved", "train")
def test_a_moved_run_on_moved_shards(stopped, whole, shards, tiny, bucket, monkeypatch):
    root = Path(shards).parents[1]
    shutil.copytree(root / "shards", bucket / "root/shards")
    shutil.move(stopped, bucket / "runs")
    there = f"s3://bucket/root/shards/{Path(shards).name}"
    assert train(tiny(), there, "s3://bucket/runs")["resumed_from"] == 8
    assert_same_weights(final_weights("s3://bucket/runs"), final_weights(whole[0]))


@pytest.mark.parametrize("kind", each("swallow", "alter", stages=("train",)))
def test_lost_writes_of_a_run(kind, whole, shards, tiny, proxy, injected):
    names = ["step-00000006.pt", "best.pt", "step-00000012.pt", "result.json"]
    for name in names:
        proxy.fail(kind, method="PUT", query=name)
    train(tiny(), shards, "s3://bucket/run")
    assert proxy.faults == []
    assert_same("s3://bucket/run", whole)
    injected(len(names))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=cells(name, "train"))
        for name, kinds in {
            "busy": ["status"],
            "reset": ["drop", "lost"],
            "short": ["short", "corrupt"],
        }.items()
        for kind in kinds
    ],
)
def test_a_store_of_shards_and_runs(kind, whole, shards, tiny, proxy, bucket, injected):
    shutil.copytree(shards, bucket / "root/shards/f")
    for method in ("GET", "PUT") if kind in ("status", "drop", "lost") else ("GET",):
        proxy.fail(kind, method=method, times=2, after=60)  # No more: what stays wrong is damaged.
    train(tiny(), "s3://bucket/root/shards/f", "s3://bucket/run")
    assert proxy.faults == []
    assert_same("s3://bucket/run", whole)
    injected(4 if kind in ("status", "drop", "lost") else 2)


KILLED = """
import os, random, signal, sys
import torch
torch.set_num_threads(1)
from trainer.config import parsing
from trainer.training.loop import train

config = parsing.read(sys.argv[1])
shards, output, chance = sys.argv[2], sys.argv[3], random.Random(sys.argv[4])


def run(at):
    # In a process of its own, which dies at its at-th touch of a file of the run; returns how it ended.
    pid = os.fork()
    if not pid:
        passed = 0

        def count(event, arguments):
            nonlocal passed
            if event in ("open", "os.rename", "os.remove") and str(arguments[0]).startswith(output):
                passed += 1
                if passed == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        train(config, shards, output)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


deaths = sum(os.WIFSIGNALED(run(chance.randrange(2, 14))) for _ in range(int(sys.argv[5])))
assert run(-1) == 0
print(deaths)
"""


@cells("kill", "train")
def test_kills(whole, shards, tiny, chance, tmp_path, injected):
    parsing.write(str(tmp_path / "config.json"), tiny())
    command = [sys.executable, "-c", KILLED, str(tmp_path / "config.json"), shards, str(tmp_path / "run")]
    done = subprocess.run(
        [*command, str(chance.random()), "8"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same(tmp_path / "run", whole)
    deaths = int(done.stdout.splitlines()[-1])
    assert deaths >= 3
    injected(deaths)


@cells("full", "train")
@pytest.mark.parametrize("room", [3, 400, 2500])
def test_a_full_disk(room, whole, shards, tiny, tmp_path):
    """In a file system of some KB, mounted for one process; the same command goes on when there is room."""
    if not mounts():
        pytest.skip("mounts nothing: needs root")
    parsing.write(str(tmp_path / "config.json"), tiny())
    run, python = tmp_path / "run", f"{sys.executable} -m trainer train"
    run.mkdir()
    again = f"{python} --config {tmp_path}/config.json --shards {shards} --output {run}"
    script = (
        f"mount -t tmpfs -o size={room}k none {run} && {{ {again}; echo first $?; }}"
        f" && mount -o remount,size=90m {run} && {again} && cp -r {run} {tmp_path}/kept"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "first 2" in done.stdout and "the disk is full" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert_same(tmp_path / "kept", whole)
