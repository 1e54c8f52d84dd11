"""What the steps are compared with, and what becomes of one that the memory does not hold."""

import pytest
import torch

from benchmarks import common, step
from trainer.model.recipes import load

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("text", "case", "label"),
    [
        ("91:256", (91, 256, "", 0), "91_256px"),
        ("601:512@3", (601, 512, "", 3), "601_512px"),
        ("264:800:mlperf@2", (264, 800, "mlperf", 2), "264_800px_mlperf"),
    ],
)
def test_cases(text, case, label):
    assert step.parse(text) == case and step.parse(text).label == label


@pytest.mark.parametrize("recipe", ["coco_r50", "openimages_r50", "mlperf"])
def test_torchvision_has_the_network_of_a_recipe(recipe):
    ours = {
        name: tuple(value.shape)
        for name, value in step.TrainState(
            step.without_weights(load(recipe)), 4, step.World(0, 1, CPU)
        ).detector.named_parameters()
    }
    model = common.stock_model(4, 96, CPU, load(recipe).model)
    assert {name: tuple(value.shape) for name, value in model.named_parameters()} == ours
