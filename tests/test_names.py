"""Names say what they hold: variables the domain's noun, modules something that no other module is called."""

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HIDING = {"found", "told", "there", "wanted", "asked", "made"}
"""Names of variables that hide what they hold."""
TRAINER = sorted((ROOT / "trainer").rglob("*.py"))
OTHERS = [
    path
    for name in ("components", "pipelines", "images", "benchmarks", "community", "docs")
    for path in sorted((ROOT / name).rglob("*.py"))
]
SINGLE = {"matching", "failures", "names", "change", "page", "pool", "table", "keys", "folding", "beside"}
"""Names that modules of trainer had without saying what is in them, some of them several."""


def variables(tree):
    """Names that a module assigns or takes as parameters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


@pytest.mark.parametrize("path", [*TRAINER, *OTHERS], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_variable_hides_what_it_holds(path):
    assert not HIDING & set(variables(ast.parse(path.read_text())))


def test_hidden_names_are_seen_wherever_they_are_bound():
    lines = ("found = 1", "for told in x: pass", "[made for made in x]", "def f(asked): pass", "(there := 1)")
    for line in lines:
        assert HIDING & set(variables(ast.parse(line))), line
    assert not HIDING & set(variables(ast.parse("f(found=1); x.told = 2")))


def test_modules_of_trainer_have_names_that_say_what_is_in_them():
    names = Counter(path.stem for path in TRAINER if path.parent.name != "storage")
    # `trainer.evaluation.coco` was asked for by this name, and a source of data is called so too.
    assert {name for name, count in names.items() if count > 1} <= {"__init__", "coco"}
    assert not SINGLE & names.keys()
