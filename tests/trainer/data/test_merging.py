"""A set and corrections of it become a new one, which is a source at once."""

import io
import json
import os
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from trainer.base.errors import ConfigError, DataError
from trainer.data import merging, sources
from trainer.data.merging import merge

CATEGORIES = [{"id": 3, "name": "cat"}, {"id": 9, "name": "dog"}]


def jpeg(number, size=(40, 30), orientation=1):
    """An image like no other."""
    buffer, image = io.BytesIO(), Image.new("RGB", size, (number * 7 % 256, number * 31 % 256, 90))
    exif = image.getexif()
    exif[0x0112] = orientation
    image.save(buffer, "JPEG", exif=exif if orientation != 1 else Image.Exif())
    return buffer.getvalue()


def coco(images, categories, numbers=True):
    """COCO JSON of images as (name, [(category id, box), ...]), ids counted from 1."""
    entries = [
        {"id": place if numbers else str(place), "file_name": name, "width": 40, "height": 30}
        for place, (name, _) in enumerate(images, 1)
    ]
    boxes = [
        {"image_id": entries[place]["id"], "category_id": category, "bbox": box, **rest}
        for place, (_, listed) in enumerate(images)
        for category, box, *more in listed
        for rest in [more[0] if more else {}]
    ]
    annotations = [{"id": place, **box} for place, box in enumerate(boxes, 1)]
    return {"images": entries, "annotations": annotations, "categories": categories}


def write_set(folder, splits, categories=CATEGORIES, data=None):
    """A COCO folder; `splits` is {split: images}, `data` the bytes by name."""
    (folder / "annotations").mkdir(parents=True)
    for split, images in splits.items():
        path = folder / "annotations" / f"instances_{split}.json"
        path.write_text(json.dumps(coco(images, categories)))
        for name, _ in images:
            target = folder / "images" / split / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data[name])
    return str(folder)


def write_zip(path, images, categories=CATEGORIES, data=None):
    """Corrections as the page gives them."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("annotations/instances_train.json", json.dumps(coco(images, categories)))
        for name, _ in images:
            archive.writestr(f"images/{name}", data[name])
    return str(path)


@pytest.fixture
def base(tmp_path):
    """Three images of train, one of val."""
    data = {f"{name}.jpg": jpeg(number) for number, name in enumerate("abcv")}
    train = [("a.jpg", [(3, [1, 2, 10, 10])]), ("b.jpg", [(9, [3, 4, 12, 9])]), ("c.jpg", [])]
    return write_set(tmp_path / "cards", {"train": train, "val": [("v.jpg", [(3, [5, 5, 5, 5])])]}, data=data)


def content(folder):
    """{split: {file name: [(class, box), ...]}} of a set as a training reads it."""
    listing = sources.parse(f"coco:{folder}").listing()
    names = [category.name for category in listing.categories]
    whole = {}
    for split, rows in listing.splits.items():
        whole[split] = {
            row["file_name"]: [(names[box["category"]], [box[a] for a in "xywh"]) for box in row["boxes"]]
            for batch in rows.batches()
            for row in batch.to_pylist()
        }
    assert not listing.problems.counts
    return whole


def ids(folder):
    """Ids of all images, and of all annotations."""
    files = [json.loads(path.read_text()) for path in sorted(Path(folder, "annotations").glob("*.json"))]
    return ([item["id"] for file in files for item in file[kind]] for kind in ("images", "annotations"))


def test_an_image_that_was_corrected_has_the_new_boxes_in_its_split(base, tmp_path):
    # Another name, another id, other ids of classes; the same bytes.
    corrected = [
        ("photo.jpg", [(1, [20, 10, 8, 8]), (2, [0, 0, 4, 4])]),
        ("held.jpg", []),
        ("new.jpg", [(2, [1, 1, 6, 6])]),
    ]
    data = {"photo.jpg": jpeg(0), "held.jpg": jpeg(3), "new.jpg": jpeg(77)}
    classes = [{"id": 1, "name": "dog"}, {"id": 2, "name": "cat"}]
    corrections = write_zip(tmp_path / "corrections.zip", corrected, classes, data)
    merged = merge(base, [corrections], str(tmp_path / "more" / "cards"))
    assert content(tmp_path / "more/cards") == {
        "train": {
            "a.jpg": [("dog", [20, 10, 8, 8]), ("cat", [0, 0, 4, 4])],
            "b.jpg": [("dog", [3, 4, 12, 9])],
            "c.jpg": [],
            "new.jpg": [("cat", [1, 1, 6, 6])],
        },
        "val": {"v.jpg": []},
    }
    assert merged.images == {"train": 4, "val": 1} and merged.boxes == {"train": 4, "val": 0}
    assert merged.corrected == {"train": 1, "val": 1} and merged.added == 1 and not merged.new_classes
    for numbers in ids(tmp_path / "more/cards"):
        assert sorted(numbers) == list(range(1, len(numbers) + 1))
    files = json.loads((tmp_path / "more/cards/annotations/instances_train.json").read_text())
    assert files["categories"] == CATEGORIES
    assert (tmp_path / "more/cards/images/train/a.jpg").read_bytes() == jpeg(0)
    # Its models are called as those of the first set.
    assert os.listdir(tmp_path / "more") == ["cards"]


def test_two_images_of_one_name_are_both_there(base, tmp_path):
    corrections = write_zip(tmp_path / "c.zip", [("A.JPG", [(3, [1, 1, 2, 2])])], data={"A.JPG": jpeg(50)})
    merged = merge(base, [corrections], str(tmp_path / "out"))
    names = set(content(tmp_path / "out")["train"])
    assert {"a.jpg", "b.jpg", "c.jpg"} < names and len(names) == 4 and "A.JPG" not in names
    (renamed,) = merged.renamed
    assert renamed.startswith("A.JPG of ") and (names - {"a.jpg", "b.jpg", "c.jpg"}).pop() in renamed


def test_a_new_class_is_named_and_gets_a_new_id(base, tmp_path):
    classes = [{"id": 3, "name": "fox"}, {"id": 4, "name": "cat"}]
    images, data = [("n.jpg", [(3, [1, 1, 2, 2])])], {"n.jpg": jpeg(50)}
    merged = merge(base, [write_zip(tmp_path / "c.zip", images, classes, data)], str(tmp_path / "out"))
    assert merged.new_classes == ["fox"]
    assert content(tmp_path / "out")["train"]["n.jpg"] == [("fox", [1, 1, 2, 2])]
    file = json.loads((tmp_path / "out/annotations/instances_train.json").read_text())
    assert file["categories"] == [*CATEGORIES, {"id": 10, "name": "fox"}]


@pytest.mark.parametrize(
    ("category", "data", "message"),
    [("Dog ", jpeg(50), "'Dog ' of .* and 'dog' of"), ("dog", b"junk", r"c\.zip: n\.jpg: not an image")],
)
def test_corrections_that_cannot_be_used_are_named_and_leave_nothing(base, tmp_path, category, data, message):
    classes = [{"id": 1, "name": category}]
    corrections = write_zip(tmp_path / "c.zip", [("n.jpg", [])], classes, {"n.jpg": data})
    with pytest.raises(DataError, match=message):
        merge(base, [corrections], str(tmp_path / "out"))
    assert sorted(os.listdir(tmp_path)) == ["c.zip", "cards"]


def test_of_two_corrections_of_one_image_the_last_is_taken_and_named(base, tmp_path):
    first = write_zip(tmp_path / "1.zip", [("x.jpg", [(3, [1, 1, 2, 2])])], data={"x.jpg": jpeg(0)})
    again = write_zip(tmp_path / "2.zip", [("y.jpg", [(3, [1, 1, 2, 2])])], data={"y.jpg": jpeg(0)})
    other = write_zip(tmp_path / "3.zip", [("z.jpg", [(3, [9, 9, 2, 2])])], data={"z.jpg": jpeg(0)})
    merged = merge(base, [first, again, other], str(tmp_path / "out"))
    (contested,) = merged.contested
    assert contested.startswith("z.jpg of ") and "3.zip" in contested and "2.zip" in contested
    assert content(tmp_path / "out")["train"]["a.jpg"] == [("cat", [9, 9, 2, 2])]


def test_boxes_of_which_a_correction_says_nothing_stay(tmp_path):
    boxes = [(3, [1, 1, 5, 5]), (9, [2, 2, 5, 5]), (3, [0, 0, 30, 30], {"iscrowd": 1, "area": 7})]
    base = write_set(tmp_path / "cards", {"train": [("a.jpg", boxes)]}, data={"a.jpg": jpeg(0)})
    cats = [{"id": 1, "name": "cat"}]
    corrections = write_zip(tmp_path / "c.zip", [("a.jpg", [(1, [4, 4, 5, 5])])], cats, {"a.jpg": jpeg(0)})
    merged = merge(base, [corrections], str(tmp_path / "out"))
    assert merged.boxes_kept == 2
    annotations = json.loads((tmp_path / "out/annotations/instances_train.json").read_text())["annotations"]
    assert [(item["category_id"], item["bbox"], item["iscrowd"], item["area"]) for item in annotations] == [
        (3, [4, 4, 5, 5], 0, 25),
        (9, [2, 2, 5, 5], 0, 25),
        (3, [0, 0, 30, 30], 1, 7),
    ]


def test_boxes_of_a_turned_image_and_of_a_yolo_set_are_in_displayed_pixels(tmp_path):
    folder = tmp_path / "cards"
    for kind in ("images", "labels"):
        (folder / kind).mkdir(parents=True)
    (folder / "data.yaml").write_text("names: [cat]\ntrain: images\n")
    (folder / "images/a.jpg").write_bytes(jpeg(1, orientation=6))  # 30 wide and 40 high as it is displayed.
    (folder / "labels/a.txt").write_text("0 0.5 0.5 0.2 0.1\n")
    cats, data = [{"id": 1, "name": "cat"}], {"n.jpg": jpeg(5)}
    corrections = write_zip(tmp_path / "c.zip", [("n.jpg", [])], cats, data)
    merge(f"yolo:{folder}", [corrections], str(tmp_path / "out"))
    file = json.loads((tmp_path / "out/annotations/instances_train.json").read_text())
    assert (file["images"][0]["width"], file["images"][0]["height"]) == (30, 40)
    assert file["annotations"][0]["bbox"] == pytest.approx([12, 18, 6, 4])
    first, added = content(tmp_path / "out")["train"].values()
    assert first[0][1] == pytest.approx([12, 18, 6, 4]) and added == []


def test_unreadable_images_of_the_set_are_named(base, tmp_path, monkeypatch):
    corrections = write_zip(tmp_path / "c.zip", [("n.jpg", [])], data={"n.jpg": jpeg(50)})
    Path(base, "images/train/b.jpg").write_bytes(b"junk")
    with pytest.raises(DataError, match=r"1 of 4 images of .* cannot be read: b\.jpg: not an image"):
        merge(base, [corrections], str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(merging, "_MAX_BAD_FRACTION", 0.5)
    merged = merge(base, [corrections], str(tmp_path / "out"))
    assert merged.left_out == ["b.jpg: not an image that can be read"]
    assert set(content(tmp_path / "out")["train"]) == {"a.jpg", "c.jpg", "n.jpg"}


def test_nothing_is_written_over_and_an_empty_folder_is_taken(base, tmp_path):
    corrections = write_zip(tmp_path / "c.zip", [("n.jpg", [])], data={"n.jpg": jpeg(50)})
    (tmp_path / "out").mkdir()
    merge(base, [corrections], str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="already exists"):
        merge(base, [corrections], str(tmp_path / "out"))
    with pytest.raises(DataError, match="cannot be written to s3://"):
        merge(base, [corrections], "s3://bucket/out")
