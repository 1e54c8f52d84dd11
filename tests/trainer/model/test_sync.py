"""A training step never waits for the device: no operation in it needs a value on the host."""

import dataclasses

import pytest
import torch
from waiting import Counter

from trainer.config import ModelConfig
from trainer.model.detector import build
from trainer.model.matching import PADDING
from trainer.optim import build_optimizer
from trainer.recipes import load

NARROW = ModelConfig(backbone="resnet18", backbone_width=16, fpn_channels=32, head_depth=1)
SIZE = 96


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
        (losses.classification + losses.boxes).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # anchors are built once, before
    with Counter() as counter:
        step()
    return counter


@pytest.mark.parametrize(
    ("version", "precision"), [("v1", torch.bfloat16), ("v2", torch.bfloat16), ("v2", torch.float16)]
)
def test_no_operation_waits(version, precision):
    config = dataclasses.replace(NARROW, version=version)
    counter = count(2, [3, 0], config, precision)
    assert counter.waiting == []
    assert counter.operations > 300


def test_the_number_of_operations_does_not_grow_with_the_batch():
    few, many = count(2, [3, 0]), count(12, [3, 9, 0])
    assert many.operations == few.operations


def test_the_counter_sees_what_waits():
    values = torch.rand(5)
    for wait in (lambda: values[values > 2], lambda: values.sum().item(), lambda: torch.tensor(1.0)):
        with Counter() as counter:
            wait()
        assert counter.waiting
