"""What is replaced in transformers' networks: the same results, and 16 bits where 16 do."""

import contextlib

import pytest
import torch
from torch import nn
from transformers.models.hgnet_v2.modeling_hgnet_v2 import HGNetV2LearnableAffineBlock

from trainer.model.detr.modules import DepthwiseConv2d


@pytest.fixture
def both(network, request):
    """The backbone as it is in transformers, and as it is trained; fp64, with statistics of its own."""
    architecture, options = request.param
    ours = network(architecture, **options).double().train()
    draw = torch.Generator().manual_seed(3)
    for name, buffer in ours.model.backbone.named_buffers():
        if buffer.is_floating_point():
            low = 0.5 if name.endswith(("weight", "running_var")) else -0.3
            buffer.copy_(low + torch.rand(buffer.shape, generator=draw))
    theirs = ours.upstream(ours.library_config).model.double().train()
    theirs.load_state_dict(ours.model.state_dict())
    return theirs.backbone.model, ours.model.backbone.model


BACKBONES = [
    ("dfine", {"size": "n"}),
    ("dfine", {"size": "n", "frozen_norm": True}),
    ("rtdetr", {"size": "r18", "frozen_norm": True}),
]


@pytest.mark.parametrize("both", BACKBONES, indirect=True)
def test_features_and_gradients_are_those_of_transformers(both):
    pixels = torch.rand(2, 3, 64, 64, dtype=torch.float64)
    levels = []
    for network in both:
        levels.append(network(pixels).feature_maps)
        sum(level.square().sum() for level in levels[-1]).backward()
    for expected, level in zip(*levels, strict=True):
        torch.testing.assert_close(level, expected, rtol=1e-8, atol=1e-8)
    theirs, ours = both
    # That of a shift in front of a BatchNorm is nothing but rounding.
    largest = max(parameter.grad.abs().max().item() for parameter in theirs.parameters())
    for (name, parameter), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-6, atol=1e-10 * largest, msg=name)


@pytest.mark.parametrize(("architecture", "size"), [("dfine", "n"), ("deimv2", "n")])
def test_strided_depthwise_convolutions_of_encoders_are_fast_on_a_cpu_too(network, architecture, size):
    convolutions = [
        (name, module)
        for name, module in network(architecture, size=size).named_modules()
        if isinstance(module, nn.Conv2d) and module.groups > 1 and max(module.stride) > 1
    ]
    assert any(".encoder.downsample" in name for name, _ in convolutions)
    assert all(isinstance(module, DepthwiseConv2d) for _, module in convolutions)


@pytest.mark.parametrize("both", BACKBONES, indirect=True)
def test_under_autocast_all_in_the_backbone_has_16_bits(both):
    pixels = torch.rand(2, 3, 64, 64)
    kinds = []
    for network in both:
        seen = set()
        for module in network.float().modules():
            module.register_forward_hook(
                lambda module, inputs, output, seen=seen: (
                    seen.add(output.dtype) if isinstance(output, torch.Tensor) else None
                )
            )
        with torch.autocast("cpu", torch.bfloat16):
            network(pixels)
        kinds.append(seen)
    theirs, ours = kinds
    assert ours == {torch.bfloat16}
    assert torch.float32 in theirs


def test_one_scale_and_shift_are_rounded_once(network):
    block = next(m for m in network("dfine").modules() if isinstance(m, HGNetV2LearnableAffineBlock))
    block.scale.data.fill_(1.25)
    block.bias.data.fill_(-0.5)
    values = torch.randn(1000).to(torch.bfloat16)
    assert torch.equal(block(values), (values.float() * 1.25 - 0.5).to(torch.bfloat16))


@pytest.mark.parametrize("options", [{}, {"frozen_norm": True, "frozen_stem": True}])
def test_weights_cast_together_train_like_weights_that_autocast_casts(network, batch, monkeypatch, options):
    detector, sample = network("dfine", **options).train(), batch([2, 1])
    results = []
    for _ in range(2):
        detector.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            losses = detector(sample.images, sample.boxes, sample.labels, context=sample.context())
        sum(losses.values()).backward()
        results.append({name: value.grad for name, value in detector.named_parameters()})
        monkeypatch.setattr(
            "trainer.model.detr.detector.cast_weights_together", lambda *ignored: contextlib.nullcontext()
        )
    assert results[0].keys() == results[1].keys()
    for name, ours in results[0].items():
        torch.testing.assert_close(ours, results[1][name])
    assert "weight" not in detector.model.enc_score_head.__dict__
