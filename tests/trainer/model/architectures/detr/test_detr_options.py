"""Options of D-FINE and RT-DETRv2: what does not fit is told before anything is fetched or trained."""

import importlib.util
import subprocess
import sys

import pytest

from trainer import architectures, recipes
from trainer.errors import ConfigError

DFINE = {"model.architecture": "dfine"}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"loader.image_size": 650}, r"image_size: dfine takes multiples of 32, not 650; .* 640 and 672"),
        ({"export.formats": ["onnx", "raw"]}, "export.formats: dfine has no form raw"),
        ({"model.size": "r50"}, r"model\.size: .*'n', 's', 'm', 'l' or 'x'.* not \"r50\""),
        ({"model.width": 1.5}, r"model\.width: .* not 1\.5"),
        ({"model.backbone": "resnet50"}, "'model.backbone': it is one of the architecture"),
        (
            {"model.weights": "torchvision:ResNet50_Weights.IMAGENET1K_V2"},
            "torchvision:ResNet50_Weights.IMAGENET1K_V2 are weights of torchvision, not of dfine",
        ),
    ],
)
def test_what_does_not_fit_is_one_message(overrides, said):
    with pytest.raises(ConfigError, match=said):
        recipes.load("debug", {**DFINE, **overrides})


def test_without_the_extra_it_says_so_at_once(monkeypatch):
    find = importlib.util.find_spec
    absent = {"transformers"}
    monkeypatch.setattr(architectures, "find_spec", lambda name: (name not in absent and find(name)) or None)
    with pytest.raises(ConfigError, match=r"dfine needs the package transformers, .*not installed") as caught:
        architectures.require("dfine")
    assert "pip install 'kubedet[detr]'" in caught.value.fix


def test_the_trainer_reads_its_options_without_transformers():
    """Nor scipy nor torch: a step that only reads a configuration must not wait for them."""
    code = (
        "import sys; from trainer import recipes; "
        "config = recipes.load('debug', {'model.architecture': 'rtdetr', 'model.size': 'r18'}); "
        "assert config.model.size == 'r18'; "
        "print([name for name in ('transformers', 'scipy', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
