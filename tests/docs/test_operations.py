"""The guides say what is true: its examples, commands, paths and messages are the code's own."""

import argparse
import re
import shlex
import textwrap
from pathlib import Path

import pytest
import yaml

from components.launchers.spec import from_fields
from operations.tuning.space import parse
from pipelines import cli
from trainer.__main__ import _parser as trainer_parser
from trainer.data import sources
from trainer.evaluation import gate
from trainer.model import recipes

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", ROOT / "deploy" / "README.md", *(ROOT / "docs").glob("*.md"))
    if "kubedet " in path.read_text()
}


@pytest.mark.parametrize(
    "block", re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "networks.md").read_text(), re.DOTALL)
)
def test_examples_are_specifications(block):
    from_fields({"command": ["true"]} | yaml.safe_load(block))


def commands(parser, words=()):
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from commands(child, (*words, name))


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist_and_know_their_options(page):
    known = {words: parser for words, parser in commands(cli.make_parser()) if words}
    # In the text between backticks, or in a line of code.
    code = r"(?m)(?:`|^ {4,}(?:\w+=\S+ )?)kubedet ((?:[a-z]+ ?)+)([^`\n]*)"
    used = re.findall(code, re.sub(r" \\\n\s*", " ", PAGES[page]))
    assert used
    for names, rest in used:
        words = tuple(names.split())
        command = max((key for key in known if words[: len(key)] == key), key=len, default=None)
        assert command, f"there is no kubedet {names}"
        options = set(re.findall(r"(?<=\s)(--?[a-z][a-z-]*)", " " + rest.split(" -- ")[0]))
        assert options <= set(known[command]._option_string_actions), (command, options)


def test_the_tables_have_every_recipe_and_source():
    recipes_table = PAGES["docs/run.md"].partition("| recipe | for |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", recipes_table, re.MULTILINE)) == set(recipes.RECIPES)
    sources_table = PAGES["docs/data.md"].partition("| source |")[2].partition("\n\n")[0]
    kinds = set(re.findall(r"`(\w+)(?=[:`])", sources_table))
    assert kinds >= set(re.findall(r"^    (\w+)[: ]", sources.__doc__, re.MULTILINE)) - {"PATH"}


def test_every_rule_of_a_gate_can_be_read():
    rules = re.findall(r"^\| `([^`]+[<>]=?[^`]+)` \|", PAGES["docs/evaluation.md"], re.MULTILINE)
    assert len(rules) == 6
    for rule in rules:
        assert str(gate.parse(rule)) == rule


def test_the_steps_can_be_given():
    commands = re.findall(r"^    python -m trainer (.*)$", PAGES["docs/run.md"], re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        trainer_parser().parse_args(shlex.split(command))


def test_the_examples_of_a_search_can_be_used(tmp_path):
    blocks = re.findall(r"(?:^    .*\n)+", PAGES["docs/tuning.md"], re.MULTILINE)
    space, recipe = (textwrap.dedent(block) for block in blocks if "kubedet tune" not in block)
    file = tmp_path / "best.yaml"
    parse(space, "small", {}, "the example")
    file.write_text(recipe)
    assert recipes.named(str(file))[0] == "small"
