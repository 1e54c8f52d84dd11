"""Faster R-CNN v2 against torchvision's: same layout, losses, gradients and detections; graph and life."""

import dataclasses

import pytest
import torch
from targets import random_batch
from torchvision.models.detection import fasterrcnn_resnet50_fpn_v2
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler
from torchvision_pair import assert_same_detections, assert_same_losses, in_training, same_input

from trainer.base.errors import CheckpointError
from trainer.export.formats import select
from trainer.export.verify import EXACT, Comparison
from trainer.model.architecture import build
from trainer.model.architectures.faster_rcnn.faster_rcnn import draw
from trainer.model.architectures.faster_rcnn.faster_rcnn_options import FasterRcnnOptions
from trainer.model.architectures.fcos.fcos_options import FcosOptions
from trainer.model.deployment import Detections
from trainer.model.focal import BACKGROUND, IGNORED
from trainer.model.global_batch import Part, random_keys
from trainer.model.upstream_fitting import COCO_PLACES

SIZE, CLASSES = 128, 4
NARROW = FasterRcnnOptions(
    backbone="resnet18", backbone_width=16, fpn_channels=16, head_depth=1, head_width=32, norm="group",
    anchor_sizes=[8.0, 16.0, 32.0, 48.0, 64.0], proposals=40, trained_proposals=32,
)  # fmt: skip
LOSSES = {"classification": "loss_classifier", "boxes": "loss_box_reg", "objectness": "loss_objectness",
          "proposals": "loss_rpn_box_reg"}  # fmt: skip


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def part(labels):
    """A whole step of these images."""
    counts = (labels >= 0).sum(dim=1).tolist()
    keys = random_keys(0, 1, list(range(len(counts))), labels.device)
    return Part(keys, counts, torch.tensor(sum(counts) / len(counts)), max(counts), len(counts))


def sharpened(detector):
    """Random weights whose scores are not all alike, nor as good as 1."""
    torch.nn.init.normal_(detector.roi_heads.box_predictor.cls_score.weight, std=0.03)
    torch.nn.init.normal_(detector.rpn.head.cls_logits.weight, std=0.01)
    torch.nn.init.normal_(detector.rpn.head.bbox_pred.weight, std=0.01)
    return detector.eval()


@pytest.fixture(scope="module")
def pair():
    """Ours and torchvision's, of the published size with the same weights; fewer proposals."""
    torch.manual_seed(0)
    stock = fasterrcnn_resnet50_fpn_v2(
        weights=None, weights_backbone=None, num_classes=CLASSES + 1, box_batch_size_per_image=32,
        rpn_pre_nms_top_n_train=100, rpn_post_nms_top_n_train=100, rpn_pre_nms_top_n_test=50,
        rpn_post_nms_top_n_test=50,
    )  # fmt: skip
    # Which draws the side of the image, though there is but one.
    stock.transform.torch_choice = lambda sides: sides[0]
    stock.transform.min_size, stock.transform.max_size = (SIZE,), SIZE
    ours = build(FasterRcnnOptions(proposals=50, trained_proposals=32), CLASSES)
    assert ours.state_dict().keys() == stock.state_dict().keys()
    ours.load_state_dict(sharpened(stock).state_dict())
    return ours, stock


@pytest.mark.slow
def test_losses_and_gradients_are_torchvisions(pair, monkeypatch):
    ours, stock = in_training(pair)
    images, boxes, labels, lists = random_batch([3, 0], SIZE, CLASSES)
    same_input(monkeypatch, ours, stock, images)
    whole = part(labels)
    losses = ours(images, boxes, labels, part=whole)
    # Both are trained on what ours draws.
    monkeypatch.setattr(stock.rpn, "fg_bg_sampler", sampler(whole.keys, 256, 128))
    monkeypatch.setattr(stock.roi_heads, "fg_bg_sampler", sampler(whole.keys + 1, 32, 8))
    expected = stock(
        [image / 255 for image in images], [{**one, "labels": one["labels"] + 1} for one in lists]
    )
    assert_same_losses(ours, stock, losses, expected, LOSSES)


def sampler(keys, size, most):
    """Our draw with the interface of torchvision's sampler: labels of each image, and masks of the drawn."""

    def sample(labels):
        masks = []
        for key, names in zip(keys.split(1), labels, strict=True):
            matched = torch.where(names >= 1, 0, torch.where(names == 0, BACKGROUND, IGNORED))[None]
            drawn = draw(key, matched, torch.rand(1, len(names), 4), torch.rand(1, 1, 4), size, most)
            for chosen in (drawn.positive, ~drawn.positive & (drawn.share > 0)):
                masks.append(torch.zeros(len(names), dtype=torch.uint8))
                masks[-1][drawn.places[chosen]] = 1
        return masks[::2], masks[1::2]

    return sample


def test_a_draw_is_as_large_as_torchvisions_and_follows_from_each_image():
    labels = [
        torch.cat([torch.full((count,), value) for value, count in ((1, many), (0, few), (-1, 5))])
        for many, few in ((40, 90), (2, 90), (40, 1), (0, 0), (3, 3))
    ]
    keys = random_keys(0, 7, list(range(len(labels))), torch.device("cpu"))
    drawn, expected = sampler(keys, 8, 4)(labels), BalancedPositiveNegativeSampler(8, 0.5)(labels)
    for side, other, wanted in zip(drawn, expected, (1, 0), strict=True):
        for mask, theirs, names in zip(side, other, labels, strict=True):
            assert mask.sum() == theirs.sum() and (names[mask.bool()] == wanted).all()
    # Of an image the same whatever else is in the batch; of another step or stage another.
    assert torch.equal(sampler(keys[:1], 8, 4)(labels[:1])[0][0], drawn[0][0])
    for others in (keys[:1] + 1, random_keys(0, 8, [0], torch.device("cpu"))):
        assert not torch.equal(sampler(others, 8, 4)(labels[:1])[0][0], drawn[0][0])


def test_what_is_missing_in_a_draw_has_no_share_and_repeats_the_rest():
    matched = torch.tensor([[BACKGROUND, 2, IGNORED, IGNORED], [0, BACKGROUND, BACKGROUND, BACKGROUND]])
    places, boxes = torch.rand(2, 4, 4), torch.rand(2, 3, 4)
    drawn = draw(random_keys(0, 7, [0, 1], matched.device), matched, places, boxes, 4, 2)
    assert drawn.places[0].tolist() == [1, 0, 1, 0] and set(drawn.places[1].tolist()) == {0, 1, 2, 3}
    assert torch.equal(drawn.share, torch.tensor([[1, 1, 0, 0], [1] * 4]) / 6)
    assert drawn.positive.tolist() == [[True] + [False] * 3] * 2
    assert torch.equal(drawn.truth[:, 0], torch.stack([boxes[0, 2], boxes[1, 0]]))
    assert torch.equal(drawn.truth[:, 1:], drawn.boxes[:, 1:])


@pytest.mark.slow
def test_detections_and_the_graphs_are_torchvisions(pair, monkeypatch):
    ours, stock = (model.eval() for model in pair)
    images = torch.randint(0, 256, (2, 3, SIZE, SIZE), dtype=torch.uint8)
    assert_same_detections(monkeypatch, ours, stock, images, first=1)
    monkeypatch.undo()
    comparison = Comparison(EXACT)
    with torch.no_grad():
        found, (boxes, scores) = ours.predict(images), ours.raw_graph(SIZE)(images)
        comparison.add(found, Detections(*ours.deployment_graph(SIZE)(images)))
        comparison.add(found, select(boxes, scores, ours.thresholds))
    assert comparison.result().matched > 0.99
    assert boxes.shape == (*scores.shape, 4) and scores.shape[::2] == (2, CLASSES)


def test_an_image_with_fewer_proposals_than_places_finds_as_much_in_the_graph():
    config = dataclasses.replace(NARROW, anchor_sizes=[64.0] * 5, proposals=300, score_threshold=0.01)
    detector = sharpened(build(config, CLASSES))
    images = torch.cat([torch.randint(0, 256, (1, 3, 96, 96)), torch.zeros(1, 3, 96, 96)]).to(torch.uint8)
    comparison = Comparison(EXACT)
    with torch.no_grad():
        graph = detector.deployment_graph(96)
        stages = detector.first_stage(detector.features(detector.normalize(images)))
        _, real = detector.proposals(*stages, graph.anchors, 300, 96)
        comparison.add(detector.predict(images), Detections(*graph(images)))
    assert 0 < real.sum(dim=1).min() < real.shape[1] and comparison.result().matched > 0.99


@pytest.mark.slow
def test_weights_come_from_torchvision_and_go_back(pair):
    ours, _ = pair
    upstream = ours.upstream_weights([f"class {number}" for number in range(CLASSES)])
    assert upstream.num_classes == CLASSES + 1
    again = build(FasterRcnnOptions(), CLASSES)
    assert "new" not in again.load_upstream(upstream.state, "x")
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in again.state_dict().items())
    assert "the classification layer is new" in build(FasterRcnnOptions(), 9).load_upstream(
        upstream.state, "x"
    )


def test_classes_of_coco_have_the_places_that_torchvision_gives_them():
    ours = build(NARROW, len(COCO_PLACES))
    upstream = ours.upstream_weights(list(COCO_PLACES))
    predictor = "roi_heads.box_predictor."
    score, boxes = (upstream.state[predictor + name] for name in ("cls_score.bias", "bbox_pred.weight"))
    assert upstream.num_classes == len(score) == 91 and len(boxes) == 364
    person = ours.state_dict()[predictor + "bbox_pred.weight"][4:8]
    assert torch.equal(boxes[4:8], person) and score[12] == -20 and not boxes[48:52].any()
    again = build(NARROW, len(COCO_PLACES))
    again.load_upstream(upstream.state, "x")
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in again.state_dict().items())


def test_weights_of_another_detector_are_refused():
    fcos = build(FcosOptions(backbone="resnet18", fpn_channels=32), CLASSES).state_dict()
    with pytest.raises(CheckpointError, match="for a detector other than Faster R-CNN"):
        build(NARROW, CLASSES).load_upstream(fcos, "x.pt")


def test_in_bf16_boxes_are_placed_in_fp32():
    detector = build(NARROW, CLASSES).train()
    images, boxes, labels, _ = random_batch([3, 1], SIZE, CLASSES)
    with torch.autocast("cpu", torch.bfloat16):
        losses = detector(images, boxes, labels, part=part(labels))
    assert all(loss.dtype == torch.float32 and loss.isfinite() for loss in losses.values())
    sum(losses.values()).backward()
    assert all(p.grad is not None for p in detector.parameters() if p.requires_grad)
