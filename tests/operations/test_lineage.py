"""The origin of a model or run: its run, data and source."""

import json
from pathlib import Path

import pytest
from bundles import make_bundle

from kubedet import cli
from operations import lineage
from trainer.base.errors import ConfigError, DamagedError, DataError
from trainer.export import bundle, published_models
from trainer.model import recipes
from trainer.steps import records
from trainer.steps.download import download
from trainer.steps.shard import shard

ASKED = ("debug", {"data.processes": 1, "data.threads": 2})
SOURCE = "sample:images=24,size=96,seed=4"
CONFIG = recipes.load(*ASKED)


def record_run(shards, folder):
    records.record_run(
        shards, str(folder), run_id="id-1", image="", weights="", overrides={"train.epochs": 2}
    )


@pytest.fixture
def made(tmp_path):
    """A data root in which a run, whose training has ended, made a version that is current."""
    root = tmp_path / "root"
    shards = shard(download(SOURCE, str(root), *ASKED))
    run = root / "runs" / "night-1"
    record_run(shards, run)
    (run / "train").mkdir(parents=True)
    (run / "config.json").write_text("{}")
    (run / "train" / "result.json").write_text("{}")
    folder = Path(make_bundle(tmp_path / "made", name="sample"))
    metadata = json.loads((folder / bundle.METADATA).read_text())
    metadata["trained_on"] |= {"shards": shards.fingerprint, "checkpoint": str(run / "train" / "best.pt")}
    (folder / bundle.METADATA).write_text(json.dumps(metadata))
    bundle.seal(folder)
    published_models.publish(str(folder), str(root), "sample")
    records.PublishedRecord("sample", "v1", run.name, "http://registry").write(str(root))
    return str(root), shards


def test_from_a_model_to_its_run_data_and_source(made, capsys):
    root, shards = made
    told = lineage.trace("sample@v1", root)
    assert (told["kind"], told["run"], told["current"]) == ("model", "night-1", True)
    assert told["registry"] == "http://registry" and told["overrides"] == {"train.epochs": 2}
    assert told["shards"] == f"shards/{shards.fingerprint}" and told["source"].startswith("sample:")
    assert Path(root, told["raw"], "manifest.json").exists() and told["run_code"]["kubedet"]
    # A run by its name, its id and its folder.
    for name in ("night-1", "id-1", f"{root}/runs/night-1"):
        assert lineage.trace(name, root)["models"] == ["sample@v1"]
    assert root not in str(lineage.runs(root))  # A volume may be mounted elsewhere.
    assert cli.main(["model", "trace", "sample", "--data-root", root]) == 0
    told = capsys.readouterr().out
    assert "night-1" in told
    with pytest.raises(ConfigError, match="'nobody' is not a known model or run"):
        lineage.trace("nobody", root)


def test_a_record_that_was_altered_is_left_out_and_written_anew(made, caplog):
    root, shards = made
    record = Path(root, "lineage/runs/night-1.json")
    sealed = record.read_text()
    record.write_text(sealed.replace('"debug"', '"other"'))
    assert lineage.runs(root) == [] and "night-1.json is damaged" in caplog.text
    # Who deletes must not overlook a run.
    with pytest.raises(DamagedError, match=r"night-1\.json is damaged"):
        lineage.runs(root, strict=True)
    record_run(shards, f"{root}/runs/night-1")
    assert lineage.trace("night-1", root)["overrides"] == {"train.epochs": 2}
    # What programs before this one wrote has no hash, and is read; what lacks a key is not.
    plain = json.loads(record.read_text())
    del plain["file_sha256"]
    record.write_text(json.dumps(plain))
    assert [run.run for run in lineage.runs(root)] == ["night-1"]
    del plain["shards"]
    record.write_text(json.dumps(plain))
    assert lineage.runs(root) == [] and "night-1.json lacks shards" in caplog.text
    record.write_text(json.dumps(plain | {"shards": "shards/f00d", "version": 2}))
    with pytest.raises(DataError, match="written by another kubedet"):
        lineage.runs(root)
