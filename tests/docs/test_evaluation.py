"""What the page about evaluation says is what the program does."""

import dataclasses
import re
import shlex
from pathlib import Path

from pipelines import cli
from trainer.config.schema import EvaluationConfig, ExportConfig
from trainer.evaluation import gate

TEXT = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()


def test_every_rule_can_be_read():
    rules = re.findall(r"^\| `([^`]+[<>]=?[^`]+)` \|", TEXT, re.MULTILINE)
    assert len(rules) == 6
    for rule in rules:
        assert str(gate.parse(rule)) == rule


def test_every_command_can_be_given():
    commands = re.findall(r"^    kubedet ((?:.*\\\n)*.*)", TEXT, re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        options = cli.make_parser().parse_args(shlex.split(command.replace("\\\n", " ")))
        for rule in gate.split_rules(getattr(options, "gate", "")):
            gate.parse(rule)


def test_every_key_is_one():
    sections = {"evaluation": EvaluationConfig, "export": ExportConfig}
    keys = re.findall(r"`(evaluation|export)\.([a-z_]+)", TEXT)
    assert len(keys) >= 6
    for section, key in keys:
        assert key in {field.name for field in dataclasses.fields(sections[section])}, key
