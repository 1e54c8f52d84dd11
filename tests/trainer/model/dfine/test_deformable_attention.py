"""Deformable attention on a CPU against transformers'."""

import torch
from transformers.models.d_fine.modeling_d_fine import multi_scale_deformable_attention_v2

from trainer.model.dfine.deformable_attention import sample_features


def test_samples_and_gradients_are_transformers():
    torch.manual_seed(0)
    shapes, points = [(4, 5), (2, 3)], [2, 3]
    value = torch.randn(2, 26, 3, 4, dtype=torch.float64, requires_grad=True)
    # Some are outside of the image.
    locations = (torch.rand(2, 7, 3, 5, 2, dtype=torch.float64) * 1.4 - 0.2).requires_grad_()
    attention = torch.rand(2, 7, 3, 5, dtype=torch.float64, requires_grad=True)
    inputs = value, locations, attention
    ours = sample_features(value, shapes, locations, attention, points)
    theirs = multi_scale_deformable_attention_v2(value, shapes, locations, attention, points)
    gradient = torch.randn_like(theirs)
    torch.testing.assert_close(ours, theirs)
    for one, expected in zip(
        torch.autograd.grad(ours, inputs, gradient),
        torch.autograd.grad(theirs, inputs, gradient),
        strict=True,
    ):
        torch.testing.assert_close(one, expected)
