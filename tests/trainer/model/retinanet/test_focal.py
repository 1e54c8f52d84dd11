"""The focal loss and its hand-written gradient: against torchvision, finite differences and itself."""

import itertools

import pytest
import torch
from torch import nn
from torchvision.ops import sigmoid_focal_loss

from trainer.model.retinanet import focal
from trainer.model.retinanet.focal import BACKGROUND, IGNORED, conv_focal_loss, focal_loss, supports_autocast


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def labels_for(rows, classes):
    return torch.randint(-2, classes, (rows,), dtype=torch.int32)


def torchvision_loss(logits, labels, weights):
    valid, positive = labels != IGNORED, labels >= 0
    target = torch.zeros_like(logits)
    target[positive, labels[positive].long()] = 1
    each = sigmoid_focal_loss(logits[valid], target[valid], reduction="none").sum(dim=1)
    return (each * weights[valid]).sum()


@pytest.mark.parametrize("classes", [1, 91, 264, 601])
def test_equal_to_torchvision(classes):
    logits = (torch.randn(120, classes) * 4).requires_grad_()
    labels, weights = labels_for(120, classes), torch.rand(120)
    loss = focal_loss(logits, labels, weights)
    expected = torchvision_loss(logits, labels, weights)
    assert torch.allclose(loss, expected, rtol=1e-5)
    (ours,), (theirs,) = (torch.autograd.grad(value * 3, logits) for value in (loss, expected))
    assert (ours - theirs).norm() < 1e-5 * theirs.norm()
    assert (ours[labels == IGNORED] == 0).all()


def test_small_losses_keep_their_relative_precision():
    # Where the head starts, at p = 0.01 and below, the loss is a sum of very many tiny terms.
    logits = torch.linspace(-16, 16, 4001)[:, None].requires_grad_()
    double = logits.detach().double().requires_grad_()
    for label in (BACKGROUND, 0):
        labels = torch.full((4001,), label, dtype=torch.int32)
        (ours,) = torch.autograd.grad(focal_loss(logits, labels, torch.ones(4001)), logits)
        (exact,) = torch.autograd.grad(torchvision_loss(double, labels, torch.ones(4001)), double)
        assert ((ours - exact) / exact).abs().max() < 2e-5
        values = focal.focal_and_gradient_(double.detach().float(), labels, torch.ones(4001))
        reference = sigmoid_focal_loss(double.detach(), (labels[:, None] >= 0).double())[:, 0]
        assert ((values - reference) / reference).abs().max() < 2e-5


@pytest.mark.parametrize("logit", [-200.0, -30.0, 0.0, 30.0, 200.0])
def test_finite_at_extremes(logit):
    logits = torch.full((3, 2), logit, requires_grad=True)
    loss = focal_loss(logits, torch.tensor([0, BACKGROUND, IGNORED], dtype=torch.int32), torch.ones(3))
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logits.grad).all()
    assert (logits.grad[2] == 0).all()


def test_half_precision_keeps_gradients_that_the_loss_scale_lifts():
    logits = torch.full((4, 3), -7.0, dtype=torch.float16, requires_grad=True)
    labels = torch.full((4,), BACKGROUND, dtype=torch.int32)
    (focal_loss(logits, labels, torch.full((4,), 1e-3)) * 2.0**16).backward()
    assert (logits.grad > 0).all()


def head_case(classes=4, images=3):
    last = nn.Conv2d(8, 2 * classes, 3, padding=1)
    nn.init.normal_(last.weight, std=0.2)
    levels = [torch.randn(images, 8, side, side + 1, requires_grad=True) for side in (6, 3, 1)]
    labels = [labels_for(images * x[0, 0].numel() * 2, classes).view(images, -1) for x in levels]
    weights = [torch.rand(part.shape) for part in labels]
    return last, levels, labels, weights


def test_nothing_of_the_size_of_the_logits_is_kept(monkeypatch):
    monkeypatch.setattr(focal, "CHUNK_BYTES", 1)
    last, levels, labels, weights = head_case(classes=50)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()), lambda x: x):
        conv_focal_loss(levels, last.weight, last.bias, labels, weights)
    logits = sum(part.numel() for part in labels) * 50
    assert sum(kept) - last.weight.numel() < logits / 10


def test_autocast_decides_the_arithmetic_and_the_form():
    last, levels, labels, weights = head_case()
    exact = conv_focal_loss(levels, last.weight, last.bias, labels, weights)
    with torch.autocast("cpu", torch.bfloat16):
        assert supports_autocast(exact.device)
        rounded = conv_focal_loss(levels, last.weight, last.bias, labels, weights)
    rounded.backward()
    assert rounded.dtype == last.weight.grad.dtype == torch.float32
    assert rounded != exact and torch.allclose(rounded, exact, rtol=0.02)
    with torch.autocast("cpu", torch.float16):
        assert not supports_autocast(exact.device)


@pytest.mark.parametrize("chunk_bytes", [1, 2000, 10**9])
@pytest.mark.parametrize("shapes", [[(6, 7), (3, 4), (1, 2)], [(9, 4), (5, 7), (3, 2), (2, 1), (1, 1)]])
def test_convolution_and_loss_in_chunks(shapes, chunk_bytes, monkeypatch):
    monkeypatch.setattr(focal, "CHUNK_BYTES", chunk_bytes)
    last = nn.Conv2d(6, 2 * 4, 3, padding=1)
    levels = [torch.randn(3, 6, *shape, requires_grad=True) for shape in shapes]
    labels = [torch.randint(-2, 4, (3, height * width * 2), dtype=torch.int32) for height, width in shapes]
    weights = [torch.rand(part.shape) for part in labels]
    loss = conv_focal_loss(levels, last.weight, last.bias, labels, weights)
    expected = 0
    for level, names, factors in zip(levels, labels, weights, strict=True):
        rows = last(level).permute(0, 2, 3, 1).reshape(names.numel(), -1)
        expected = expected + torchvision_loss(rows, names.flatten(), factors.flatten())
    assert torch.allclose(loss, expected, rtol=1e-5)
    parameters = [*levels, last.weight, last.bias]
    ours, theirs = (torch.autograd.grad(value * 0.5, parameters) for value in (loss, expected))
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


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


def test_in_bf16_it_is_as_exact_as_the_type():
    tensors = case(64, 4, 4, torch.bfloat16)
    gradients = focal.conv_backward(*tensors, [True] * 3)
    for one, other in zip(gradients, by_autograd(*(part.double() for part in tensors)), strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - other).norm() < 0.004 * other.norm()
