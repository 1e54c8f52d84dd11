"""A whole small network against torchvision's RetinaNet in fp64: from annotations to every gradient."""

import copy
import json

import numpy as np
import pytest
import simplejpeg
import torch
from torchvision.models.detection._utils import Matcher
from torchvision.models.detection.retinanet import RetinaNet
from torchvision.ops import box_iou

from trainer.config.schema import LoaderConfig
from trainer.data.download import download
from trainer.data.loader import TrainLoader
from trainer.data.shard_index import ShardDataset
from trainer.data.shards import shard
from trainer.launching.distributed import World
from trainer.model import recipes
from trainer.model.anchor_matching import match, pad_targets
from trainer.model.architecture import build
from trainer.model.architectures.retinanet.retinanet_options import RetinaNetOptions

SIZE = 128
SMALL = {"backbone": "resnet18", "backbone_width": 16, "fpn_channels": 32, "head_depth": 1, "norm": "group"}


def network(version, classes):
    torch.manual_seed(0)
    return build(RetinaNetOptions(version=version, **SMALL), classes)


def torchvision_says(detector, images, targets):
    """Losses, matches and the gradient of every parameter, by torchvision's own code, image by image.

    Args:
        detector: whose weights are taken.
        images: uint8 [B, 3, S, S].
        targets: boxes fp32 [M, 4] and labels int64 [M] of each image.
    """
    exact = copy.deepcopy(detector).double()
    stock = RetinaNet(
        exact.backbone, detector.num_classes, head=exact.head, anchor_generator=exact.anchor_generator,
        min_size=SIZE, max_size=SIZE,
    )  # fmt: skip
    stock.head.regression_head._loss_type = detector.box_loss
    inputs, _ = stock.transform([image.double() / 255 for image in images])
    features = list(stock.backbone(inputs.tensors).values())
    anchors = stock.anchor_generator(inputs, features)
    # Overlaps in fp32, as both have them: in fp64 other anchors would be equally good.
    matcher, places = Matcher(0.5, 0.4, allow_low_quality_matches=True), anchors[0].float()
    nothing = torch.full((len(places),), -1)
    matched = [matcher(box_iou(one["boxes"], places)) if len(one["boxes"]) else nothing for one in targets]
    doubles = [{"boxes": one["boxes"].double(), "labels": one["labels"]} for one in targets]
    losses = stock.head.compute_loss(doubles, stock.head(features), anchors, matched)
    parameters = dict(stock.named_parameters())
    gradients = torch.autograd.grad(sum(losses.values()), list(parameters.values()))
    return losses, torch.stack(matched), dict(zip(parameters, gradients, strict=True))


def assert_same(detector, images, boxes, labels, targets):
    expected_losses, matched, gradients = torchvision_says(detector, images, targets)
    losses = detector(images, boxes, labels)
    anchors = torch.cat(next(iter(detector._anchors.values())))
    assert torch.equal(match(*pad_targets(boxes, labels), anchors), matched)
    assert torch.allclose(losses["classification"].double(), expected_losses["classification"], rtol=1e-5)
    assert torch.allclose(losses["boxes"].double(), expected_losses["bbox_regression"], rtol=1e-5)
    sum(losses.values()).backward()
    parameters = dict(detector.named_parameters())
    assert parameters.keys() == gradients.keys()
    for name, expected in gradients.items():
        assert (parameters[name].grad - expected).norm() <= 1e-5 * expected.norm() + 1e-12, name
    return matched


CROWD = {"category_id": 3, "bbox": [10, 10, 100, 90], "iscrowd": 1, "segmentation": {"size": [SIZE, SIZE]}}
ANNOTATIONS = {
    "among.jpg": [
        {"category_id": 3, "bbox": [20, 30, 40.5, 50], "iscrowd": 0},
        CROWD,
        {"category_id": 17, "bbox": [70, 5, 33, 28.25], "iscrowd": 0},
    ],
    "alone.jpg": [CROWD],
    "none.jpg": [],
    "plain.jpg": [{"category_id": 17, "bbox": [4, 60, 64, 64], "iscrowd": 0}],
}
"""COCO's, of images by name; category 3 becomes label 0, category 17 label 1."""


@pytest.fixture
def coco(tmp_path):
    """A data set in COCO's form, with crowd regions."""
    numbers = {name: number for number, name in enumerate(ANNOTATIONS, start=1)}
    form = {
        "images": [
            {"id": n, "file_name": name, "width": SIZE, "height": SIZE} for name, n in numbers.items()
        ],
        "categories": [{"id": 3, "name": "cat"}, {"id": 17, "name": "dog"}],
        "annotations": [
            {"id": 10 * numbers[name] + place, "image_id": numbers[name], "area": 100, **item}
            for name, items in ANNOTATIONS.items()
            for place, item in enumerate(items)
        ],
    }
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "instances_train.json").write_text(json.dumps(form))
    (tmp_path / "train").mkdir()
    for name, number in numbers.items():
        pixels = np.random.default_rng(number).integers(0, 256, (SIZE, SIZE, 3), np.uint8)
        (tmp_path / "train" / name).write_bytes(simplejpeg.encode_jpeg(pixels))
    return tmp_path


def as_torchvision_trains(items):
    """Targets as torchvision's references/detection makes them of COCO's annotations: without crowds."""
    objects = [item for item in items if not item["iscrowd"]]
    boxes = torch.tensor([item["bbox"] for item in objects], dtype=torch.float32).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    labels = torch.tensor([{3: 0, 17: 1}[item["category_id"]] for item in objects], dtype=torch.int64)
    return {"boxes": boxes, "labels": labels}


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_crowd_regions_from_annotations_to_gradients_equal_torchvision(version, coco, tmp_path):
    """Through all that a run does with them: download, shards, the loader's batch."""
    config = recipes.load("debug", {"data.val_fraction": 0.0, "data.processes": 1}).data
    root = str(tmp_path / "root")
    dataset = ShardDataset(shard(download(f"coco:{coco}", root, config), root, config).uri, "train")
    whole = LoaderConfig(image_size=SIZE, workers=1, prefetch=1, scale=[1.0, 1.0], flip=0.0)
    world = World(0, 1, torch.device("cpu"))
    loader = TrainLoader(
        dataset, whole, global_batch=4, batch_size=4, seed=0, world=world, max_bad_fraction=0.0
    )
    batches = loader.batches(0)
    batch = next(batches)
    batches.close()
    loader.close()
    records = [dataset.read(index)[1] for index in range(len(dataset))]
    assert sum(item["iscrowd"] for record in records for item in record["annotations"]) == 2
    names = {record["image_id"]: record["file_name"].rpartition("/")[2] for record in records}
    order = [names[image_id] for image_id in batch.image_ids]
    assert sorted(order) == sorted(ANNOTATIONS)
    targets = [as_torchvision_trains(ANNOTATIONS[name]) for name in order]
    matched = assert_same(network(version, 2), batch.images, batch.boxes, batch.labels, targets)
    learnt = {name: int((row >= 0).sum()) for name, row in zip(order, matched, strict=True)}
    assert learnt["alone.jpg"] == learnt["none.jpg"] == 0 < min(learnt["among.jpg"], learnt["plain.jpg"])
