"""The first weights: gradients reach every layer, and nothing is found before anything is learnt."""

import math

import pytest
import torch
from torch import nn

from trainer.model.architecture import build
from trainer.model.architectures.detr.detr_options import DFineOptions, RTDetrOptions

SMALL = {
    "dfine": DFineOptions(size="n", width=0.5, queries=30, denoising=20),
    "rtdetr": RTDetrOptions(size="r18", width=0.25, queries=30, denoising=20),
}


@pytest.fixture(params=SMALL)
def fresh(request):
    """A detector as a training from scratch begins with it."""
    torch.manual_seed(0)
    return build(SMALL[request.param], 3).train()


def linear(detector):
    return {
        name: module
        for name, module in detector.model.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith("backbone")
    }


def test_layers_pass_on_what_they_get(fresh):
    """transformers' deviation of 0.01 would make each of them a tenth as loud as its input."""
    zero = []
    for name, layer in linear(fresh).items():
        draw = torch.randn(2000, layer.in_features)
        with torch.no_grad():
            loudness = (nn.functional.linear(draw, layer.weight)).std().item()
        if loudness == 0:
            zero.append(name)
        else:
            assert 0.2 < loudness < 2.5, (name, loudness)
    # What leaves boxes and scores as they are at first, and what transformers makes so as well.
    ends = ("sampling_offsets", "attention_weights", "gate")
    heads = {name for name in zero if not name.endswith(ends)}
    assert heads and all("bbox" in name or "reg_conf" in name for name in heads)


def test_nothing_is_found_and_boxes_are_those_of_their_places(fresh, batch):
    sample = batch([3, 1])
    with torch.no_grad():
        outputs = fresh.outputs(fresh.normalize(sample.images), None)
    for logits in (outputs.logits, outputs.encoder_logits):
        assert logits.mean().item() == pytest.approx(-math.log(99), abs=0.7)
    # Places of the finest level are a twentieth, of the next a tenth, of one after it a fifth.
    sides = outputs.encoder_boxes[..., 2:]
    assert all(min(abs(side - size) for size in (0.05, 0.1, 0.2)) < 1e-4 for side in sides.flatten().tolist())
