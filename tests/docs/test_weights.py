"""What the page about weights, recipes and trackers says is what the program does."""

import re
import shlex
from pathlib import Path

import pytest

from pipelines import cli
from trainer.config.parsing import parse_overrides
from trainer.model import recipes
from trainer.trackers.experiment_tracking import END_SECONDS, RUN_IDS

TEXT = (Path(__file__).parents[2] / "docs" / "weights.md").read_text()
COMMANDS = re.findall(r"^(?:    )?(?:\w+=\S+ )*(kubedet .*)$", TEXT, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_can_be_given(command, capsys):
    words = shlex.split(command)[1:]
    if words[0] == "submit":  # All that it is given is looked at.
        assert cli.main([*words, "--dry-run"]) == 0
        return
    arguments = cli.make_parser().parse_args(words)
    if words[0] == "run":
        recipes.load(arguments.recipe or "debug", parse_overrides(arguments.overrides))


def test_its_recipes_are_those_with_a_figure_and_a_source():
    part = TEXT[TEXT.index("## Recipes to") : TEXT.index("## Trackers")]
    rows = re.findall(r"^\| `(\w+)` \| .*?\((https://\S+)\)", part, re.MULTILINE)
    assert dict(rows).keys() == {"coco_r50", "mlperf"}
    for name, source in rows:
        assert source in recipes.RECIPES[name].__doc__
        assert f"{recipes.load(name).train.global_batch}" in part
    assert f"square of {recipes.load('coco_r50').loader.image_size}" in part


def test_it_says_how_long_a_training_waits_for_trackers():
    assert (END_SECONDS["finished"], END_SECONDS["stopped"]) == (60, 5)
    assert "for a minute at most" in TEXT and "for five seconds" in TEXT and f"`{RUN_IDS}`" in TEXT
