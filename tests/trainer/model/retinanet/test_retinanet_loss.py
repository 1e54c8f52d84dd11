"""Box losses and the whole loss of the heads against torchvision's own."""

import copy

import pytest
import torch
from torch import nn
from torchvision.models.detection._utils import BoxCoder, Matcher, _box_loss
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops import box_iou

from trainer.data.batch import PADDING
from trainer.model import fused_functions
from trainer.model.retinanet.loss import AnchorTargets, box_loss, retinanet_loss

SIDES = (8, 4, 3, 2, 1)
CHANNELS = 32
PER_PLACE = 9


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def random_boxes(count):
    corner = torch.rand(count, 2) * 90
    return torch.cat([corner, corner + 2 + torch.rand(count, 2) * 40], dim=1)


@pytest.mark.parametrize("kind", ["l1", "giou"])
def test_box_loss_equals_torchvision(kind):
    anchors, targets = random_boxes(50), random_boxes(50)
    offsets = torch.randn(1, 50, 4) * 0.5
    offsets[0, :3, 2:] = torch.tensor([[5.0, 0.2], [0.1, 6.0], [100.0, 4.0]])  # clamped from 4.1 on
    offsets.requires_grad_()
    kept = torch.rand(50) < 0.4
    kept[:3] = True
    matches = AnchorTargets(
        labels=torch.where(kept, 0, -1).int()[None],
        boxes=torch.where(kept[:, None], targets, anchors)[None],
        positive=kept[None],
        weights=torch.full((1, 50), 0.25),
    )
    loss = box_loss(offsets, kind, anchors, matches)
    expected = 0.25 * _box_loss(
        kind, BoxCoder((1.0, 1.0, 1.0, 1.0)), anchors[kept], targets[kept], offsets[0][kept]
    )
    assert torch.allclose(loss, expected, rtol=1e-5)
    (ours,), (theirs,) = (torch.autograd.grad(value, offsets) for value in (loss, expected))
    assert torch.allclose(ours, theirs, atol=1e-6)
    assert (ours[0][~kept] == 0).all()


def pyramid(images):
    """Features, and anchors of the same places, of a small image."""
    features = [torch.randn(images, CHANNELS, side, side) for side in SIDES]
    anchors = []
    for side in SIDES:
        step = 120 / side
        corner = torch.cartesian_prod(torch.arange(side) * step, torch.arange(side) * step).flip(1)
        shapes = [(step * a, step * b) for a in (0.7, 1.0, 1.6) for b in (0.7, 1.0, 1.6)]
        boxes = torch.stack([torch.cat([corner, corner + torch.tensor(s)], dim=1) for s in shapes], dim=1)
        anchors.append(boxes.flatten(0, 1))
    return features, anchors


def ours(head, kind, features, anchors, boxes, labels):
    own = head.classification_head
    return retinanet_loss(
        kind,
        [own.conv(x) for x in features],
        own.cls_logits,
        head.regression_head(features),
        anchors,
        boxes,
        labels,
    )


def head_case(version, classes, counts):
    """A class and box head, features, anchors, and targets as padded rows and as torchvision takes them."""
    norm = (lambda channels: nn.GroupNorm(4, channels)) if version == "v2" else None
    head = RetinaNetHead(CHANNELS, PER_PLACE, classes, norm_layer=norm)
    head.regression_head._loss_type = "giou" if version == "v2" else "l1"
    features, anchors = pyramid(len(counts))
    boxes = torch.zeros(len(counts), max(1, *counts), 4)
    labels = torch.full(boxes.shape[:2], PADDING)
    lists = []
    for row, count in enumerate(counts):
        boxes[row, :count] = random_boxes(count)
        labels[row, :count] = torch.randint(0, classes, (count,))
        lists.append({"boxes": boxes[row, :count], "labels": labels[row, :count]})
    return head, features, anchors, boxes, labels, lists


def torchvision_says(head, features, anchors, lists):
    """Losses, and gradients by what flows on to the pyramid and by the heads' parameters.

    In fp64: torchvision's fp32 gradient itself is off by up to 3e-5 where all classes are negative.
    """
    exact = copy.deepcopy(head).double()
    together, matcher = torch.cat(anchors), Matcher(0.5, 0.4, allow_low_quality_matches=True)
    nothing = torch.full((len(together),), -1)
    matched = [matcher(box_iou(t["boxes"], together)) if len(t["boxes"]) else nothing for t in lists]
    targets = [{"boxes": t["boxes"].double(), "labels": t["labels"]} for t in lists]
    inputs = [level.detach().double().requires_grad_() for level in features]
    losses = exact.compute_loss(targets, exact(inputs), [together.double()] * len(lists), matched)
    return losses, torch.autograd.grad(sum(losses.values()), [*inputs, *exact.parameters()])


def assert_equal_to_torchvision(version, classes, counts):
    head, features, anchors, boxes, labels, lists = head_case(version, classes, counts)
    expected, theirs = torchvision_says(head, features, anchors, lists)
    inputs = [level.requires_grad_() for level in features]
    losses = ours(head, head.regression_head._loss_type, inputs, anchors, boxes, labels)
    assert torch.allclose(losses["classification"].double(), expected["classification"], rtol=1e-5)
    assert torch.allclose(losses["boxes"].double(), expected["bbox_regression"], rtol=1e-5)
    mine = torch.autograd.grad(sum(losses.values()), [*inputs, *head.parameters()])
    names = [f"features of level {level}" for level in range(len(inputs))]
    names += [name for name, _ in head.named_parameters()]
    for name, one, other in zip(names, mine, theirs, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm() + 1e-12, name


@pytest.mark.parametrize(("classes", "counts"), [(1, [1, 0]), (91, [5, 1000, 0]), (264, [0, 0]), (601, [1])])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_loss_and_all_gradients_of_the_heads_equal_torchvision(version, classes, counts):
    assert_equal_to_torchvision(version, classes, counts)


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Compiled functions from here on, and a count of how often anything has been compiled since."""
    if missing := fused_functions.describe_missing_tool("cpu"):
        pytest.skip(missing)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    fused_functions.configure(True, torch.device("cpu"))
    yield lambda: counters["unique_graphs"] - before
    assert fused_functions._CompileState.compiles, "the compiler failed"
    fused_functions.configure(False, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.extra
def test_compiled_it_equals_torchvision_and_is_compiled_once(compiled):
    """Of matching, focal and box loss one form each, whatever the batch, its targets and the classes."""
    assert_equal_to_torchvision("v2", 601, [40, 1, 0, 3, 7, 2])
    assert compiled() == 3
    for classes, counts in ((91, [1000, 1, 0, 3, 7, 2]), (264, [9] * 7), (2, [70, 0] * 6)):
        assert_equal_to_torchvision("v2", classes, counts)
        assert compiled() == 3
    # One image alone is another form, for the compiler does not see a dimension in a length of 1.
    for counts in ([4], [0]):
        assert_equal_to_torchvision("v2", 91, counts)
    assert compiled() <= 6


def test_half_precision_takes_the_form_that_keeps_the_logits():
    head = RetinaNetHead(CHANNELS, PER_PLACE, 3)
    features, anchors = pyramid(2)
    boxes, labels = random_boxes(8).view(2, 4, 4), torch.zeros(2, 4, dtype=torch.int64)
    exact = ours(head, "giou", features, anchors, boxes, labels)
    with torch.autocast("cpu", torch.float16):
        half = ours(head, "giou", features, anchors, boxes, labels)
    assert torch.allclose(half["classification"], exact["classification"], rtol=0.01)
    (half["classification"] * 2**10).backward()
    assert torch.isfinite(head.classification_head.cls_logits.weight.grad).all()
