"""A training step never waits for the device: no operation in it needs a value on the host."""

import collections
import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from waiting import Counter

from trainer.data.batch import PADDING
from trainer.model import conv_gradients, focal
from trainer.model.architecture import build
from trainer.model.architectures.retinanet.retinanet_options import RetinaNetOptions
from trainer.model.focal import conv_focal_loss
from trainer.model.recipes import load
from trainer.training.optim import build_optimizer

NARROW = RetinaNetOptions(backbone="resnet18", backbone_width=16, fpn_channels=32, head_depth=1)
SIZE = 96


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Small maps have products in place of convolutions on a CPU only."""
    monkeypatch.setattr(conv_gradients, "products_pay", lambda gradient: False)


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
    assert many.operations == few.operations


class Named(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.count = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # A tensor without memory is asked for its device by way of an operation.
        self.count[str(func)] += func.namespace != "prim"
        return func(*args, **(kwargs or {}))


def operations_at_full_size(images, classes):
    """Of forward and backward pass of a batch at 800 px; nothing is computed."""
    with FakeTensorMode():
        detector = build(NARROW, classes).train()
        pixels = torch.zeros(images, 3, 800, 800, dtype=torch.uint8)
        boxes, labels = torch.rand(images, 8, 4), torch.zeros(images, 8, dtype=torch.int64)
        detector.anchors([(100, 100), (50, 50), (25, 25), (13, 13), (7, 7)], 800)
        with Named() as named:
            with torch.autocast("cpu", torch.bfloat16):
                losses = detector(pixels, boxes, labels)
            (losses["classification"] + losses["boxes"]).backward()
    return named.count


@pytest.fixture
def a_chunk(monkeypatch):
    """Operations of one more chunk of a level."""
    counts = []
    with monkeypatch.context() as patch:
        patch.setattr(focal, "CHUNK_BYTES", 1)
        for images in (2, 3):
            with FakeTensorMode():
                level = torch.zeros(images, 32, 5, 5, dtype=torch.bfloat16, requires_grad=True)
                weight = torch.zeros(90, 32, 3, 3, requires_grad=True)
                bias = torch.zeros(90, requires_grad=True)
                labels, weights = torch.zeros(images, 225, dtype=torch.int32), torch.zeros(images, 225)
                with Named() as named, torch.autocast("cpu", torch.bfloat16):
                    conv_focal_loss([level], weight, bias, [labels], [weights])
            counts.append(named.count)
    return counts[1] - counts[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("classes", "chunks"), [(91, {2: 3, 8: 3}), (91, {8: 3, 9: 4}), (600, {2: 2 + 1 + 1, 16: 16 + 4 + 2})]
)
def test_at_full_size_operations_grow_with_the_chunks_of_the_loss_and_nothing_else(classes, chunks, a_chunk):
    """Chunks of P3, of P4 and of the map of P5 to P7, for a number of images: what 128 MB of logits hold."""
    assert a_chunk["aten.convolution.default"] == a_chunk["aten.convolution_backward.default"] == 1
    assert a_chunk.total() < 85
    few, many = (operations_at_full_size(images, classes) for images in chunks)
    first, last = chunks.values()
    grown = {name: many[name] - few[name] for name in many | few if many[name] != few[name]}
    assert grown == {name: number * (last - first) for name, number in a_chunk.items() if last > first}
