"""Normalisation folded into convolutions: the same detections, and none of it left."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torchvision.ops.misc import FrozenBatchNorm2d

from trainer.model.architecture import build


def with_statistics(detector):
    """A detector whose layers do something: those of a new one keep all but leave it as it is."""
    generator = torch.Generator().manual_seed(1)
    for module in detector.modules():
        if isinstance(module, nn.BatchNorm2d | FrozenBatchNorm2d):
            for tensor, low in ((module.weight, 0.5), (module.bias, -0.2), (module.running_mean, -0.2),
                                (module.running_var, 0.5)):  # fmt: skip
                tensor.data = low + torch.rand(tensor.shape, generator=generator)
    return detector.eval()


@pytest.mark.parametrize("norm", ["batch", "frozen", "group"])
@pytest.mark.parametrize("backbone", ["resnet18", "resnet50"])
def test_outputs_stay_what_they_were(tiny, backbone, norm):
    torch.manual_seed(0)
    model = dataclasses.replace(tiny(model__backbone=backbone).model, norm=norm)
    detector = with_statistics(build(model, 5))
    images = detector.normalize(torch.randint(0, 256, (2, 3, 96, 96), dtype=torch.uint8))
    folded = copy.deepcopy(detector).folded()
    left = [m for m in folded.modules() if isinstance(m, nn.BatchNorm2d | FrozenBatchNorm2d)]
    assert not left and any(isinstance(m, nn.Identity) for m in folded.modules()) == (norm != "group")
    with torch.no_grad():
        for ours, expected in zip(folded.features(images), detector.features(images), strict=True):
            assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
