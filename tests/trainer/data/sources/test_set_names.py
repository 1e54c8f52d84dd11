import pytest

from trainer.data.sources import name_of


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("sample:images=480,seed=0,size=160", "sample"),
        ("coco:2017", "coco-2017"),
        ("coco:2017,base=s3://mirror/coco", "coco-2017"),
        ("openimages:subset=mlperf", "openimages"),
        ("yolo:/data/cards", "cards"),
        ("yolo:/data/cards/data.yaml", "cards"),
        ("yolo:/data/cards/aces.yaml", "aces"),
        ("coco:/home/me/Playing Cards/annotations/instances_train2017.json", "Playing-Cards"),
        ("coco:/home/me/cards/train/_annotations.coco.json", "cards"),
        ("coco:/home/me/cards/result.json", "cards"),
        ("coco:s3://bucket/pets/annotations", "pets"),
        ("coco:s3://bucket/data", "bucket"),
        ("voc:/data/VOCdevkit/VOC2012", "VOCdevkit"),
        ("voc:/data/cards/images/train", "cards"),
        ("yolo:/downloads/cards.v3.tar.gz", "cards.v3"),
        ("coco:https://example.org/sets/caf%C3%A9.zip", "cafe"),
        ("voc:/data/\u00c4pfel", "Apfel"),
        ("voc:/data/\u732b", "detector"),
        ("coco:/data/dataset/train", "detector"),
    ],
)
def test_a_set_is_named_after_what_tells_it_from_others(source, name):
    assert name_of(source) == name
