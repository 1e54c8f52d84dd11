"""Gradients of a convolution with many outputs, whichever way they are computed."""

import itertools

import pytest
import torch

from trainer.model import focal


def case(outputs, height, width, dtype):
    """A gradient of the output, an input and a kernel, as channels_last."""
    generator = torch.Generator().manual_seed(outputs)
    shapes = (2, outputs, height, width), (2, 6, height, width), (outputs, 6, 3, 3)
    return [
        torch.randn(shape, generator=generator).to(dtype, memory_format=torch.channels_last)
        for shape in shapes
    ]


def by_autograd(gradient, features, kernel):
    bias = torch.zeros(len(kernel), dtype=kernel.dtype)
    leaves = [part.clone().requires_grad_() for part in (features, kernel, bias)]
    output = torch.nn.functional.conv2d(*leaves, padding=1)
    return torch.autograd.grad(output, leaves, gradient)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 2), (5, 3), (16, 16)])
@pytest.mark.parametrize("output_mask", list(itertools.product([False, True], repeat=3)))
def test_equal_to_autograd(height, width, output_mask):
    """The largest map has more places than the products are for, the others fewer."""
    tensors = case(40, height, width, torch.float64)
    gradients = focal.conv_backward(*tensors, list(output_mask))
    for computed, one, other in zip(output_mask, gradients, by_autograd(*tensors), strict=True):
        assert not computed or torch.allclose(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("places", "by_products"), [((8, 5), True), ((9, 5), False)])
def test_the_way_is_chosen_by_the_places_of_the_map(places, by_products, monkeypatch):
    calls, products = [], focal.by_products
    monkeypatch.setattr(focal, "by_products", lambda *given: calls.append(1) or products(*given))
    focal.conv_backward(*case(40, *places, torch.float32), [True] * 3)
    assert bool(calls) == by_products


def test_in_bf16_it_is_as_exact_as_the_type():
    tensors = case(64, 4, 4, torch.bfloat16)
    gradients = focal.conv_backward(*tensors, [True] * 3)
    for one, other in zip(gradients, by_autograd(*(part.double() for part in tensors)), strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - other).norm() < 0.004 * other.norm()


def test_what_comes_back_lies_as_the_weights_and_features_do():
    """Else the sum over chunks and the features' own gradient would need another pass over memory."""
    of_features, of_kernel, _ = focal.conv_backward(*case(64, 4, 4, torch.bfloat16), [True] * 3)
    assert of_features.is_contiguous(memory_format=torch.channels_last)
    assert of_kernel.is_contiguous(memory_format=torch.channels_last)
