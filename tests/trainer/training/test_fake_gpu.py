"""A GPU's step without a GPU: torch follows the devices of tensors that have no memory.

What is shown: no tensor of the host meets one of the device, nothing is copied between them, and no
operation that would wait is dispatched. The backward pass needs a real device; of ours, the focal
loss computes its gradients in the forward pass.
"""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from waiting import Counter

from trainer.model.architecture import build
from trainer.model.retinanet.options import RetinaNetOptions
from trainer.training import step

GPU = torch.device("cuda", 0)
NARROW = RetinaNetOptions(backbone="resnet18", backbone_width=16, fpn_channels=32, head_depth=1)


class Crossings(TorchDispatchMode):
    """Notes operations whose tensors lie on more than one device: copies from one to the other."""

    def __init__(self):
        super().__init__()
        self.synchronizations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs, result)) if torch.is_tensor(x)]
        if len({tensor.device.type for tensor in tensors}) > 1:
            self.synchronizations.append(str(func))
        return result


@pytest.fixture
def fake(monkeypatch):
    """Everything is made on a device that is not there."""
    # Else autocast for a GPU is left out where there is none.
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(step, "copy_to_host", lambda values: lambda: values)
    with FakeTensorMode() as mode, torch.device(GPU):
        yield mode


def batch(images):
    pixels = torch.zeros(images, 3, 800, 800, dtype=torch.uint8)
    return pixels, torch.rand(images, 8, 4), torch.zeros(images, 8).long(), torch.rand(images, 3, 4)


@pytest.mark.slow
@pytest.mark.parametrize(("version", "precision"), [("v1", torch.float16), ("v2", torch.bfloat16)])
@pytest.mark.usefixtures("fake")
def test_a_forward_pass_stays_on_the_device(version, precision):
    detector = build(dataclasses.replace(NARROW, version=version), 601).train()
    images = batch(4)
    with torch.autocast("cuda", precision):
        detector(*images)  # anchors are built once, before
        with Crossings() as crossings, Counter() as counter:
            losses = detector(*images)
    assert all(loss.device == GPU and loss.requires_grad for loss in losses.values())
    assert crossings.synchronizations == [] and counter.waiting == [] and counter.operations > 200
