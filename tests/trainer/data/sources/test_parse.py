import os

import pytest

from trainer.data import sources
from trainer.data.sources.coco import CocoSource
from trainer.data.sources.voc import VocSource
from trainer.errors import DataError


def test_folders_are_recognised(make_coco, tmp_path):
    root = make_coco(train=["a.jpg"])
    assert sources.parse(str(root)) == CocoSource(str(root))
    assert sources.parse(f"file://{root}") == CocoSource(str(root))
    (tmp_path / "voc" / "Annotations").mkdir(parents=True)
    (tmp_path / "voc" / "Annotations" / "a.xml").write_text("<annotation/>")
    assert sources.parse(str(tmp_path / "voc")) == VocSource(str(tmp_path / "voc"))


def test_a_source_means_the_same_from_every_folder(make_coco, monkeypatch):
    root = make_coco(train=["a.jpg"])
    monkeypatch.chdir(root.parent)
    assert sources.parse("coco:coco/").uri == sources.parse(f"coco:{root}").uri == f"coco:{root}"
    monkeypatch.setenv("HOME", str(root.parent))
    assert sources.parse("coco:~/coco").uri == f"coco:{root}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names nothing"),
        ("  ", "names nothing"),
        ("coco:", "names nothing"),
        ("coco:/no/such/place", "/no/such/place does not exist"),
        ("/no/such/place", "/no/such/place does not exist"),
        ("sampel", "does not exist"),
        ("yolo:/data", "unknown kind 'yolo'"),
        ("gs://bucket/x", "unknown kind 'gs'"),
    ],
)
def test_what_is_no_source_is_named_with_what_is(text, message):
    with pytest.raises(DataError, match=message) as caught:
        sources.parse(text)
    assert caught.value.fix


def test_empty_and_other_folders(tmp_path):
    with pytest.raises(DataError, match="is empty"):
        sources.parse(str(tmp_path))
    (tmp_path / "photo.jpg").write_bytes(b"x")
    with pytest.raises(DataError, match="neither a COCO JSON, a COCO folder nor a VOC folder"):
        sources.parse(str(tmp_path))
    with pytest.raises(DataError, match="neither"):
        sources.parse(str(tmp_path / "photo.jpg"))
    assert os.listdir(tmp_path) == ["photo.jpg"]
