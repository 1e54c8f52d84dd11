"""The guides say what is true: its examples, commands, paths and messages are the code's own."""

import argparse
import re
import shlex
import textwrap
from pathlib import Path

import pytest
import yaml

from components.launchers import LAUNCHERS
from components.launchers.cluster.kinds import trainjob
from components.launchers.spec import Elastic, JobSpec, Spread, from_fields
from components.tuning import spaces
from pipelines import cli
from pipelines.commands.job_options import BACKENDS
from trainer.__main__ import _parser as trainer_parser
from trainer.data import sources
from trainer.model import recipes

ROOT = Path(__file__).parents[2]
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "docs/operations.md", "deploy/README.md")}
TEXT = PAGES["docs/operations.md"]


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL))
def test_examples_are_specifications(block):
    from_fields({"command": ["true"]} | yaml.safe_load(block))


def commands(parser, words=()):
    """Every command of the command line, with its parser."""
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


def headings(text):
    """The names by which a page's headings are linked to."""
    titles = re.findall("^##+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_and_paths_lead_somewhere(page):
    text, folder = PAGES[page], (ROOT / page).parent
    for target in re.findall(r"\]\(([^)]+)\)", text):
        file, _, heading = target.partition("#")
        assert not file or (folder / file).exists(), target
        assert not heading or heading in headings((folder / file).read_text() if file else text), target
    for path in re.findall(r"(?<![\w./])(?:deploy|images|components|docs)/[\w./-]+\w", text):
        assert (ROOT / path).exists(), path


OTHERS = {
    "backoff": 3, "elastic": Elastic(min_nodes=1, max_nodes=2), "image_pull_policy": "Always",
    "priority_class": "high", "restart_policy": "Never", "runai_queue": "team", "scheduler": "other",
    "spread": (Spread(),), "working_dir": "/tmp", "deadline": 60, "env": {"A": "b"}, "fs_group": 1, "gpus": 1,
    "grace_seconds": 5.0, "kueue_queue": "team", "nodes": 2, "service_account": "me", "suspend": True,
    "image_pull_secrets": ("a",), "labels": {"a": "b"}, "annotations": {"a": "b"}, "ttl": 1,
    "node_selector": {"a": "b"},
}  # fmt: skip
"""Fields of a job, and another value than the usual one."""


def test_the_fields_that_need_a_runtime_of_their_own_are_named():
    (described,) = re.findall(r"A job that sets one of (.*?), which a TrainJob cannot say", TEXT, re.DOTALL)
    need = {name for name, value in OTHERS.items() if not fits(**{name: value})}
    assert set(re.findall(r"`(\w+)`", described)) == need


def fits(**fields):
    return trainjob.fits_shared(JobSpec(command=("true",), name="a", image="i", **fields))


def test_every_launcher_and_backend_stands_in_the_table_of_job_kinds():
    table = TEXT.partition("| name | pipeline")[2].partition("\n\n")[0]
    named = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert set(named) == set(LAUNCHERS) | set(BACKENDS) - {"runai"}


def test_the_readme_names_every_recipe_and_source():
    recipes_table = PAGES["README.md"].partition("| recipe | for |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", recipes_table, re.MULTILINE)) == set(recipes.RECIPES)
    kinds = set(
        re.findall(r"`(\w+)(?=[:`])", PAGES["README.md"].partition("| source |")[2].partition("\n\n")[0])
    )
    assert kinds >= set(re.findall(r"^    (\w+)[: ]", sources.__doc__, re.MULTILINE)) - {"PATH"}


def test_the_readmes_steps_can_be_given():
    commands = re.findall(r"^    python -m trainer (.*)$", PAGES["README.md"], re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        trainer_parser().parse_args(shlex.split(command))


def test_the_examples_of_a_search_can_be_used(tmp_path):
    section = TEXT.split("### Search for hyper-parameters")[1].split("\n### ")[0]
    blocks = re.findall(r"(?:^    .*\n)+", section, re.MULTILINE)
    space, recipe = (textwrap.dedent(block) for block in blocks if "kubedet tune" not in block)
    file = tmp_path / "best.yaml"
    file.write_text(space)
    spaces.check(spaces.read(str(file)), "small", {}, "of the example")
    file.write_text(recipe)
    assert recipes.named(str(file))[0] == "small"
