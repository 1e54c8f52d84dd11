"""What is freed, in whichever moment it is stopped, and who else is at work meanwhile."""

import json
import shutil
import threading
import time

import pytest
from at_once import at_once

from components import in_use, preparation, records
from operations import retention
from operations.retention import GRACE, MAX_RUN_SECONDS, inventory, pin
from operations.tuning.space import ENDED
from pipelines import cli
from tests.trainer.conftest import bucket, object_store_server
from trainer import storage
from trainer.base.errors import ConfigError
from trainer.data.shard_index import ShardDataset
from trainer.export import bundle, published_models
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
        "night-03",
        "night-04",
        "night-05",
    ]
    assert sorted(path.name for path in root.joinpath("models/sample").glob("v*")) == ["v3", "v4"]
    assert [path.name for path in root.joinpath("shards").iterdir()] == [new["fingerprint"]]
    assert [len(list(root.joinpath(kind).iterdir())) for kind in ("raw", "images")] == [1, 1]
    assert readable(root, new)
    assert not root.joinpath("shards", old["fingerprint"]).exists()
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
    """Another process deletes shards while a pruning has listed them."""
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


def judged(root, keep=1, later=LATER):
    things = retention.Plan(str(root), keep, now=time.time() + later).artifacts
    return {name: thing.why for name, thing in things.items()}


def test_pinned_registered_and_signed_stay_with_their_data(root):
    root, old, _ = root
    assert pin(str(root), "night-01") == "runs/night-01"
    (root / "models" / "sample" / "v2" / bundle.SIGNATURE).write_text("{}")
    records.PublishedRecord("sample", "v1", "night-01", "http://registry").write(str(root))
    why = judged(root)
    assert why["runs/night-01"] == ["pinned", "sample@v1 was made by it"]
    assert why["models/sample/v1"] == ["registered at http://registry", "made by night-01: pinned"]
    assert "signed" in why["models/sample/v2"] and why["runs/night-02"]
    assert "run night-01 has it" in why[f"shards/{old['fingerprint']}"]
    assert not [name for name, reasons in why.items() if not reasons]


def test_a_running_run_keeps_its_data_and_what_it_began_with(root, began):
    root, old, _ = root
    began(root, "night-00", old, ended=False, weights=str(root / "runs/night-01/train/best.pt"))
    why = judged(root)
    assert why["runs/night-00"] == ["it has not ended"]
    assert why["runs/night-01"] == ["run night-00 began with its weights"]
    assert "run night-00 has it" in why[f"shards/{old['fingerprint']}"]
    assert not judged(root, later=2 * MAX_RUN_SECONDS)["runs/night-00"]  # Nobody goes on with it.


def test_a_run_without_a_record_keeps_all_data(root):
    root, old, _ = root
    (root / "lineage" / "runs" / "night-04.json").unlink()
    assert judged(root)[f"shards/{old['fingerprint']}"] == ["run night-04 has no record of its data"]


def test_a_run_that_begins_keeps_all_data_and_then_its_own(root, monkeypatch):
    root, old, new = root
    monkeypatch.setenv("KUBEDET_RUN_ID", "tonight")
    lender = f"s3://elsewhere/{root.name}/runs/night-01/train/best.pt"
    in_use.begin(str(root), lender)
    begins = ["the run tonight begins"]
    why = judged(root, later=0.9 * LATER)
    assert [reasons for name, reasons in why.items() if name.startswith(("raw/", "images/"))]
    assert why[f"shards/{old['fingerprint']}"][0] == begins[0]
    assert why["runs/night-01"][0] == begins[0] and not why["runs/night-02"]
    in_use.end(str(root), [f"shards/{new['fingerprint']}"])
    assert not judged(root, later=0.9 * LATER)[f"shards/{old['fingerprint']}"]
    # Nobody waits for its training that long.
    assert "the run tonight begins" in judged(root)[f"shards/{new['fingerprint']}"]
    late = judged(root, later=8 * GRACE)
    assert "the run tonight begins" not in late[f"shards/{new['fingerprint']}"]
    in_use.end(str(root), [])
    assert "the run tonight begins" not in judged(root)[f"shards/{new['fingerprint']}"]


def test_a_run_that_passed_is_not_over_before_its_model_is_published(root, began):
    root, old, _ = root
    folder = began(root, "night-00", old)
    (folder / "evaluation" / "gate.json").write_text('{"passed": true}')
    assert judged(root)["runs/night-00"] == ["it has not ended"]
    records.PublishedRecord("sample", "v0", folder.name, "").write(str(root))
    assert not judged(root)["runs/night-00"]


def test_trainings_of_a_search_go_when_all_its_trials_have_ended(root):
    study = root[0] / "tuning" / "lr"
    for name in ("trials/00000.json", "runs/00000/checkpoint.pt", "study.json"):
        (study / name).parent.mkdir(parents=True, exist_ok=True)
        (study / name).write_text('{"shards": "shards/0"}')
    assert judged(root[0])["tuning/lr/runs"] == ["its search has not ended"]
    (study / ENDED).write_text("{}")
    why = judged(root[0])
    assert not why["tuning/lr/runs"] and why["tuning/lr/trials"] == ["the record of a search"]
    assert "tuning/lr/study.json" not in why


def test_images_of_a_kept_source_go_one_by_one(root):
    root = root[0]
    things = retention.Plan(str(root), 1, now=time.time() + LATER).artifacts
    of_kept = [thing for name, thing in things.items() if name.startswith("images/") and thing.why]
    assert [thing.spare for thing in of_kept] == [{}]
    stray = next(root.joinpath(of_kept[0].name).rglob("*.*"))
    lost = stray.with_name(f"{stray.stem.rpartition('-')[0]}-0123456789abcdef.png")
    lost.write_bytes(b"bytes")
    things = retention.Plan(str(root), 1, now=time.time() + LATER).artifacts
    assert things[of_kept[0].name].spare == {f"{lost.parent.name}/{lost.name}": 5}
    assert things[of_kept[0].name].freed == 5


def test_runs_elsewhere_are_judged_where_a_record_tells_of_them(root, tmp_path, began):
    root, old, _ = root
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(root / "runs" / "night-02", elsewhere / "night-90" / "inner")
    folder = began(root, "night-91", old)
    folder.rename(elsewhere / "night-91")
    record = root / "lineage" / "runs" / "night-91.json"
    content = storage.read_json(str(record))
    storage.write_json(str(record), content | {"output": str(elsewhere / "night-91")})
    shutil.copytree(elsewhere / "night-91", elsewhere / "night-01")
    things = retention.Plan(str(root), 1, now=time.time() + LATER, runs=str(elsewhere)).artifacts
    assert things["runs/night-90"].why[0] == "no record of the data root says that it is a run"
    assert things["runs/night-91"].why == ["one of the newest 1 runs"]
    assert "has a run of that name too" in things["runs/night-01"].why[0]
