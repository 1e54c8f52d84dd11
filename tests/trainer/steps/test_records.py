"""Records of runs in the data root."""

import json

import pytest

from trainer.base.errors import DamagedError, DataError
from trainer.steps import records
from trainer.steps.download import download
from trainer.steps.shard import shard


def test_a_record_that_was_altered_is_left_out_and_written_anew(tmp_path, caplog):
    root = str(tmp_path / "root")
    asked = ("debug", {"data.processes": 1, "data.threads": 2})
    shards = shard(download("sample:images=24,size=96,seed=4", root, *asked))

    def record_run():
        overrides = {"train.epochs": 2}
        folder = f"{root}/runs/night-1"
        records.record_run(shards, folder, run_id="id-1", image="", weights="", overrides=overrides)

    def read(**options):
        return list(records.RunRecord.read_all(root, **options))

    record_run()
    assert root not in str(read())  # A volume may be mounted elsewhere.
    record = tmp_path / "root" / "lineage" / "runs" / "night-1.json"
    sealed = record.read_text()
    record.write_text(sealed.replace('"debug"', '"other"'))
    assert read() == [] and "night-1.json is damaged" in caplog.text
    # Who deletes must not overlook a run.
    with pytest.raises(DamagedError, match=r"night-1\.json is damaged"):
        read(strict=True)
    record_run()
    assert [run.overrides for run in read()] == [{"train.epochs": 2}]
    plain = json.loads(record.read_text())
    del plain["file_sha256"], plain["shards"]
    record.write_text(json.dumps(plain))
    assert read() == [] and "night-1.json lacks shards" in caplog.text
    record.write_text(json.dumps(plain | {"shards": "shards/f00d", "version": 2}))
    with pytest.raises(DataError, match="written by another version of kubedet"):
        read()
