"""Public reports about class numbers: each situation, and what kubedet answers."""

import dataclasses

import pytest
import torch
from bundles import make_bundle
from PIL import Image

import kubedet
from trainer.model.architecture import build
from trainer.model.pretrained import load_pretrained
from trainer.model.retinanet.options import RetinaNetOptions
from trainer.model.rfdetr.options import RFDetrOptions

NARROW = RetinaNetOptions(backbone="resnet18", backbone_width=8, fpn_channels=16, head_depth=1)
BOX = [4, 4, 20, 20]


def three_classes(sets, ids):
    """A set of one image for each of three categories, in the order of their ids."""
    names = dict(zip(ids, ("screw", "nut", "washer"), strict=True))
    sets.coco([(f"image {number}", number, BOX) for number in ids], names)
    return sets.read("coco", val_fraction=0.0)


def labels(dataset):
    return [item["category_id"] for item in dataset.annotations()["annotations"]]


def test_rf_detr_961_detections_have_the_category_ids_of_the_data(sets, tmp_path):
    """Category ids that begin with 1 came back one less; here ids and names are those of the file."""
    dataset = three_classes(sets, ids=(1, 2, 10))
    assert labels(dataset) == [0, 1, 2]
    model = kubedet.load(make_bundle(tmp_path / "model", classes=dataset.categories))
    found = model.predict(Image.new("RGB", (96, 96), "white"))
    assert (found.labels.tolist(), found.class_names) == ([1], ["nut"])
    assert [item["category_id"] for item in found.to_coco()] == [2]


@pytest.mark.parametrize("first", [0, 1])
def test_rf_detr_262_ids_may_begin_with_0_or_1(sets, first):
    """Ids from 1 gave a class too many, ids from 0 ended the evaluation; here both are the same training."""
    dataset = three_classes(sets, ids=range(first, first + 3))
    assert labels(dataset) == [0, 1, 2] and len(dataset.categories) == 3


def test_rf_detr_509_classes_of_pretrained_weights_do_not_stay(tmp_path):
    """A model for two classes kept the 91 outputs of its weights, and found cars; here it has two outputs."""
    torch.save(build(NARROW, 91).state_dict(), tmp_path / "weights.pt")
    detector = build(dataclasses.replace(NARROW, score_threshold=0.0), 2).eval()
    load_pretrained(detector, str(tmp_path / "weights.pt"))
    found = detector.predict(torch.randint(0, 256, (1, 3, 96, 96), dtype=torch.uint8))
    assert set(found.labels[0, : found.num[0]].tolist()) == {0, 1}


@pytest.mark.slow
def test_geti_6023_coco_classes_of_rf_detr_have_the_numbers_of_the_data(tmp_path):
    """Weights with 91 outputs found COCO's ids, with their gaps, where names were numbered 0 to 79."""
    pytest.importorskip("transformers")
    options = RFDetrOptions(width=0.25, queries=10, groups=1)
    published = build(options, 91)
    published.class_embed.bias.data = torch.arange(91.0)
    torch.save(published.state_dict(), tmp_path / "weights.pt")
    detector = build(options, 80)
    load_pretrained(detector, str(tmp_path / "weights.pt"))
    gaps = {0, 12, 26, 29, 30, 45, 66, 68, 69, 71, 83}  # Ids without a class of COCO 2017.
    assert detector.class_embed.bias.tolist() == [number for number in range(91) if number not in gaps]


def test_d_fine_343_some_of_the_classes_of_the_weights(sets):
    """Fine-tuning on classes 1 and 4 of COCO needed ids from 0 on, which then named other classes."""
    sets.coco([("a", 4, BOX), ("b", 1, BOX)], {1: "person", 4: "motorcycle"})
    dataset = sets.read("coco", val_fraction=0.0)
    assert [(item["name"], item["original_id"]) for item in dataset.categories] == [
        ("person", 1),
        ("motorcycle", 4),
    ]
    assert labels(dataset) == [1, 0]


def test_deimv2_64_the_last_class_has_a_place(sets):
    """With ids 1 to 15 and 15 classes an index was out of range on the GPU; gaps do no harm here either."""
    sets.coco(
        [(f"image {number}", number, BOX) for number in (1, 7, 15, 900)],
        {number: f"class {number}" for number in (*range(1, 16), 900)},
    )
    dataset = sets.read("coco", val_fraction=0.0)
    assert labels(dataset) == [0, 6, 14, 15] and len(dataset.categories) == 16
    image = torch.randint(0, 256, (1, 3, 96, 96), dtype=torch.uint8)
    boxes, last = torch.tensor([[[4.0, 4.0, 24.0, 24.0]]]), torch.tensor([[15]])
    losses = build(NARROW, len(dataset.categories))(image, boxes, last)
    assert all(torch.isfinite(loss) for loss in losses.values())
