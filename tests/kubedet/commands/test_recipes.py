"""`kubedet weights fetch`, `recipes explain` and `job fields`."""

import io
import json
import re
from dataclasses import asdict

import pytest
import torch
from weights_server import weights_server

from components.launchers.spec import JobSpec
from kubedet import cli
from trainer.model import recipes

__all__ = ["weights_server"]

RESNET18 = "torchvision:ResNet18_Weights.IMAGENET1K_V1"


@pytest.fixture
def weights(capsys):
    def run(*words):
        code = cli.main(["weights", *map(str, words)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def recipe(weights_server, monkeypatch):
    """A recipe that starts from small weights which the server has."""
    buffer = io.BytesIO()
    torch.save({"conv1.weight": torch.zeros(2)}, buffer)
    weights_server.add_resnet18(buffer.getvalue(), monkeypatch)
    load = recipes.load
    monkeypatch.setitem(recipes.RECIPES, "mine", lambda: load("debug", {"model.weights": RESNET18}))
    return "mine"


def test_weights_of_a_recipe_are_fetched_once(weights, recipe, weights_server, tmp_path):
    code, out, _ = weights("fetch", recipe, "--data-root", tmp_path)
    assert code == 0 and out.startswith(f"{tmp_path}/weights") and RESNET18 in out
    requests = len(weights_server.requests)
    code, out, _ = weights("fetch", recipe, "--data-root", tmp_path, "--json")
    assert code == 0 and json.loads(out)[RESNET18]["name"].startswith("resnet18-")
    assert len(weights_server.requests) == requests


def test_what_cannot_be_fetched_is_one_message_and_code_2(weights, weights_server, tmp_path):
    code, _, said = weights("fetch", "torchvision:ResNet50_Weights.IMAGENET1K_V2", "--data-root", tmp_path)
    assert code == 2 and said.count("error:") == 1 and "resnet50-11ad3fa6.pth" in said
    assert "neither a recipe nor the name of published weights" in weights("fetch", "coco_r51")[2]


def leaves(tree, prefix=""):
    for name, value in tree.items():
        yield from leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name]


def test_every_key_of_a_recipe_has_a_meaning(kubedet):
    code, out, _ = kubedet("recipes", "explain", "--recipe", "debug")
    assert code == 0
    paragraphs = re.findall(r"^(\S+) = .*\n((?:    .+\n)+)", out, re.MULTILINE)
    assert [name for name, _ in paragraphs] == list(leaves(asdict(recipes.load("debug"))))


def test_every_field_of_a_job_has_a_meaning(kubedet):
    code, out, _ = kubedet("job", "fields")
    assert code == 0
    paragraphs = re.findall(r"^(\S+) = (.*)\n    (\S.*)", out, re.MULTILINE)
    assert len(paragraphs) == len(re.findall(r"^\S", out, re.MULTILINE))
    assert {name.partition(".")[0] for name, *_ in paragraphs} == set(JobSpec.__pydantic_fields__)
    out = kubedet("job", "fields", "SHARED_mem")[1]
    assert "shared_memory = 8Gi" in out and "nodes = " not in out
    assert kubedet("job", "fields", "zebra")[0] == 2
