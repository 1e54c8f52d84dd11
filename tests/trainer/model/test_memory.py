"""The memory of a training step at full size, on tensors that have none: nothing is computed.

Counted are tensors, besides weights and their gradients. Not counted is what libraries take for themselves
while they compute (cuDNN's workspace), nor what an allocator cannot use.
"""

import dataclasses
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.model.architecture import build
from trainer.model.detr.criterion import costs
from trainer.model.retinanet import focal
from trainer.model.retinanet.options import RetinaNetOptions

LIMIT = 1.1e9
"""Bytes an image, in bf16 at 800x800."""
SHAPES = [(100, 100), (50, 50), (25, 25), (13, 13), (7, 7)]


def step(classes, images, device, options=None):
    """The detector, and a forward pass of it that is still to be run."""
    detector = build(options or RetinaNetOptions(), classes).train()
    detector.anchors(SHAPES, 800)
    pixels = torch.zeros(images, 3, 800, 800, dtype=torch.uint8)
    boxes, labels = torch.rand(images, 8, 4), torch.zeros(images, 8, dtype=torch.int64)

    def forward():
        with torch.autocast(device, torch.bfloat16):
            losses = detector(pixels, boxes, labels)
        return losses["classification"] + losses["boxes"]

    return detector, forward


@pytest.fixture
def pretended_gpu(monkeypatch):
    """Else torch leaves a GPU's autocast out where there is none."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)


class Live(TorchDispatchMode):
    """Follows the bytes of all tensors that operations make, until they are gone."""

    def __init__(self, apart):
        """Begin with nothing; `apart` are tensors that are not counted."""
        super().__init__()
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in apart}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage):
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key):
        self.now -= self._sizes.pop(key)


@dataclasses.dataclass
class Memory:
    """Bytes of a step."""

    peak: int
    after_forward: int
    after_backward: int


NORMALIZE = functional.group_norm


def normalize_as_on_a_gpu(values, *arguments, **options):
    """Autocast for a GPU has GroupNorm in fp32, that for a CPU in bf16."""
    with torch.autocast("cpu", enabled=False):
        return NORMALIZE(values.float(), *arguments, **options)


def loss_in_one_kernel(logits, labels, weights, verified):
    """Compiled, the focal loss takes memory for nothing but what it returns."""
    return torch.empty(len(logits))


@pytest.fixture
def memory_of(monkeypatch):
    """Memory of a step of so many classes and images on a GPU, counted on a CPU: autograd wants it real."""

    def measure(classes, images, options=None):
        with FakeTensorMode(), monkeypatch.context() as patch:
            patch.setattr(functional, "group_norm", normalize_as_on_a_gpu)
            patch.setattr(focal, "focal_and_gradient_", loss_in_one_kernel)
            detector, forward = step(classes, images, "cpu", options)
            trained = [parameter for parameter in detector.parameters() if parameter.requires_grad]
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
            with Live([*detector.parameters(), *(parameter.grad for parameter in trained)]) as live:
                loss = forward()
                after_forward = live.now
                loss.backward()
                del loss
            return Memory(live.peak, after_forward, live.now)

    return measure


@pytest.mark.slow
@pytest.mark.usefixtures("pretended_gpu")
def test_a_step_takes_at_most_what_is_said_for_each_image(memory_of):
    two, many = memory_of(601, 2), memory_of(601, 16)
    assert max(two.peak / 2, many.peak / 16) < LIMIT
    assert many.peak / 16 < 0.95e9
    assert two.after_forward < two.peak and two.after_backward < 0.01e9
    # No logits are kept: 5400 of them at each place would be another sixth.
    kept = (many.after_forward - two.after_forward) / 14
    few = (memory_of(91, 4).after_forward - memory_of(91, 2).after_forward) / 2
    assert 0.5e9 < kept < 0.9e9 and kept < few * 1.01


@pytest.mark.parametrize(("sets", "limit"), [(8, 0.3e9), (13 * 4, 0.8e9)])
def test_costs_of_many_targets_fit_into_memory(sets, limit):
    """16 images with 300 targets each: D-FINE with six layers, and RF-DETR with 13 groups of three layers."""
    with FakeTensorMode(), Live([]) as live:
        logits, boxes = torch.empty(16, sets, 300, 80), torch.empty(16, sets, 300, 4)
        targets, labels = torch.empty(16, 304, 4), torch.empty(16, 304, dtype=torch.int64)
        given = live.now
        values = costs(logits.requires_grad_(), boxes.requires_grad_(), targets, labels)
    assert live.peak - given < limit and not values.requires_grad
