"""The documented table of faults, and a few faults injected by the quick tests too."""

import re
from pathlib import Path

import pytest
from fault_table import FAULTS, HARMS, STAGES, contents, table
from prepared_data import Prepared

from trainer.base.errors import KubedetError
from trainer.data.shard_index import ShardDataset

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "reliability.md").read_text()


def test_the_document_has_every_fault_with_its_promise_and_no_other():
    begin = TEXT.index(table({}).partition("\n")[0])
    rows = [line.split(" | ") for line in TEXT[begin:].partition("\n\n")[0].splitlines()[2:]]
    assert [(row[0].removeprefix("| "), row[1]) for row in rows] == list(FAULTS.values())
    assert all(len(row) == 2 + len(STAGES) for row in rows)
    assert not re.search(r"failed|not run", TEXT[begin:].partition("\n\n")[0])
    assert re.search(r"20\d\d-\d\d-\d\d", TEXT[:begin].rpartition("## ")[2]), "figures have a date"


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", ["train-00000.tar", "train.samples.npy", "index.json"])
def test_damaged_shards_are_named_and_repaired(fifteen_images, tmp_path, chance, harm, name):
    prepared = Prepared(f"coco:{fifteen_images}", str(tmp_path / "data"))
    before = contents(*prepared.folders)
    HARMS[harm](prepared.folders[1] / name, chance)
    try:
        dataset = ShardDataset(prepared.index.uri, "train")
        for row in range(len(dataset)):
            dataset.read(row)
    except KubedetError as error:
        assert name in error.message
    prepared.again()
    if harm != "flip" or not name.endswith(".tar"):  # A flip between its samples costs nobody anything.
        assert contents(*prepared.folders) == before
