"""What is deleted and what is kept, whenever a prune is interrupted, and next to runs that begin."""

import json
import os
import shutil
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from at_once import at_once

from kubedet import cli
from operations import retention
from operations.retention import MAX_RUN_DAYS, list_artifacts
from tests.trainer.conftest import bucket, object_store_server
from trainer import storage
from trainer.base.errors import ConfigError, StorageError
from trainer.data.shard_index import ShardDataset
from trainer.export import bundle, published_models
from trainer.steps import records
from trainer.steps.download import download
from trainer.steps.shard import shard

__all__ = ["bucket", "object_store_server"]

DAY = 24 * 3600.0
LATER = 8 * DAY


def prune(root, keep=1, later=LATER):
    return retention.prune(str(root), keep, now=time.time() + later)


def readable(root, shards):
    uri = storage.join(str(root), "shards", shards.fingerprint)
    for split in storage.read_json(storage.join(uri, "index.json"))["splits"]:
        dataset = ShardDataset(uri, split)
        for number in range(len(dataset)):
            dataset.read(number)
    return True


def reasons(root, keep=1, later=LATER):
    artifacts = retention.Pruning(str(root), keep, now=time.time() + later).artifacts
    return {name: artifact.reasons for name, artifact in artifacts.items()}


@pytest.mark.slow
def test_what_is_needed_is_kept_and_the_rest_is_deleted(root):
    root, _old, new = root
    before = sum(artifact.size for artifact in list_artifacts(str(root)).values())
    deleted = prune(root).deleted
    after = sum(artifact.size for artifact in list_artifacts(str(root)).values())
    assert before - after == sum(artifact.size for artifact in deleted) > 0
    assert [path.name for path in root.joinpath("runs").iterdir()] == ["night-05"]
    assert sorted(path.name for path in root.joinpath("models/sample").glob("v*")) == ["v3", "v4"]
    assert [path.name for path in root.joinpath("shards").iterdir()] == [new.fingerprint]
    assert [len(list(root.joinpath(kind).iterdir())) for kind in ("raw", "images")] == [1, 1]
    assert readable(root, new)
    assert published_models.read_current(str(root), "sample").version == "v4"
    assert prune(root).summary == "nothing: 0.0 MB"
    assert published_models.promote(str(root), "sample", "v3").version == "v3"


@pytest.mark.slow
def test_an_interrupted_prune_leaves_what_is_needed_and_continues(root, tmp_path, monkeypatch):
    root, _, new = root
    pruning = retention.Pruning(str(root), 1, now=time.time() + LATER)
    prune(shutil.copytree(root, tmp_path / "undisturbed"))
    left = sorted(list_artifacts(str(tmp_path / "undisturbed")))
    count = sum(len(storage.list_files(artifact.uri)) or 1 for artifact in pruning.deleted)
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
            prune(copy)
        monkeypatch.setattr(retention.storage, "delete", delete)
        assert readable(copy, new)
        assert published_models.load("sample", str(copy)).metadata.model_version == "v4"
        assert set(published_models.load_versions(str(copy), "sample")[1]) == set(), "no incomplete version"
        prune(copy)
        assert sorted(list_artifacts(str(copy))) == left


def test_files_that_another_process_deletes_meanwhile_are_no_error(root, monkeypatch):
    root, old, new = root

    def listed(data_root):
        artifacts = list_artifacts(data_root)
        root.joinpath("shards", old.fingerprint, "index.json").unlink()
        return artifacts

    monkeypatch.setattr(retention, "list_artifacts", listed)
    prune(root)
    assert readable(root, new) and published_models.read_current(str(root), "sample").version == "v4"


def test_a_store_that_fails_for_a_moment_costs_no_data(root, monkeypatch):
    root, _, new = root
    shutil.rmtree(root / "lineage" / "runs")  # Only the versions of the model need the data.
    read_bytes = storage.read_bytes

    def fail(uri, **options):
        if uri.endswith("index.json"):
            raise StorageError(f"cannot read {uri}: status 503", transient=True)
        return read_bytes(uri, **options)

    monkeypatch.setattr(storage, "read_bytes", fail)
    prune(root)
    monkeypatch.undo()
    assert len(list(root.joinpath("raw").iterdir())) == len(list(root.joinpath("images").iterdir())) == 2
    assert readable(root, new)


def test_runs_outside_the_data_root_do_not_count_as_the_newest(root, tmp_path, began):
    root, _, new = root
    began(root, "night-06", new)
    shutil.rmtree(root / "runs" / "night-06")
    assert "one of the newest 1 runs" in reasons(root)["runs/night-05"]


@pytest.mark.slow
def test_two_prunes_and_a_run_that_begins_lose_nothing(root, tmp_path):
    """The run needs the very data that the prunes would delete."""
    root, old, new = root
    aged = time.time() - LATER
    for path in root.rglob("*"):
        os.utime(path, (aged, aged))
    for pause in (0.0, 0.15):
        copy = Path(shutil.copytree(root, tmp_path / f"at-{pause}"))

        def begin(copy=copy, pause=pause):
            time.sleep(pause)
            asked = ("debug", {"data.processes": 1, "data.threads": 2})
            source = "sample:images=24,size=96,seed=1"
            return shard(download(source, str(copy), *asked))

        def delete(copy=copy):
            retention.prune(str(copy), 1)

        made, *_ = at_once(begin, delete, delete)
        assert made.fingerprint == old.fingerprint
        assert readable(copy, old) and readable(copy, new)


def test_data_that_a_run_reuses_is_young_again(root, tmp_path):
    root, old, _new = root
    aged = time.time() - LATER
    for path in root.rglob("*"):
        os.utime(path, (aged, aged))
    before = retention.Pruning(str(root), 1)
    assert not before.artifacts[f"shards/{old.fingerprint}"].reasons
    asked = ("debug", {"data.processes": 1, "data.threads": 2})
    shard(download("sample:images=24,size=96,seed=1", str(root), *asked))
    kinds = [artifact.kind for artifact in retention.Pruning(str(root), 1).deleted]
    assert not {"shards", "raw", "images"} & set(kinds) and "runs" in kinds
    assert readable(root, old)


def test_the_number_of_kept_runs_is_positive(root, caplog):
    with pytest.raises(ConfigError, match="number of runs to keep is 0"):
        prune(root[0], keep=0)
    retention.prune_after_step(str(root[0]), 0)
    assert "nothing was deleted" in caplog.text


def test_the_command_lists_what_is_deleted_and_why_the_rest_is_kept(root, capsys):
    root, old, _ = root
    asked = ["data", "prune", "--keep", "1", "--data-root", str(root), "--older-than"]
    assert cli.main([*asked, "0.5", "--yes"]) == 2, "runs that wait in a queue would lose their data"
    aged = time.time() - 2 * DAY
    for path in root.rglob("*"):
        os.utime(path, (aged, aged))
    asked.append("1")
    capsys.readouterr()
    assert cli.main(asked) == 0
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line for line in shown.splitlines()}
    assert lines["models/sample/v1"].endswith("would be deleted")
    assert lines["models/sample/v4"].endswith("the current version")
    assert "nothing was deleted" in shown and root.joinpath("runs/night-01").exists()
    assert cli.main([*asked, "--yes", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["done"] is True
    deleted = {artifact["name"] for artifact in tree["artifacts"] if not artifact["kept"]}
    assert f"shards/{old.fingerprint}" in deleted
    assert not root.joinpath("runs/night-01").exists()


@pytest.mark.slow
def test_a_bucket_is_pruned_likewise(bucket, tmp_path):
    root, asked = "s3://bucket/root", ("debug", {"data.processes": 1, "data.threads": 2})
    sources = [f"sample:images=8,size=96,seed={seed}" for seed in (1, 2)]
    old, new = (shard(download(source, root, *asked)) for source in sources)
    records.record_run(new, f"{root}/runs/night", run_id="", image="", weights="", overrides={})
    deleted = {artifact.name for artifact in prune(root).deleted}
    assert f"shards/{old.fingerprint}" in deleted and len(deleted) == 3, "with its tables and images"
    left = [name for name in list_artifacts(root) if name.startswith("shards/")]
    assert left == [f"shards/{new.fingerprint}"]
    assert readable(root, new) and prune(root).summary == "nothing: 0.0 MB"
    assert not [name for name, _ in storage.scan(root) if name.startswith(tuple(deleted))]
    # What is reused is young again.
    later = storage.state(f"{root}/shards/{new.fingerprint}/index.json").modified
    shard(download(sources[1], root, *asked))
    assert storage.state(f"{root}/shards/{new.fingerprint}/index.json").modified >= later


def test_registered_and_signed_versions_are_kept_with_their_data(root):
    root, old, _ = root
    (root / "models" / "sample" / "v2" / bundle.SIGNATURE).write_text("{}")
    records.PublishedRecord("sample", "v1", "night-01", "http://registry").write(str(root))
    why = reasons(root)
    assert why["models/sample/v1"] == ["registered at http://registry"]
    assert "signed" in why["models/sample/v2"]
    assert "sample@v1 was trained on it" in why[f"shards/{old.fingerprint}"]
    assert all(why[name] for name in why if name.startswith(("shards/", "raw/", "images/")))


def test_an_unfinished_run_is_kept_with_its_data_and_its_initial_weights(root, began):
    root, old, _ = root
    lender = f"s3://elsewhere/{root.name}/runs/night-01/train/best.pt"
    began(root, "night-00", old, ended=False, weights=lender)
    record = root / "lineage" / "runs" / "night-00.json"
    content = storage.read_json(str(record))
    storage.write_json(str(record), content | {"started": datetime.now(UTC).isoformat()})
    why = reasons(root, keep=1)
    assert "unfinished" in why["runs/night-00"] and not why["runs/night-02"]
    assert why["runs/night-01"] == ["run night-00 began with its weights"]
    assert "run night-00 was trained on it" in why[f"shards/{old.fingerprint}"]
    assert "unfinished" not in reasons(root, later=(MAX_RUN_DAYS + 1) * DAY)["runs/night-00"]
    # A run that passed is unfinished until its model is published.
    records.VerdictRecord("night-00", True, {}).write(str(root))
    assert "unfinished" in reasons(root)["runs/night-00"]
    records.PublishedRecord("sample", "v0", "night-00", "").write(str(root))
    assert "unfinished" not in reasons(root)["runs/night-00"]


def test_a_kept_run_without_a_record_keeps_all_data(root):
    root, old, _ = root
    (root / "lineage" / "runs" / "night-04.json").unlink()
    assert not reasons(root)[f"shards/{old.fingerprint}"]
    young = reasons(root, later=0)
    assert "run night-04 has no record of its data" in young[f"shards/{old.fingerprint}"]


def test_trial_runs_of_a_search_are_deleted_when_they_are_old(root):
    root, old, _ = root
    study = root / "tuning" / "lr"
    for name in ("trials/00000.json", "runs/00000/checkpoint.pt", "study.json"):
        (study / name).parent.mkdir(parents=True, exist_ok=True)
        (study / name).write_text(json.dumps({"shards": f"s3://bucket/shards/{old.fingerprint}"}))
    assert "search lr" in reasons(root, later=0)[f"shards/{old.fingerprint}"]
    why = reasons(root)
    assert not why["tuning/lr/runs"] and why["tuning/lr/trials"] == ["the record of a search"]
    assert not why[f"shards/{old.fingerprint}"] and "tuning/lr/study.json" not in why


def test_what_cannot_be_judged_is_kept(root, monkeypatch):
    root, *_ = root
    (root / "models" / "sample" / "v1" / bundle.METADATA).write_text("{")
    assert "damaged" in reasons(root)["models/sample/v1"][0]
    raw = next(root.joinpath("raw").iterdir())
    for path in root.joinpath("raw").iterdir():
        (path / "plan.json").write_text("[]")
    assert raw.exists() and all(why for name, why in reasons(root).items() if name.startswith("images/"))
    for path in root.joinpath("shards").iterdir():
        (path / "index.json").write_text("[]")
    why = reasons(root)
    assert all(why[name] for name in why if name.startswith("raw/"))
    scan = storage.scan
    monkeypatch.setattr(
        retention.storage,
        "scan",
        lambda uri: ((name, state._replace(modified=None)) for name, state in scan(uri)),
    )
    assert all("its age is unknown" in why for why in reasons(root).values())


def test_old_images_of_a_kept_source_that_nothing_needs_are_deleted(root):
    root, _, new = root
    shards = storage.read_json(str(root / "shards" / new.fingerprint / "index.json"))
    raw = root / "raw" / shards["raw_fingerprint"]
    images = root / storage.read_json(str(raw / "manifest.json"))["images"]
    needed = {path for path in images.rglob("*") if path.is_file()}
    old, foreign = images / "ab" / f"gone-{'ab' * 8}.jpg", images / "ab" / "notes.txt"
    for path in (old, foreign):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"bytes")
    prune(root, later=0)
    assert old.exists(), "it is young"
    os.utime(old, (time.time() - LATER,) * 2)
    (table,) = raw.glob("images-*.npy")
    manifest = raw / "manifest.json"
    for path in (table, manifest):  # Damaged, or of a download that goes on.
        content = path.read_bytes()
        path.unlink() if path is manifest else path.write_bytes(content[:-1])
        prune(root, later=0)
        path.write_bytes(content)
        assert old.exists()
    record = root / "lineage" / "runs" / "night-04.json"
    moved = record.rename(root / "record")
    prune(root, later=0)
    assert old.exists(), "what a kept run needs is unknown"
    moved.rename(record)
    assert [artifact.size for artifact in prune(root, later=0).deleted] == [5] and not old.exists()
    assert {path for path in images.rglob("*") if path.is_file()} == {*needed, foreign}
