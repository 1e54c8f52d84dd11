"""A training step never waits for the device: no operation in it needs a value on the host."""

import dataclasses

import pytest
import torch
from waiting import Counter

from trainer.data.batch import PADDING
from trainer.model.architecture import build
from trainer.model.recipes import load
from trainer.model.retinanet import focal
from trainer.model.retinanet.options import RetinaNetOptions
from trainer.training.optim import build_optimizer

NARROW = RetinaNetOptions(backbone="resnet18", backbone_width=16, fpn_channels=32, head_depth=1)
SIZE = 96


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Small maps have products in place of convolutions on a CPU only."""
    monkeypatch.setattr(focal, "products_pay", lambda gradient: False)


def count(images, counts, config=NARROW, precision=torch.bfloat16):
    torch.manual_seed(0)
    detector = build(config, 5).train()
    optimizer = build_optimizer(detector, dataclasses.replace(load("debug").train, optimizer="sgd"))
    pixels = torch.randint(0, 256, (images, 3, SIZE, SIZE), dtype=torch.uint8)
    boxes, labels = torch.zeros(images, max(counts), 4), torch.full((images, max(counts)), PADDING)
    for row in range(images):
        rows = counts[row % len(counts)]
        corner = torch.rand(rows, 2) * 50
        boxes[row, :rows] = torch.cat([corner, corner + 5 + torch.rand(rows, 2) * 40], dim=1)
        labels[row, :rows] = 1
    color = torch.eye(3, 4).repeat(images, 1, 1)

    def step():
        with torch.autocast("cpu", precision):
            losses = detector(pixels, boxes, labels, color)
        (losses["classification"] + losses["boxes"]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # anchors are built once, before
    with Counter() as counter:
        step()
    return counter


def test_the_number_of_operations_does_not_grow_with_the_batch():
    few, many = count(2, [3, 0]), count(12, [3, 9, 0])
    assert many.operations == few.operations and many.waiting == []
