"""Loading a model to score."""

import torch
from torch import nn
from torchvision.ops.misc import FrozenBatchNorm2d

from trainer.export import loading


def test_a_checkpoint_is_scored_folded(saved):
    model = loading.load(saved(), torch.device("cpu"))
    layers = list(model.predict.__self__.modules())
    assert not any(isinstance(layer, nn.BatchNorm2d | FrozenBatchNorm2d) for layer in layers)
    assert any(isinstance(layer, nn.Identity) for layer in layers)
