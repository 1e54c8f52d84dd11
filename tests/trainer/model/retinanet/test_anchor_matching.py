"""Matching against torchvision's matcher, on the cases that break it."""

import pytest
import torch
from torchvision.models.detection._utils import Matcher
from torchvision.ops import box_iou

from trainer.data.batch import PADDING
from trainer.model import fused_functions
from trainer.model.retinanet import loss
from trainer.model.retinanet.focal import BACKGROUND, IGNORED
from trainer.model.retinanet.loss import match_anchors, pad_targets


def random_boxes(count, generator):
    corner = torch.rand(count, 2, generator=generator) * 90
    return torch.cat([corner, corner + 2 + torch.rand(count, 2, generator=generator) * 40], dim=1)


def grid_anchors():
    corner = torch.cartesian_prod(torch.arange(0, 120, 6.0), torch.arange(0, 120, 6.0))
    return torch.cat([torch.cat([corner, corner + side], dim=1) for side in (8, 16, 32)])


def padded_targets(counts, anchors, generator):
    """Random targets; the last image has an anchor itself and one box twice: equal overlaps."""
    boxes = torch.zeros(len(counts), max(counts), 4)
    labels = torch.full((len(counts), max(counts)), PADDING)
    for row, count in enumerate(counts):
        boxes[row, :count] = random_boxes(count, generator)
        labels[row, :count] = torch.arange(count)
    boxes[-1, 0] = anchors[17]
    boxes[-1, counts[-1] - 1] = boxes[-1, 0]
    return boxes, labels


@pytest.mark.parametrize("at_once", [1, 10**9])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("counts", [[0, 1], [5, 200], [1000, 3]])
def test_identical_to_torchvision(seed, counts, at_once, monkeypatch):
    monkeypatch.setattr(loss, "_OVERLAPS_AT_ONCE", at_once)
    generator, anchors = torch.Generator().manual_seed(seed), grid_anchors()
    boxes, labels = padded_targets(counts, anchors, generator)
    matched = match_anchors(*pad_targets(boxes, labels), anchors)
    matcher = Matcher(0.5, 0.4, allow_low_quality_matches=True)
    for row, count in enumerate(counts):
        if count == 0:
            assert (matched[row] == BACKGROUND).all()
        else:
            assert torch.equal(matched[row], matcher(box_iou(boxes[row, :count], anchors)))
    assert (IGNORED in matched) or max(counts) < 5


def test_an_overlap_of_exactly_a_threshold_belongs_to_the_better_side():
    """0.5 is enough for an object, 0.4 not to be background; the first anchor is the best anyway."""
    boxes, labels = torch.tensor([[[0.0, 0.0, 10.0, 4.0]]]), torch.tensor([[2]])
    shapes = [(10, 4), (10, 8), (10, 10), (10, 8.5), (10, 10.5)]  # overlaps 1, 0.5, 0.4, 0.47, 0.38
    anchors = torch.tensor([[0.0, 0.0, width, height] for width, height in shapes])
    matched = match_anchors(boxes, labels, anchors)[0]
    assert matched.tolist() == [0, 0, IGNORED, IGNORED, BACKGROUND]
    matcher = Matcher(0.5, 0.4, allow_low_quality_matches=True)
    assert torch.equal(matched, matcher(box_iou(boxes[0], anchors)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(
    fused_functions.describe_missing_tool("cuda") is not None, reason="nothing is compiled for GPUs here"
)
@pytest.mark.parametrize(("images", "targets"), [(3, 8), (2, 64), (1, 1024)])
def test_compiled_and_eager_matches_are_equal_to_the_bit(images, targets):
    generator = torch.Generator().manual_seed(targets)
    anchors = random_boxes(50_000, generator) * 7
    # Every other target is an anchor moved by a little: overlaps on both sides of each threshold.
    boxes = torch.stack([random_boxes(targets, generator) * 7 for _ in range(images)])
    boxes[:, ::2] = anchors[: targets // 2] + torch.rand(targets // 2, 1, generator=generator) * 12
    labels = torch.randint(PADDING, 3, (images, targets), generator=generator)
    on_device = [each.cuda() for each in (boxes, labels, anchors)]
    eager = match_anchors(*on_device)
    try:
        assert fused_functions.configure(True, on_device[0].device)
        compiled = match_anchors(*on_device)
        assert fused_functions._CompileState.compiles, "the compiler failed"
    finally:
        fused_functions.configure(False, on_device[0].device)
    assert torch.equal(compiled, eager) and torch.equal(compiled.cpu(), match_anchors(boxes, labels, anchors))
    assert {BACKGROUND, IGNORED} < set(compiled.unique().tolist())
