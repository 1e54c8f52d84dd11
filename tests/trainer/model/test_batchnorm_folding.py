"""Normalization as a part of convolutions, for good and anew at each call: the same function."""

import copy

import pytest
import torch
from torch import nn
from torchvision.models import resnet18, resnext50_32x4d
from torchvision.ops.misc import FrozenBatchNorm2d

from trainer.model.architecture import build
from trainer.model.batchnorm_folding import TORCHVISION_PAIRS, ConvNorm2d, apply_in_convolutions
from trainer.model.dfine.options import DFineOptions, RTDetrOptions
from trainer.model.retinanet.options import RetinaNetOptions


def with_statistics(detector):
    """A detector whose layers do something: those of a new one keep all but leave it as it is."""
    generator = torch.Generator().manual_seed(1)
    for module in detector.modules():
        if isinstance(module, nn.BatchNorm2d | FrozenBatchNorm2d):
            for tensor, low in (
                (module.weight, 0.5),
                (module.bias, -0.2),
                (module.running_mean, -0.2),
                (module.running_var, 0.5),
            ):
                tensor.data = low + torch.rand(tensor.shape, generator=generator)
    return detector.eval()


@pytest.mark.parametrize(
    "options",
    [
        *(
            RetinaNetOptions(backbone=backbone, norm=norm, backbone_width=16, fpn_channels=16, head_depth=1)
            for backbone, norm in (("resnet50", "batch"), ("resnet18", "frozen"), ("resnet18", "group"))
        ),
        DFineOptions(size="n", width=0.25, frozen_norm=True),
        RTDetrOptions(size="r18", width=0.25),
    ],
)
def test_outputs_stay_what_they_were(options):
    torch.manual_seed(0)
    detector = with_statistics(build(options, 5))
    images = detector.normalize(torch.randint(0, 256, (2, 3, 96, 96), dtype=torch.uint8))
    folded = copy.deepcopy(detector).fold_batchnorm()
    has_batchnorm = getattr(options, "norm", "batch") != "group"
    assert not any(isinstance(m, nn.BatchNorm2d | FrozenBatchNorm2d) for m in folded.modules())
    assert any(isinstance(m, nn.Identity) for m in folded.modules()) == has_batchnorm
    with torch.no_grad():
        for ours, expected in zip(folded.features(images), detector.features(images), strict=True):
            assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.fixture(params=[resnet18, resnext50_32x4d])
def both(request):
    """torchvision's network with fixed statistics, and the same with them in its convolutions; fp64."""
    torch.manual_seed(0)
    theirs = with_statistics(request.param(norm_layer=FrozenBatchNorm2d)).double()
    ours = copy.deepcopy(theirs)
    apply_in_convolutions(ours, (FrozenBatchNorm2d,), TORCHVISION_PAIRS)
    return theirs, ours


@pytest.fixture
def pixels():
    return torch.rand(2, 3, 64, 64, dtype=torch.float64)


@pytest.mark.slow
def test_applied_anew_outputs_gradients_and_names_are_those_of_torchvision(both, pixels):
    for network in both:
        network(pixels).square().sum().backward()
    theirs, ours = both
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    assert [name for name, _ in theirs.named_parameters()] == [name for name, _ in ours.named_parameters()]
    torch.testing.assert_close(ours(pixels), theirs(pixels), rtol=1e-9, atol=1e-9)
    for (name, parameter), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-8, atol=1e-8, msg=name)


def test_applied_anew_they_are_the_present_ones_of_this_copy(both, pixels):
    theirs, ours = both
    changed, before = copy.deepcopy(ours), ours(pixels)
    for network in (theirs, changed):
        for name, buffer in network.named_buffers():
            if name.endswith("running_var"):
                buffer.mul_(4)
    torch.testing.assert_close(changed(pixels), theirs(pixels), rtol=1e-9, atol=1e-9)
    assert torch.equal(ours(pixels), before)
    loaded = copy.deepcopy(ours)
    loaded.load_state_dict(theirs.state_dict())
    assert torch.equal(loaded(pixels), changed(pixels))


def test_applied_anew_they_can_be_compiled_and_exported(pixels):
    ours = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), FrozenBatchNorm2d(4)).double()
    apply_in_convolutions(ours, (FrozenBatchNorm2d,), TORCHVISION_PAIRS)
    assert isinstance(ours[0], ConvNorm2d)
    expected = ours(pixels)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)(pixels)
    exported = torch.export.export(ours, (pixels,)).module()(pixels)
    torch.testing.assert_close(compiled, expected)
    torch.testing.assert_close(exported, expected)


def test_a_convolution_with_a_bias_is_left_to_its_layer():
    body = nn.Sequential(nn.Conv2d(3, 4, 3), FrozenBatchNorm2d(4))
    apply_in_convolutions(body, (FrozenBatchNorm2d,), TORCHVISION_PAIRS)
    assert not isinstance(body[0], ConvNorm2d) and type(body[1]) is FrozenBatchNorm2d
