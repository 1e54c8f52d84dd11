"""The detector against torchvision's: same layout, same losses, same gradients, same detections."""

import dataclasses

import pytest
import torch
from torchvision.models.detection import retinanet_resnet50_fpn, retinanet_resnet50_fpn_v2
from torchvision.models.detection.image_list import ImageList
from torchvision.ops.misc import FrozenBatchNorm2d

from trainer.data.batch import PADDING
from trainer.model.architecture import build
from trainer.model.retinanet.options import RetinaNetOptions

SIZE = 128
CLASSES = 7
NARROW = RetinaNetOptions(backbone="resnet18", backbone_width=16, fpn_channels=32, head_depth=1, norm="group")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def random_batch(counts, size, classes):
    """Squares of `size` pixels with so many boxes each, as a padded batch and as torchvision takes them."""
    images = torch.randint(0, 256, (len(counts), 3, size, size), dtype=torch.uint8)
    boxes = torch.zeros(len(counts), max(1, *counts), 4)
    labels = torch.full(boxes.shape[:2], PADDING)
    lists = []
    for row, count in enumerate(counts):
        corner = torch.rand(count, 2) * size * 0.6
        boxes[row, :count] = torch.cat([corner, corner + 4 + torch.rand(count, 2) * size * 0.35], dim=1)
        labels[row, :count] = torch.randint(0, classes, (count,))
        lists.append({"boxes": boxes[row, :count], "labels": labels[row, :count]})
    return images, boxes, labels, lists


def in_training(pair):
    """Both in training, but for the statistics of their BatchNorm: over a 1x1 map they blow rounding up."""
    for model in pair:
        for module in model.train().modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.eval()
    return pair


def assert_same_losses(ours, stock, losses, expected, names, gradients=1e-4):
    assert set(losses) == set(ours.loss_names) == set(names)
    for name, loss in losses.items():
        assert torch.allclose(loss, expected[names[name]], rtol=1e-5), name
    sum(expected.values()).backward()
    sum(losses.values()).backward()
    # In fp32: rounding differs from processor to processor.
    theirs = {name: parameter.grad for name, parameter in stock.named_parameters()}
    for name, parameter in ours.named_parameters():
        difference = (parameter.grad - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-12)
        assert difference < gradients, name


def reference(version):
    make = retinanet_resnet50_fpn if version == "v1" else retinanet_resnet50_fpn_v2
    model = make(weights=None, weights_backbone=None, num_classes=CLASSES)
    model.transform.min_size, model.transform.max_size = (64,), 64
    return model


@pytest.mark.slow
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_equal_to_torchvision(version):
    model = reference(version)
    ours = build(RetinaNetOptions(version=version), CLASSES)
    assert ours.state_dict().keys() == model.state_dict().keys()
    ours.load_state_dict(model.state_dict())
    # In fp32 the gradients of fifty random layers differ by 1e-5 on some processors.
    model.double()
    ours.double()
    in_training((ours, model))
    images, boxes, labels, lists = random_batch([3, 0], 64, CLASSES)
    # The same network input for both: fifty random layers blow the last bit of it up a thousandfold.
    inputs = ours.normalize(images)
    theirs, _ = model.transform([image / 255 for image in images])
    assert torch.allclose(inputs, theirs.tensors.double(), atol=1e-5)
    features = list(model.backbone(inputs).values())
    anchors = model.anchor_generator(ImageList(inputs, [(64, 64)] * 2), features)
    expected = model.compute_loss(lists, model.head(features), anchors)
    losses = ours(images, boxes, labels)
    losses = {name: loss.double() for name, loss in losses.items()}
    names = {"classification": "classification", "boxes": "bbox_regression"}
    assert_same_losses(ours, model, losses, expected, names, gradients=1e-5)


@pytest.mark.parametrize(
    ("backbone", "norm"), [("resnet34", "batch"), ("resnext50_32x4d", "frozen"), ("resnet101", "group")]
)
def test_backbones_and_norms_train(backbone, norm):
    detector = build(RetinaNetOptions(backbone=backbone, norm=norm, fpn_channels=32, head_depth=1), 3)
    images, boxes, labels, _ = random_batch([2], SIZE, CLASSES)
    losses = detector(images[:, :, :64, :64], boxes / 2, labels.clamp(max=2))
    (losses["classification"] + losses["boxes"]).backward()
    kinds = {type(module) for module in detector.backbone.body.modules()}
    expected = {"batch": torch.nn.BatchNorm2d, "frozen": FrozenBatchNorm2d, "group": torch.nn.GroupNorm}[norm]
    assert any(issubclass(kind, expected) for kind in kinds)
    assert all(p.grad is not None for p in detector.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("trainable", "frozen"), [(0, ["conv1", "layer4"]), (3, ["conv1", "bn1", "layer1"]), (5, [])]
)
def test_trainable_layers(trainable, frozen):
    body = build(dataclasses.replace(NARROW, trainable_layers=trainable), 3).backbone.body
    for stage in ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4"):
        trained = stage not in frozen and (trainable > 0)
        assert all(p.requires_grad == trained for p in getattr(body, stage).parameters()), stage


@pytest.mark.parametrize(
    ("weights", "eps"), [("torchvision:RetinaNet_ResNet50_FPN_Weights.COCO_V1", 0.0), ("", 1e-5)]
)
def test_weights_that_were_trained_without_an_epsilon_get_none(weights, eps):
    """As torchvision's retinanet_resnet50_fpn does, for these weights alone."""
    config = RetinaNetOptions(version="v1", norm="frozen", weights=weights, fpn_channels=32, head_depth=1)
    norms = [one for one in build(config, 3).modules() if isinstance(one, FrozenBatchNorm2d)]
    assert len(norms) == 53 and {norm.eps for norm in norms} == {eps}


def test_anchors_stay_fp32_under_autocast():
    detector = build(NARROW, 3)
    with torch.autocast("cpu", torch.bfloat16):
        detector.predict(torch.zeros(1, 3, SIZE, SIZE, dtype=torch.uint8))
    cached = next(iter(detector._anchors.values()))
    assert all(level.dtype == torch.float32 for level in cached)
    fresh = build(NARROW, 3)
    fresh.predict(torch.zeros(1, 3, SIZE, SIZE, dtype=torch.uint8))
    assert all(map(torch.equal, cached, next(iter(fresh._anchors.values()))))


def test_the_color_map_is_applied_before_normalization():
    detector = build(NARROW, 3)
    images = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    color = torch.zeros(2, 3, 4)
    color[0, :, :3], color[0, :, 3] = 0.5 * torch.eye(3), 0.25
    color[1, :, :3] = torch.eye(3)
    mapped = detector.normalize(images, color) * detector.std + detector.mean
    assert torch.allclose(mapped[0], 0.5 * images[0].float() + 0.25 * 255, atol=1e-3)
    assert torch.allclose(mapped[1], images[1].float(), atol=1e-3)
