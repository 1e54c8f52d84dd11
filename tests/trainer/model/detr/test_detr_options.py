"""Options of D-FINE and RT-DETRv2: what does not fit is told before anything is fetched or trained."""

import subprocess
import sys

import pytest

from trainer.base.errors import ConfigError
from trainer.model import recipes

DFINE = {"model.architecture": "dfine"}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"model.size": "r50"}, r"model\.size: .*'n', 's', 'm', 'l' or 'x'.* not \"r50\""),
        (
            {"model.weights": "hf:ustc-community/dfine-xlarge-coco"},
            "hf:ustc-community/dfine-xlarge-coco are of model.architecture=dfine and model.size=x, not of "
            "dfine and s",
        ),
        (
            {"model.weights": "hf:PekingU/rtdetr_v2_r50vd"},
            "are of model.architecture=rtdetr and model.size=r50, not of dfine and s",
        ),
        (
            {"model.weights": "hf:ustc-community/dfine-small-coco", "model.width": 0.5},
            r"of the published width, not 0\.5 of it",
        ),
    ],
)
def test_what_does_not_fit_is_one_message(overrides, said):
    with pytest.raises(ConfigError, match=said):
        recipes.load("debug", {**DFINE, **overrides})


def test_weights_whose_name_tells_nothing_or_fits_are_taken():
    for weights in (
        "hf:ustc-community/dfine-small-obj2coco@main",
        "hf:me/mine",
        "s3://bucket/dfine-large-coco",
    ):
        assert recipes.load("debug", {**DFINE, "model.weights": weights}).model.weights == weights


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
