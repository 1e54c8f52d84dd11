"""Batched postprocessing against torchvision's, image by image."""

import dataclasses

import pytest
import torch
from torchvision.models.detection import retinanet_resnet50_fpn_v2

from trainer.model.architecture import build
from trainer.model.retinanet.options import RetinaNetOptions
from trainer.model.retinanet.postprocess import postprocess

CONFIG = RetinaNetOptions(
    detections_per_image=100, backbone="resnet18", backbone_width=8, fpn_channels=8, head_depth=1
)
SIDES = (40, 20, 10, 5, 3)
SIZE = 320
EACH = 9


@pytest.fixture(scope="module")
def stock():
    return retinanet_resnet50_fpn_v2(weights=None, weights_backbone=None, num_classes=2)


def anchors():
    levels = []
    for side in SIDES:
        step = SIZE / side
        corner = torch.cartesian_prod(torch.arange(side) * step, torch.arange(side) * step).flip(1)
        shapes = [(step * a, step * b) for a in (2.0, 3.0, 5.0) for b in (2.0, 3.0, 5.0)]
        levels.append(
            torch.stack([torch.cat([corner, corner + torch.tensor(s)], 1) for s in shapes], 1).flatten(0, 1)
        )
    return levels


def outputs(images, classes, *, shift, seed, like=0.0):
    generator = torch.Generator().manual_seed(seed)
    logits = [torch.randn(images, s * s * EACH, classes, generator=generator) * 2 + shift for s in SIDES]
    offsets = [torch.randn(images, s * s * EACH, 4, generator=generator) * like for s in SIDES]
    return logits, offsets


def detect(config, logits, offsets):
    """Our detections from logits [B, n, C] and offsets [B, n, 4] of each level."""
    classes = logits[0].shape[2]
    # As the convolutions give them: [B, A, C, places].
    levels = [level.unflatten(1, (-1, EACH)).permute(0, 2, 3, 1) for level in logits]
    detector = build(config, classes)
    candidates = detector.select_candidates(levels, torch.cat(offsets, dim=1), torch.cat(anchors()), SIZE)
    return postprocess(*candidates, classes, SIZE, config)


def assert_like_torchvision(stock, config, logits, offsets):
    detections, levels = detect(config, logits, offsets), anchors()
    stock.score_thresh, stock.nms_thresh = config.score_threshold, config.nms_threshold
    stock.detections_per_img = config.detections_per_image
    images = len(logits[0])
    parts = {"cls_logits": logits, "bbox_regression": offsets}
    expected = stock.postprocess_detections(parts, [levels] * images, [(SIZE, SIZE)] * images)
    assert detections.num.tolist() == [len(one["scores"]) for one in expected]
    for row, one in enumerate(expected):
        count = len(one["scores"])
        assert torch.equal(detections.labels[row, :count], one["labels"])
        # The vectorised sigmoid differs from the scalar one, at the end of a block, by one bit.
        assert torch.allclose(detections.scores[row, :count], one["scores"], rtol=1e-6)
        assert torch.allclose(detections.boxes[row, :count], one["boxes"], atol=1e-4)
        assert (detections.labels[row, count:] == -1).all() and (detections.scores[row, count:] == 0).all()
        assert (detections.boxes[row, count:] == 0).all()
    assert detections.boxes.shape == (len(expected), config.detections_per_image, 4)
    return detections


@pytest.mark.parametrize(
    ("classes", "shift", "seed"), [(1, -1.0, 0), (7, -5.0, 1), (91, -4.0, 2), (601, -6.0, 3)]
)
def test_equal_to_torchvision(stock, classes, shift, seed):
    logits, offsets = outputs(3, classes, shift=shift, seed=seed, like=0.3)
    assert assert_like_torchvision(stock, CONFIG, logits, offsets).num.min() > 10


@pytest.mark.parametrize(
    "changes",
    [
        {"detections_per_image": 300},
        {"detections_per_image": 3},
        {"nms_threshold": 0.1},
        {"score_threshold": 0.0},
        {"detections_per_image": 5, "nms_threshold": 0.01},
    ],
    ids=str,
)
def test_limits(stock, changes):
    logits, offsets = outputs(2, 3, shift=-2.0, seed=9, like=0.1)
    assert_like_torchvision(stock, dataclasses.replace(CONFIG, **changes), logits, offsets)


def test_many_copies_of_one_object_do_not_hide_the_others(stock):
    # The best 400 candidates are one object: the suppression has to look beyond its first prefix.
    logits, offsets = outputs(2, 2, shift=-30.0, seed=0)
    target = torch.tensor([100.0, 100.0, 180.0, 180.0])
    own = anchors()[0][:900]
    size = own[:, 2:] - own[:, :2]
    center = (target[:2] + target[2:]) / 2 - (own[:, :2] + own[:, 2:]) / 2
    offsets[0][0, :900] = torch.cat([center / size, torch.log((target[2:] - target[:2]) / size)], dim=1)
    logits[0][0, :900, 1] = 3 + torch.rand(900)
    logits[1][0, [0, 1800, 3591], 0] = torch.tensor([0.5, 0.6, 0.7])
    detections = assert_like_torchvision(stock, CONFIG, logits, offsets)
    assert detections.labels[0, : detections.num[0]].tolist() == [1, 0, 0, 0]
    assert detections.num.tolist() == [4, 0]
