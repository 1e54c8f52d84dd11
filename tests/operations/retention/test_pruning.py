"""What is freed, in whichever moment it is stopped, and who else is at work meanwhile."""

import json
import shutil
import threading
import time

import pytest
from at_once import at_once

from components import in_use, preparation
from operations import retention
from operations.retention import GRACE, inventory, pin
from pipelines import cli
from tests.trainer.conftest import bucket, object_store_server
from trainer import storage
from trainer.base.errors import ConfigError
from trainer.data.shard_index import ShardDataset
from trainer.export import published_models
from trainer.launching import leases

__all__ = ["bucket", "object_store_server"]

LATER = 2 * GRACE


def freed(root, keep=1):
    return retention.prune(str(root), keep, now=time.time() + LATER)


def readable(root, shards):
    uri = storage.join(str(root), "shards", shards["fingerprint"])
    for split in storage.read_json(storage.join(uri, "index.json"))["splits"]:
        dataset = ShardDataset(uri, split)
        for number in range(len(dataset)):
            dataset.read(number)
    return True


@pytest.mark.slow
def test_what_is_needed_stays_whole_and_the_rest_is_gone(root):
    root, old, new = root
    before = sum(thing.size for thing in inventory(str(root)).values())
    pruned = freed(root)
    after = sum(thing.size for thing in inventory(str(root)).values())
    assert before - after == pruned.size > 0
    assert sorted(path.name for path in root.joinpath("runs").iterdir()) == [
        "night-03", "night-04", "night-05",
    ]  # fmt: skip
    assert sorted(path.name for path in root.joinpath("models/sample").glob("v*")) == ["v3", "v4"]
    assert [path.name for path in root.joinpath("shards").iterdir()] == [new["fingerprint"]]
    assert [len(list(root.joinpath(kind).iterdir())) for kind in ("raw", "images")] == [1, 1]
    assert readable(root, new)
    assert not root.joinpath("shards", old["fingerprint"]).exists()
    assert len(list(root.joinpath("seen").glob("*.parquet"))) == 2  # Who saw an image stays known.
    assert published_models.current(str(root), "sample").version == "v4"
    assert freed(root).summary == "nothing: 0.0 MB"
    assert published_models.rollback(str(root), "sample").version == "v3"


@pytest.mark.slow
def test_killed_in_any_moment_it_leaves_what_is_needed_and_goes_on(root, tmp_path, monkeypatch):
    root, _, new = root
    whole = retention.Plan(str(root), 1, now=time.time() + LATER)
    freed(shutil.copytree(root, tmp_path / "undisturbed"))
    left = sorted(inventory(str(tmp_path / "undisturbed")))
    count = sum(len(storage.list_files(thing.place)) or 1 for thing in whole.freed)
    delete = storage.delete
    for number in range(1, count, max(1, count // 4)):
        copy = shutil.copytree(root, tmp_path / f"stopped-{number}")
        lock, budget = threading.Lock(), [number]

        def stopping(uri, lock=lock, budget=budget):
            with lock:
                budget[0] -= 1
            if budget[0] < 0:
                raise KeyboardInterrupt
            delete(uri)

        monkeypatch.setattr(retention.storage, "delete", stopping)
        with pytest.raises(KeyboardInterrupt):
            freed(copy)
        monkeypatch.setattr(retention.storage, "delete", delete)
        assert readable(copy, new)
        assert published_models.load("sample", str(copy)).metadata.model_version == "v4"
        # What is half gone counts as whole nowhere, and the next call finds it.
        assert set(published_models.versions(str(copy), "sample")[1]) == set()
        freed(copy)
        assert sorted(inventory(str(copy))) == left


@pytest.mark.parametrize("gone", ["shards/{}/index.json", "runs/night-01/evaluation/gate.json"])
def test_what_another_command_deletes_meanwhile_is_no_error(root, monkeypatch, gone):
    """`data forget` deletes shards and raw tables while a pruning has listed them."""
    root, old, new = root

    def listed(*arguments):
        things = inventory(*arguments)
        path = root / gone.format(old["fingerprint"])
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return things

    monkeypatch.setattr(retention, "inventory", listed)
    freed(root)
    assert readable(root, new) and published_models.current(str(root), "sample").version == "v4"


@pytest.mark.slow
def test_two_prunings_and_a_run_that_begins_lose_nothing(root, tmp_path, monkeypatch):
    """The run needs the very data that the prunings would free."""
    root, old, new = root
    monkeypatch.setenv("KUBEDET_RUN_ID", "tonight")
    ends = set()
    for pause in (0.0, 0.15):
        copy = shutil.copytree(root, tmp_path / f"at-{pause}")

        def begin(copy=copy, pause=pause):
            time.sleep(pause)
            asked = ("debug", {"data.processes": 1, "data.threads": 2})
            source = "sample:images=24,size=96,seed=1"
            return preparation.prepare(source, *asked, str(copy), "", str(copy / "page"))[1][0]

        def free(copy=copy):
            return len(freed(copy).freed)

        made, *counts = at_once(begin, free, free)
        assert made["fingerprint"] == old["fingerprint"]
        assert readable(copy, old) and readable(copy, new)
        ends.add(max(counts))
    assert ends  # Whoever came first, the data are there.


def test_who_frees_space_is_waited_for(root, monkeypatch, caplog):
    monkeypatch.setattr(retention, "_LEASE_WAIT_SECONDS", 0.0)
    with leases.hold(leases.of_data_root(str(root[0])), "somebody", patience=0):
        with pytest.raises(leases.HeldError, match="held by somebody"):
            freed(root[0])
        retention.prune_after(str(root[0]), 1)
        with pytest.raises(ConfigError, match="newest 0 runs cannot be kept"):
            freed(root[0], keep=0)
    assert "nothing was freed" in caplog.text


def test_the_command_says_what_goes_and_why_the_rest_stays(root, capsys):
    root, old, _ = root
    asked = ["data", "prune", "--keep", "1", "--grace", "0", "--data-root", str(root)]
    assert cli.main([*asked, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line for line in shown.splitlines()}
    assert lines["models/sample/v1"].endswith("would go")
    assert lines["models/sample/v4"].endswith("the current version")
    assert "nothing was deleted" in shown and root.joinpath("runs/night-01").exists()
    assert cli.main([*asked, "--yes", "-o", "json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["done"] is True
    gone = {thing["name"] for thing in tree["things"] if not thing["kept"]}
    assert f"shards/{old['fingerprint']}" in gone and tree["freed_bytes"] > 0
    assert not root.joinpath("runs/night-01").exists()


def test_the_command_pins_and_unpins(root, capsys):
    asked = ["data", "prune", "--data-root", str(root[0])]
    assert cli.main([*asked, "--pin", "night-01"]) == 0
    assert cli.main([*asked, "--keep", "1", "--grace", "0", "--yes"]) == 0
    assert "runs/night-01" in capsys.readouterr().out and root[0].joinpath("runs/night-01").exists()
    assert cli.main([*asked, "--unpin", "night-01"]) == 0
    assert cli.main([*asked, "--keep", "1", "--grace", "0", "--yes"]) == 0
    assert not root[0].joinpath("runs/night-01").exists()
    assert cli.main([*asked, "--unpin", "night-01"]) == 2
    assert cli.main([*asked, "--pin", "night-77"]) == 2
    with pytest.raises(SystemExit):
        cli.main([*asked, "--keep", "1", "--grace", "-1", "--yes"])
    assert cli.main([*asked, "--yes"]) == 2
    messages = capsys.readouterr().err
    for message in ("night-01 is not pinned", "there is no night-77", "--grace: must be", "newest 0 runs"):
        assert message in messages


@pytest.mark.slow
def test_a_bucket_is_freed_likewise(bucket, tmp_path):
    root, asked = "s3://bucket/root", ("debug", {"data.processes": 1, "data.threads": 2})
    sources = (f"sample:images=8,size=96,seed={seed}" for seed in (1, 2))
    old, new = (
        preparation.prepare(source, *asked, root, "", str(tmp_path / "page"))[1][0] for source in sources
    )
    in_use.end(root, [])
    pin(root, f"shards/{new['fingerprint']}")
    pruned = freed(root)
    gone = {thing.name for thing in pruned.freed}
    assert f"shards/{old['fingerprint']}" in gone and len(gone) == 3  # With its tables and images.
    assert [thing.name for thing in inventory(root).values() if thing.name.startswith("shards/")] == [
        f"shards/{new['fingerprint']}"
    ]
    assert readable(root, new) and freed(root).summary == "nothing: 0.0 MB"
    assert not [name for name, _ in storage.scan(root) if name.startswith(tuple(gone))]
