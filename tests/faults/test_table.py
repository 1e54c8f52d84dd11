"""The documented list of faults."""

import re
from pathlib import Path

from fault_table import FAULTS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "reliability.md").read_text()


def test_the_document_has_every_fault_with_its_promise_and_no_other():
    part = TEXT.partition("## Injected faults")[2]
    assert re.findall(r"^- (.*)", part, re.MULTILINE) == [": ".join(item) for item in FAULTS.values()]
    assert re.search(r"20\d\d-\d\d-\d\d", part.partition("\n- ")[0]), "figures have a date"
