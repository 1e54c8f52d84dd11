"""FCOS against torchvision's: same layout, losses, gradients and detections; its graph; its life."""

import pytest
import torch
from targets import random_batch
from torchvision.models.detection import fcos_resnet50_fpn
from torchvision_pair import assert_same_detections, assert_same_losses, in_training, same_input

from trainer.base.errors import CheckpointError
from trainer.export.formats import select
from trainer.export.verify import EXACT, Comparison
from trainer.model import recipes
from trainer.model.architecture import build
from trainer.model.architectures.fcos.fcos_options import FcosOptions
from trainer.model.deployment import Detections

pytestmark = pytest.mark.usefixtures("forked_processes")

SIZE, CLASSES = 128, 7
LOSSES = {"classification": "classification", "boxes": "bbox_regression", "centerness": "bbox_ctrness"}
NARROW = FcosOptions(
    backbone="resnet18", backbone_width=16, fpn_channels=32, head_depth=1, norm="group", score_threshold=0.0
)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def sharpened(detector):
    """Random weights whose scores are not all alike."""
    with torch.no_grad():
        torch.nn.init.normal_(detector.head.classification_head.cls_logits.weight, std=0.3)
        torch.nn.init.normal_(detector.head.regression_head.bbox_reg.weight, std=0.1)
    return detector.eval()


@pytest.fixture(scope="module")
def pair():
    """Ours and torchvision's, of the published size with the same weights; BatchNorm as in evaluation."""
    torch.manual_seed(0)
    stock = fcos_resnet50_fpn(weights=None, weights_backbone=None, num_classes=CLASSES)
    stock.transform.min_size, stock.transform.max_size = (SIZE,), SIZE
    ours = build(FcosOptions(), CLASSES)
    assert ours.state_dict().keys() == stock.state_dict().keys()
    ours.load_state_dict(stock.state_dict())
    return ours, stock


@pytest.mark.slow
def test_losses_and_gradients_are_torchvisions(pair, monkeypatch):
    ours, stock = in_training(pair)
    images, boxes, labels, lists = random_batch([3, 0, 1], SIZE, CLASSES)
    same_input(monkeypatch, ours, stock, images)
    expected = stock([image / 255 for image in images], lists)
    losses = ours(images, boxes, labels)
    assert_same_losses(ours, stock, losses, expected, LOSSES)


@pytest.mark.slow
def test_detections_are_torchvisions(pair, monkeypatch):
    ours, stock = (sharpened(model) for model in pair)
    ours.load_state_dict(stock.state_dict())
    images = torch.randint(0, 256, (2, 3, SIZE, SIZE), dtype=torch.uint8)
    assert_same_detections(monkeypatch, ours, stock, images, first=0)


def test_both_graphs_find_what_the_detector_finds():
    detector = sharpened(build(NARROW, CLASSES))
    images = torch.randint(0, 256, (3, 3, SIZE, SIZE), dtype=torch.uint8)
    expected = detector.predict(images)
    with torch.no_grad():
        graph = detector.deployment_graph(SIZE)
        comparisons = [Comparison(EXACT), Comparison(EXACT)]
        comparisons[0].add(expected, Detections(*graph(images)))
        comparisons[1].add(expected, select(*detector.raw_graph(SIZE)(images), detector.thresholds))
    assert [comparison.result().matched for comparison in comparisons] == [1.0, 1.0]
    assert graph.rows == 100 and expected.num.tolist() == [100] * 3


def test_weights_come_from_torchvision_and_go_back(pair):
    ours, stock = pair
    names = [f"class {number}" for number in range(CLASSES)]
    upstream = ours.upstream_weights(names)
    assert upstream.num_classes == CLASSES + 1
    theirs = fcos_resnet50_fpn(weights=None, weights_backbone=None, num_classes=CLASSES + 1)
    theirs.load_state_dict(upstream.state)
    again = build(FcosOptions(), CLASSES)
    assert "loaded" in again.load_upstream(theirs.state_dict(), "x")
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in again.state_dict().items())
    body = {name.partition(".body.")[2]: v for name, v in stock.state_dict().items() if ".body." in name}
    assert "all but the backbone is new" in again.load_upstream(body, "x")


def test_weights_of_another_detector_are_refused():
    retinanet = build(recipes.load("debug").model, CLASSES).state_dict()
    with pytest.raises(CheckpointError, match="for a detector other than FCOS"):
        build(NARROW, CLASSES).load_upstream(retinanet, "x.pt")
    with pytest.raises(CheckpointError, match="for a detector other than RetinaNet"):
        build(recipes.load("debug").model, CLASSES).load_upstream(build(NARROW, CLASSES).state_dict(), "x.pt")


def test_in_bf16_boxes_are_placed_in_fp32():
    detector = build(NARROW, CLASSES).train()
    images, boxes, labels, _ = random_batch([3, 1], SIZE, CLASSES)
    exact = detector(images, boxes, labels)
    with torch.autocast("cpu", torch.bfloat16):
        losses = detector(images, boxes, labels)
    for name, loss in losses.items():
        assert loss.dtype == torch.float32 and torch.allclose(loss, exact[name], rtol=0.05), name
