"""Texts that name a source, and the names of models that follow from them."""

import os
import shutil

import pytest
from source_rows import entries_of

from tests.trainer.data.sources.test_archives import XML
from trainer.base.errors import DataError
from trainer.data import source_names, sources
from trainer.data.source_names import dataset_name
from trainer.data.sources.coco import CocoSource
from trainer.data.sources.voc import VocSource


def test_a_source_means_the_same_from_every_folder(make_coco, monkeypatch):
    root = make_coco(train=["a.jpg"])
    monkeypatch.chdir(root.parent)
    assert sources.parse("coco:coco/").uri == sources.parse(f"coco:{root}").uri == f"coco:{root}"
    monkeypatch.setenv("HOME", str(root.parent))
    assert sources.parse("coco:~/coco").uri == f"coco:{root}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no path"),
        ("  ", "has no path"),
        ("coco:", "has no path"),
        ("coco:/no/such/place", "/no/such/place does not exist"),
        ("/no/such/place", "/no/such/place does not exist"),
        ("sampel", "does not exist"),
        ("labelme:/data", "unknown kind 'labelme'"),
        ("ftp://bucket/x", "unknown kind 'ftp'"),
    ],
)
def test_what_is_no_source_is_named_with_what_is(text, message):
    with pytest.raises(DataError, match=message) as caught:
        sources.parse(text)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("sample:images=30", []),
        ("coco:2017, base=s3://mirror/", ["s3://mirror"]),
        (
            "openimages:images=/a/ids.txt,base=s3://mirror",
            ["/a/ids.txt", "s3://mirror", source_names.OpenImages.pixels],
        ),
        ("voc:/no/such/place", ["/no/such/place"]),
        ("yolo:/no/such/place", ["/no/such/place"]),
        (" s3://bucket/x", ["s3://bucket/x"]),
    ],
)
def test_places_are_named_without_a_look(text, places):
    assert source_names.source_uris(text) == places


def test_empty_and_other_folders(tmp_path):
    with pytest.raises(DataError, match="is empty"):
        sources.parse(str(tmp_path))
    (tmp_path / "photo.jpg").write_bytes(b"x")
    with pytest.raises(DataError, match="neither a COCO JSON nor a COCO, VOC or YOLO folder"):
        sources.parse(str(tmp_path))
    with pytest.raises(DataError, match="neither"):
        sources.parse(str(tmp_path / "photo.jpg"))
    assert os.listdir(tmp_path) == ["photo.jpg"]


@pytest.mark.slow
def test_folders_in_a_bucket_are_recognized(make_coco, make_jpeg, bucket):
    shutil.copytree(make_coco(train=["a.jpg"], val=["b.jpg"]), bucket / "my" / "coco")
    source = sources.parse("s3://bucket/my/coco/")
    listed = source.listing()
    assert source == CocoSource("s3://bucket/my/coco") and list(listed.splits) == ["train", "val"]
    (entry,) = entries_of(listed.splits["val"])
    assert source.read(entry.origin) == make_jpeg()
    (bucket / "my" / "coco" / "val" / "b.jpg").write_bytes(b"other")
    assert source.listing().state != listed.state
    for folder, name, data in (
        ("Annotations", "x.xml", XML.encode()),
        ("JPEGImages", "x.jpg", make_jpeg()),
        ("ImageSets/Main", "train.txt", b"x\n"),
    ):
        (bucket / "voc" / folder).mkdir(parents=True)
        (bucket / "voc" / folder / name).write_bytes(data)
    source = sources.parse("s3://bucket/voc")
    assert source == sources.parse("voc:s3://bucket/voc") == VocSource("s3://bucket/voc")
    (entry,) = entries_of(source.listing().splits["train"])
    assert source.read(entry.origin) == make_jpeg() and entry.boxes[0].bbox == (0, 1, 3, 3)
    with pytest.raises(DataError, match="neither"):
        sources.parse("s3://bucket/nothing")


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
    assert dataset_name(source) == name
