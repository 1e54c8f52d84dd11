"""From a model to its data and from an image to all who saw it; and an image that must go."""

import json
from pathlib import Path

import pytest
from bundles import make_bundle

from components import preparation, records
from components.hooks import Listing
from operations import forgetting, lineage, retrain_condition
from pipelines import cli
from trainer.base.errors import ConfigError, DamagedError, DataError
from trainer.data import download, exclusions, training_record
from trainer.export import bundle, published_models
from trainer.model import recipes

ASKED = ("debug", {"data.processes": 1, "data.threads": 2})
SOURCE = "sample:images=24,size=96,seed=4"
CONFIG = recipes.load(*ASKED)


@pytest.fixture
def made(tmp_path):
    """A data root in which a run, whose training has ended, made a version that is current."""
    root = tmp_path / "root"
    _, (shards, _) = preparation.prepare(SOURCE, *ASKED, str(root), "", str(tmp_path / "page.html"))
    run = root / "runs" / "night-1"
    records.record_run(str(root), str(run), "id-1", shards, "debug", {"train.epochs": 2}, "")
    (run / "train").mkdir(parents=True)
    (run / "config.json").write_text("{}")
    (run / "train" / "result.json").write_text("{}")
    folder = Path(make_bundle(tmp_path / "made", name="sample"))
    metadata = json.loads((folder / bundle.METADATA).read_text())
    metadata["trained_on"] |= {"shards": shards["fingerprint"], "checkpoint": str(run / "train" / "best.pt")}
    (folder / bundle.METADATA).write_text(json.dumps(metadata))
    bundle.seal(folder)
    published_models.publish(str(folder), str(root), "sample")
    records.PublishedRecord("sample", "v1", run.name, "http://registry").write(str(root))
    return str(root), shards


def key_of(root, shards, row=0):
    return training_record.pq.read_table(training_record.place(root, shards["fingerprint"]))["key"][
        row
    ].as_py()


def test_from_a_model_to_its_run_data_and_source(made, capsys):
    root, shards = made
    told = lineage.trace("sample@v1", root)
    assert (told["kind"], told["run"], told["current"]) == ("model", "night-1", True)
    assert told["registry"] == "http://registry" and told["overrides"] == {"train.epochs": 2}
    assert told["shards"] == f"shards/{shards['fingerprint']}" and told["source"].startswith("sample:")
    assert Path(root, told["raw"], "manifest.json").exists() and told["run_code"]["kubedet"]
    # A run by its name, its id and its folder.
    for name in ("night-1", "id-1", f"{root}/runs/night-1"):
        assert lineage.trace(name, root)["models"] == ["sample@v1"]
    assert root not in str(lineage.runs(root))  # A volume may be mounted elsewhere.
    assert cli.main(["model", "trace", "sample", "--data-root", root]) == 0
    told = capsys.readouterr().out
    assert "night-1" in told


def test_from_an_image_to_all_who_saw_it(made, capsys):
    root, shards = made
    key = key_of(root, shards)
    assert cli.main(["model", "trace", key, "--data-root", root, "--json"]) == 0
    (who,) = json.loads(capsys.readouterr().out)["seen"]
    (row,) = who["images"]
    assert (who["runs"], who["models"], row["key"], row["seen"]) == (["night-1"], ["sample@v1"], key, True)
    for name in (row["file_name"], row["image"], row["annotations"]):
        assert lineage.trace(name, root)["seen"][0]["models"] == ["sample@v1"]
    with pytest.raises(ConfigError, match="'nobody' is not a known model, run or image"):
        lineage.trace("nobody", root)


@pytest.mark.slow
def test_an_image_that_must_go_goes_and_the_next_run_trains(made, tmp_path, capsys):
    root, shards = made
    key = key_of(root, shards)
    before = sorted(path for path in Path(root).rglob("*") if path.is_file())
    assert cli.main(["data", "forget", key, "--data-root", root, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "night-1" in told and "sample@v1" in told and "nothing was deleted" in told
    assert sorted(path for path in Path(root).rglob("*") if path.is_file()) == before
    assert cli.main(["data", "forget", key, "--data-root", root, "--yes"]) == 0
    files = [path for path in Path(root).rglob("*") if path.is_file()]
    assert not [path for path in files if path.name.startswith(f"{key}-")]
    assert not [path for path in files if path.suffix == ".tar" or "raw" in path.relative_to(root).parts]
    assert [item.key for item in exclusions.read(root)] == [key]
    # What was seen stays, and says whom it concerns.
    assert training_record.excluded_in(root, shards["fingerprint"]) == 1
    capsys.readouterr()
    cli.main(["model", "list", "--data-root", root])
    assert "was trained on 1 that are to be forgotten" in capsys.readouterr().out
    planned = download.plan(SOURCE, root, CONFIG.data)
    assert retrain_condition.skip_reason(Listing(planned, root, CONFIG, 1000)) is None
    _, (again, _) = preparation.prepare(SOURCE, *ASKED, root, "", str(tmp_path / "page.html"))
    assert (
        key
        not in training_record.pq.read_table(training_record.place(root, again["fingerprint"]))[
            "key"
        ].to_pylist()
    )
    # The same again finds nothing left, and is no error.
    assert cli.main(["data", "forget", key, "--data-root", root, "--yes"]) == 0


def test_nothing_is_deleted_while_a_run_trains_on_it(made):
    root, shards = made
    Path(root, "runs/night-1/train/result.json").unlink()
    planned = forgetting.plan(root, [key_of(root, shards)])
    assert planned.running == ["night-1"]
    with pytest.raises(ConfigError, match="still training on the images: night-1"):
        forgetting.forget(root, planned)
    assert not exclusions.read(root) and Path(root, "shards", shards["fingerprint"], "index.json").exists()
    with pytest.raises(ConfigError, match="contain the image nobody"):
        forgetting.plan(root, ["nobody"])


def test_a_record_that_was_altered_is_left_out_and_written_anew(made, caplog):
    root, shards = made
    record = Path(root, "lineage/runs/night-1.json")
    sealed = record.read_text()
    record.write_text(sealed.replace('"debug"', '"other"'))
    assert lineage.runs(root) == [] and "night-1.json is damaged" in caplog.text
    # Who deletes must not overlook a run.
    with pytest.raises(DamagedError, match=r"night-1\.json is damaged"):
        forgetting.plan(root, [key_of(root, shards)])
    records.record_run(root, f"{root}/runs/night-1", "id-1", shards, "debug", {"train.epochs": 2}, "")
    assert lineage.trace("night-1", root)["overrides"] == {"train.epochs": 2}
    # What programs before this one wrote has no hash, and is read; what lacks a key is not.
    plain = json.loads(record.read_text())
    del plain["file_sha256"]
    record.write_text(json.dumps(plain))
    assert [run.run for run in lineage.runs(root)] == ["night-1"]
    del plain["shards"]
    record.write_text(json.dumps(plain))
    assert lineage.runs(root) == [] and "night-1.json lacks shards" in caplog.text
    plain = {"kind": "run", "version": 2}
    record.write_text(json.dumps(plain))
    with pytest.raises(DataError, match="written by a newer kubedet"):
        lineage.runs(root)
