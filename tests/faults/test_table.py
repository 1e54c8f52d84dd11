"""The documented table of faults."""

import re
from pathlib import Path

from fault_table import FAULTS, STAGES, table

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "reliability.md").read_text()


def test_the_document_has_every_fault_with_its_promise_and_no_other():
    begin = TEXT.index(table({}).partition("\n")[0])
    rows = [line.split(" | ") for line in TEXT[begin:].partition("\n\n")[0].splitlines()[2:]]
    assert [(row[0].removeprefix("| "), row[1]) for row in rows] == list(FAULTS.values())
    assert all(len(row) == 2 + len(STAGES) for row in rows)
    assert not re.search(r"failed|not run", TEXT[begin:].partition("\n\n")[0])
    assert re.search(r"20\d\d-\d\d-\d\d", TEXT[:begin].rpartition("## ")[2]), "figures have a date"
