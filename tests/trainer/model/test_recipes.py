"""What recipes promise of themselves."""

import subprocess
import sys

import pytest

from trainer.base.errors import ConfigError
from trainer.evaluation import gate
from trainer.model import recipes

OWN = ["small", "small_pretrained", "finetune", "dfine_small", "dfine_finetune"]


@pytest.mark.parametrize("name", OWN)
def test_the_gate_of_recipes_for_own_sets_holds_a_model_back_that_finds_nothing(name):
    rules = recipes.load(name).evaluation.gate
    assert not gate.decide(gate.Evidence({"coco/AP": 0.0, "coco/AP50": 0.0}), rules).passed
    assert gate.decide(gate.Evidence({"coco/AP": 0.1, "coco/AP50": 0.2}), rules).passed


def test_a_file_stands_for_a_recipe_and_overrides(tmp_path):
    file = tmp_path / "best.yaml"
    overrides = {"train.lr": 1e-05, "loader.scale": [0.9, 1.0], "train.epochs": 3}
    file.write_text(recipes.format_recipe_file("debug", overrides))
    assert recipes.read_recipe(str(file)) == ("debug", overrides)
    assert recipes.read_recipe("debug") == ("debug", {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("recipe: [", "not YAML"),
        ("- debug", "not a recipe file"),
        ("set: {train.lr: 0.1}", "not a recipe file"),
        ("recipe: debug\nsets: {}", "not a recipe file"),
        ("recipe: debug\nset: [1]", "not a recipe file"),
        ("recipe: debug\nset: {train.rate: 1}", "no key 'train.rate'"),
        ("recipe: best", "unknown recipe 'best'"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path, text, said):
    file = tmp_path / "best.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        recipes.read_recipe(str(file))


def test_the_trainer_reads_its_options_without_transformers():
    """Nor scipy nor torch: a step that only reads a configuration must not wait for them."""
    code = (
        "import sys; from trainer.model import recipes; "
        "config = recipes.load('debug', {'model.architecture': 'rtdetr', 'model.size': 'r18'}); "
        "assert config.model.size == 'r18'; "
        "print([name for name in ('transformers', 'scipy', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
