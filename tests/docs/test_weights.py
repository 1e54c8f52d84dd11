"""What the page about weights, recipes and trackers says is what the program does."""

import re
import shlex
from pathlib import Path

import pytest

from pipelines import cli
from trainer import recipes
from trainer.configuration import parse_overrides
from trainer.trackers.experiment_tracking import END_SECONDS, RUN_IDS

TEXT = (Path(__file__).parents[2] / "docs" / "weights.md").read_text()
COMMANDS = re.findall(r"^    (?:\w+=\S+ )*(kubedet .*)$", TEXT, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_can_be_given(command, capsys):
    words = shlex.split(command)[1:]
    if words[0] == "submit":  # All that it is given is looked at.
        assert cli.main([*words, "--dry-run"]) == 0
        return
    arguments = cli.make_parser().parse_args(words)
    if words[0] == "run":
        recipes.load(arguments.recipe or "debug", parse_overrides(arguments.overrides))


def test_it_says_how_long_a_training_waits_for_trackers():
    assert (END_SECONDS["finished"], END_SECONDS["stopped"]) == (60, 5)
    assert "for a minute at most" in TEXT and "for five seconds" in TEXT and f"`{RUN_IDS}`" in TEXT
