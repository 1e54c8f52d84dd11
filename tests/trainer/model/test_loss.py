"""Matching and losses against torchvision's own parts, on the cases that break them."""

import pytest
import torch
from torchvision.models.detection._utils import BoxCoder, Matcher, _box_loss
from torchvision.ops import box_iou, sigmoid_focal_loss

from trainer.model import boxes as box_ops
from trainer.model.loss import BACKGROUND, IGNORED, PADDING, box_loss, focal_loss, match, retinanet_loss


def random_boxes(count, generator):
    corner = torch.rand(count, 2, generator=generator) * 90
    return torch.cat([corner, corner + 2 + torch.rand(count, 2, generator=generator) * 40], dim=1)


def grid_anchors():
    corner = torch.cartesian_prod(torch.arange(0, 120, 6.0), torch.arange(0, 120, 6.0))
    return torch.cat([torch.cat([corner, corner + side], dim=1) for side in (8, 16, 32)])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("counts", [[0, 1], [5, 200], [1000, 3]])
def test_matches_identical_to_torchvision(seed, counts):
    generator = torch.Generator().manual_seed(seed)
    anchors = grid_anchors()
    boxes = torch.zeros(2, max(counts), 4)
    labels = torch.full((2, max(counts)), PADDING)
    for row, count in enumerate(counts):
        boxes[row, :count] = random_boxes(count, generator)
        labels[row, :count] = 0
    # Equal overlaps decide who is best for whom: boxes that are anchors, and one box twice.
    boxes[1, 0] = anchors[17]
    labels[1, 0] = 0
    found = match(boxes, labels, anchors)
    matcher = Matcher(0.5, 0.4, allow_low_quality_matches=True)
    for row, count in enumerate(counts):
        if count == 0:
            assert (found[row] == BACKGROUND).all()
        else:
            assert torch.equal(found[row], matcher(box_iou(boxes[row, :count], anchors)))
    assert (IGNORED in found) or max(counts) < 5


@pytest.mark.parametrize("classes", [1, 91, 264, 601])
def test_focal_loss_equals_torchvision(classes):
    generator = torch.Generator().manual_seed(classes)
    logits = (torch.randn(2, 60, classes, generator=generator) * 4).requires_grad_()
    matched = torch.randint(-2, classes, (2, 60), generator=generator)
    found = focal_loss(logits, matched)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    for row in range(2):
        valid = matched[row] != IGNORED
        target = torch.zeros(60, classes)
        positive = matched[row] >= 0
        target[positive, matched[row][positive]] = 1
        expected = sigmoid_focal_loss(logits[row][valid], target[valid], reduction="sum")
        assert torch.allclose(found[row], expected, rtol=1e-5)
        (wanted,) = torch.autograd.grad(expected, logits)
        assert torch.allclose(gradient[row], wanted[row], atol=1e-6)


@pytest.mark.parametrize("logit", [-200.0, -30.0, 0.0, 30.0, 200.0])
def test_focal_loss_is_finite_at_extremes(logit):
    logits = torch.full((1, 3, 2), logit, requires_grad=True)
    loss = focal_loss(logits, torch.tensor([[0, BACKGROUND, IGNORED]])).sum()
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logits.grad).all()
    assert (logits.grad[0, 2] == 0).all()


@pytest.mark.parametrize("kind", ["l1", "smooth_l1", "giou"])
def test_box_loss_equals_torchvision(kind):
    generator = torch.Generator().manual_seed(3)
    anchors, targets = random_boxes(50, generator), random_boxes(50, generator)
    offsets = (torch.randn(1, 50, 4, generator=generator) * 0.5).requires_grad_()
    positive = torch.rand(1, 50, generator=generator) < 0.4
    found = box_loss(kind, offsets, anchors, targets[None], positive)
    kept = positive[0]
    expected = _box_loss(
        kind, BoxCoder((1.0, 1.0, 1.0, 1.0)), anchors[kept], targets[kept], offsets[0][kept], {"beta": 1.0}
    )
    assert torch.allclose(found[0], expected, rtol=1e-5)
    (ours,) = torch.autograd.grad(found.sum(), offsets, retain_graph=True)
    (theirs,) = torch.autograd.grad(expected, offsets)
    assert torch.allclose(ours, theirs, atol=1e-6)
    assert (ours[0][~kept] == 0).all()


def test_an_image_without_boxes_has_a_finite_loss_and_gradient():
    logits = torch.randn(1, 1200, 3, requires_grad=True)
    offsets = torch.randn(1, 1200, 4, requires_grad=True)
    losses = retinanet_loss(
        "giou", logits, offsets, grid_anchors(), torch.zeros(1, 1, 4), torch.full((1, 1), PADDING)
    )
    sum(losses).backward()
    assert losses.boxes == 0 and (offsets.grad == 0).all()
    assert torch.isfinite(logits.grad).all() and losses.classification > 0


def test_padding_changes_nothing():
    generator = torch.Generator().manual_seed(1)
    logits, offsets = torch.randn(1, 1200, 3), torch.randn(1, 1200, 4)
    boxes, labels = random_boxes(3, generator)[None], torch.tensor([[0, 2, 1]])
    padded = (
        torch.cat([boxes, torch.zeros(1, 5, 4)], dim=1),
        torch.cat([labels, torch.full((1, 5), PADDING)], dim=1),
    )
    short = retinanet_loss("giou", logits, offsets, grid_anchors(), boxes, labels)
    assert short == retinanet_loss("giou", logits, offsets, grid_anchors(), *padded)


def test_encoding_and_decoding_are_inverse():
    generator = torch.Generator().manual_seed(5)
    anchors, boxes = random_boxes(40, generator), random_boxes(40, generator)
    assert torch.allclose(box_ops.decode(box_ops.encode(boxes, anchors), anchors), boxes, atol=1e-3)
