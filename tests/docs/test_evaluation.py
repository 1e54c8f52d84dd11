"""What the page about evaluation says is what the program does."""

import re
from pathlib import Path

from trainer.evaluation import gate

TEXT = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()


def test_every_rule_can_be_read():
    rules = re.findall(r"^\| `([^`]+[<>]=?[^`]+)` \|", TEXT, re.MULTILINE)
    assert len(rules) == 6
    for rule in rules:
        assert str(gate.parse(rule)) == rule
