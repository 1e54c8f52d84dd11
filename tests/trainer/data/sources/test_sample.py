import io
import pickle

import pytest
from PIL import Image
from source_rows import entries_of

from trainer.base.errors import DataError
from trainer.data import sources
from trainer.data.sources.sample import SampleSource, layout_scene


def test_parameters():
    assert sources.parse("sample") == SampleSource(480, 0, 160)
    assert sources.parse("sample:images=30,seed=7,size=100") == SampleSource(30, 7, 100)
    assert sources.parse("sample:seed=3").uri == "sample:images=480,seed=3,size=160"


@pytest.mark.parametrize("text", ["images", "images=x", "images=-1", "images=0", "size=10", "color=red"])
def test_wrong_parameters_are_named(text):
    with pytest.raises(DataError, match=f"cannot use '{text}'") as caught:
        sources.parse(f"sample:{text}")
    assert "images (" in caught.value.fix


def test_a_scene_depends_on_seed_size_and_number_alone():
    source = pickle.loads(pickle.dumps(SampleSource(12, 5, 120)))
    entry = entries_of(source.listing().splits["val"])[1]
    assert source.read(entry.origin) == SampleSource(12, 5, 120).read(entry.origin)
    assert source.read(entry.origin) != SampleSource(12, 6, 120).read(entry.origin)
    assert layout_scene(5, 3, 120) == layout_scene(5, 3, 120) != layout_scene(5, 4, 120)


def test_splits_do_not_share_scenes():
    listing = SampleSource(30, 0, 100).listing()
    scenes = [entry.origin for rows in listing.splits.values() for entry in entries_of(rows)]
    assert {split: len(entries_of(rows)) for split, rows in listing.splits.items()} == {
        "train": 30,
        "val": 5,
        "test": 5,
    }
    assert len(set(scenes)) == 40


def test_images_have_the_size_and_boxes_that_are_annotated():
    source = SampleSource(40, 1, 128)
    for entry in entries_of(source.listing().splits["train"]):
        image = Image.open(io.BytesIO(source.read(entry.origin)))
        assert image.format == "JPEG" and image.mode == "RGB"
        assert image.size == (entry.width, entry.height)
        for box in entry.boxes:
            x, y, w, h = box.bbox
            assert x >= 0 and y >= 0 and w > 0 and h > 0
            assert x + w <= entry.width and y + h <= entry.height
            assert 0 < box.area <= w * h
