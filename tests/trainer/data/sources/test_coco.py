import json
import shutil
from pathlib import Path

import pytest
from source_rows import rows_of

from trainer.base.errors import DataError
from trainer.data import problem_counts as reasons
from trainer.data import sources
from trainer.data.sources import coco
from trainer.data.sources.coco import CocoSource
from trainer.data.sources.source import UNKNOWN, split_of


def listing(path: Path):
    return CocoSource(str(path)).listing()


def boxes_of(rows) -> list[list[dict]]:
    """The boxes of each image."""
    return [row["boxes"] for row in rows_of(rows)]


def corners(box: dict) -> tuple[float, ...]:
    """x, y, width and height."""
    return tuple(box[side] for side in "xywh")


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("instances_train2017.json", "train"), ("train.json", "train"), ("valid", "val"),
        ("instances_val.json", "val"), ("validation.json", "val"), ("image_info_test-dev2017.json", "test"),
        ("latest.json", None), ("interval.json", None), ("Train", "train"),
    ],
)  # fmt: skip
def test_names_of_splits(name, split):
    assert split_of(name) == split


def test_a_folder_as_published(make_coco):
    listed = listing(make_coco(train2017=["000001.jpg", "000002.jpg"], val2017=["000003.jpg"]))
    assert {split: len(rows_of(rows)) for split, rows in listed.splits.items()} == {"train": 2, "val": 1}
    assert [tuple(category) for category in listed.categories] == [("cat", 3), ("dog", 17)]
    row = rows_of(listed.splits["train"])[0]
    assert (row["width"], row["height"], row["original_id"]) == (40, 30, "100")
    boxes = boxes_of(listed.splits["train"])[0]
    assert [(box["category"], corners(box), box["area"]) for box in boxes] == [
        (0, (1, 2, 10, 8), 80), (1, (2, 2, 10, 8), 80),
    ]  # fmt: skip


@pytest.mark.parametrize("place", ["images/train", "images", "JPEGImages", "train2017", ".", "annotations"])
def test_usual_places_of_images(make_coco, place):
    root = make_coco(train=["a.jpg", "b.jpg"])
    (root / "moved").mkdir()
    for image in (root / "train").iterdir():
        image.rename(root / "moved" / image.name)
    (root / "train").rmdir()
    (root / place).mkdir(parents=True, exist_ok=True)
    for image in (root / "moved").iterdir():
        image.rename(root / place / image.name)
    rows = rows_of(listing(root).splits["train"])
    assert [row["fault_reason"] for row in rows] == ["", ""] and all(row["version"] for row in rows)


def test_a_roboflow_export(make_coco):
    root = make_coco(train=["a.jpg"], valid=["b.jpg"])
    for split in ("train", "valid"):
        (root / "annotations" / f"instances_{split}.json").rename(root / split / "_annotations.coco.json")
    (root / "annotations").rmdir()
    listed = sources.parse(str(root)).listing()
    assert {split: rows_of(rows)[0]["file_name"] for split, rows in listed.splits.items()} == {
        "train": "a.jpg", "val": "b.jpg",
    }  # fmt: skip


def test_one_json_is_train_whatever_its_name(make_coco):
    root = make_coco(val2017=["a.jpg"])
    listed = sources.parse(str(root / "annotations" / "instances_val2017.json")).listing()
    assert list(listed.splits) == ["train"] and rows_of(listed.splits["train"])[0]["fault_reason"] == ""
    assert list(listing(root).splits) == ["train"]


def test_subfolders_backslashes_cases_and_accents(make_coco, edit_json):
    names = ["city/a.jpg", "B.JPG", "e\u0301.jpg"]
    root = make_coco(train=names)

    def change(form):
        written = ["city\\a.jpg", "b.jpg", "\u00e9.jpg"]
        for image, name in zip(form["images"], written, strict=True):
            image["file_name"] = name

    edit_json(root / "annotations" / "instances_train.json", change)
    rows = rows_of(listing(root).splits["train"])
    assert [row["fault_reason"] for row in rows] == [""] * 3
    assert [Path(row["origin"]).relative_to(root / "train").as_posix() for row in rows] == names


@pytest.mark.parametrize("name", ["../a.jpg", "/etc/passwd", "x/../../a.jpg", "C:\\a.jpg", "..\\a.jpg", ".."])
def test_names_that_lead_out_of_the_folder_are_refused(make_coco, edit_json, name):
    root = make_coco(train=["a.jpg"])
    path = root / "annotations" / "instances_train.json"
    edit_json(path, lambda form: form["images"][0].update(file_name=name))
    with pytest.raises(DataError, match="refused file_name"):
        listing(root)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ('{"images": [', "is not JSON"),
        ("[" * 100_000, "is not JSON: it is nested too deep"),
        ("[" * 6000 + "]" * 6000, "is not JSON: it is nested too deep"),
        ("[1, 2]", "no list .images."),
        ('{"images": [], "annotations": []}', "it has no list 'categories'"),
        ('{"images": [], "annotations": [], "categories": []}', "lists no images"),
        ('{"images": [3], "annotations": [], "categories": []}', "holds what is no object"),
        ('{"images": [{"id": 1}], "annotations": [], "categories": []}', "lacks a file_name, or an id"),
        ('{"images": [{"id":1,"file_name":"a"}], "annotations": [], "categories": [{}]}', "integer id"),
    ],
)
def test_json_that_is_not_coco(tmp_path, text, message):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(DataError, match=message):
        sources.parse(str(tmp_path / "x.json")).listing()


def test_odd_annotations_do_not_stop_it(make_coco, edit_json):
    root = make_coco(train=["a.jpg"])

    def change(form):
        form["annotations"] += [
            {"image_id": 100, "category_id": 3, "bbox": [1, 2, float("nan"), 4]},
            {"image_id": 100, "category_id": 3, "bbox": "1 2 3 4"},
            {"image_id": 100, "category_id": 3},
            {"image_id": 100, "category_id": 99, "bbox": [1, 2, 3, 4]},
            {"image_id": 100, "category_id": [], "bbox": [1, 2, 3, 4], "area": "x"},
            {"image_id": 5, "category_id": 3, "bbox": [1, 2, 3, 4]},
            {"image_id": None, "category_id": 3, "bbox": [1, 2, 3, 4]},
            {"image_id": 100, "category_id": 3, "bbox": [1, 2, 3, 4], "iscrowd": 1},
        ]

    edit_json(root / "annotations" / "instances_train.json", change)
    listed = listing(root)
    boxes = boxes_of(listed.splits["train"])[0][2:]
    assert [corners(box) for box in boxes] == [(1, 2, 3, 4)] * 3
    assert [box["category"] for box in boxes] == [UNKNOWN, UNKNOWN, 0]
    assert [box["iscrowd"] for box in boxes] == [0, 0, 1]
    assert listed.problems.counts == {
        reasons.BOX_NOT_FINITE: 2, reasons.BOX_ABSENT: 1,
        reasons.BOX_UNKNOWN_IMAGE: 2,
    }  # fmt: skip


def test_an_image_listed_twice_is_one_with_all_boxes(make_coco, edit_json):
    root = make_coco(train=["a.jpg"])

    def change(form):
        form["images"].append({**form["images"][0], "id": 7})
        form["annotations"].append({"image_id": 7, "category_id": 3, "bbox": [5, 5, 5, 5]})

    edit_json(root / "annotations" / "instances_train.json", change)
    listed = listing(root)
    (boxes,) = boxes_of(listed.splits["train"])
    assert len(boxes) == 3
    assert listed.problems.counts == {reasons.IMAGE_LISTED_TWICE: 1}


def test_two_images_with_one_id_are_both_faulty(make_coco, edit_json):
    root = make_coco(train=["a.jpg", "b.jpg", "c.jpg"])
    path = root / "annotations" / "instances_train.json"
    edit_json(path, lambda form: form["images"][1].update(id=100))
    rows = rows_of(listing(root).splits["train"])
    assert {row["file_name"]: (row["fault_reason"], row["fault_detail"]) for row in rows} == {
        "a.jpg": (reasons.IMAGE_ID_TWICE, "id 100"), "b.jpg": (reasons.IMAGE_ID_TWICE, "id 100"),
        "c.jpg": ("", ""),
    }  # fmt: skip


def test_missing_images_are_faults_and_none_at_all_is_an_error(make_coco):
    root = make_coco(train=["a.jpg", "b.jpg"])
    (root / "train" / "b.jpg").unlink()
    faults = [row["fault_reason"] for row in rows_of(listing(root).splits["train"])]
    assert faults == ["", reasons.IMAGE_MISSING]
    shutil.rmtree(root / "train")
    with pytest.raises(DataError, match="are not beside it") as caught:
        listing(root)
    assert "a.jpg" in caught.value.message and "coco_url" in caught.value.fix


def test_categories_must_agree_between_splits(make_coco, edit_json):
    root = make_coco(train=["a.jpg"], val=["b.jpg"])
    path = root / "annotations" / "instances_val.json"
    edit_json(path, lambda form: form["categories"][0].update(name="cow"))
    with pytest.raises(DataError, match="category 3 'cow'"):
        listing(root)
    edit_json(path, lambda form: form["categories"].__setitem__(0, {"id": 50, "name": "cow"}))
    assert [category.name for category in listing(root).categories] == ["cat", "dog", "cow"]


def test_two_files_for_a_split_or_none_for_train(make_coco):
    root = make_coco(train=["a.jpg"], train2=["a.jpg"])
    with pytest.raises(DataError, match="are split 'train'"):
        listing(root)
    other = make_coco("other", val=["a.jpg"], test=["b.jpg"])
    with pytest.raises(DataError, match="no training split"):
        listing(other)


def test_the_state_changes_with_annotations_and_images(make_coco, make_jpeg):
    root = make_coco(train=["a.jpg"])
    states = [listing(root).state, listing(root).state]
    (root / "train" / "a.jpg").write_bytes(make_jpeg(44, 44))
    states.append(listing(root).state)
    path = root / "annotations" / "instances_train.json"
    path.write_text(path.read_text() + "\n")
    states.append(listing(root).state)
    assert states[0] == states[1] and len(set(states)) == 3


def test_urls_that_cannot_be_fetched_are_not_followed(make_coco, edit_json):
    root = make_coco(train=["a.jpg", "b.jpg"])
    path = root / "annotations" / "instances_train.json"
    edit_json(path, lambda form: form["images"][1].update(coco_url="file:///etc/passwd", file_name="x.jpg"))
    assert rows_of(listing(root).splits["train"])[1]["fault_reason"] == reasons.IMAGE_MISSING


def test_a_source_in_an_object_store(make_coco, bucket):
    root = make_coco(train=["a.jpg", "b.jpg"])
    shutil.copytree(root, bucket / "set")
    source = sources.parse("s3://bucket/set")
    assert isinstance(source, CocoSource)
    listed = source.listing()
    origin = rows_of(listed.splits["train"])[1]["origin"]
    assert source.read(origin) == (root / "train" / "b.jpg").read_bytes()
    before = listed.state
    (bucket / "set" / "train" / "b.jpg").write_bytes(b"other")
    assert source.listing().state != before


def test_bytes_of_json_with_surrogates(make_coco, edit_json):
    root = make_coco(train=["a.jpg"])
    path = root / "annotations" / "instances_train.json"
    edit_json(path, lambda form: form["images"].append({"id": 1, "file_name": json.loads('"\\ud800.jpg"')}))
    assert rows_of(listing(root).splits["train"])[1]["fault_reason"] == reasons.IMAGE_MISSING


def test_words_that_are_no_json_wherever_a_block_ends(make_coco, monkeypatch):
    root = make_coco(train=["a.jpg", "NaN, Infinity.jpg"])
    path = root / "annotations" / "instances_train.json"
    text = path.read_text().replace('"area": 80', '"area": NaN', 1).replace("[1, 2,", "[1,-Infinity,", 1)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    for size in (7, 100, 5000):
        monkeypatch.setattr(coco, "_BLOCK", size)
        listed = listing(root)
        rows = rows_of(listed.splits["train"])
        assert [row["file_name"] for row in rows] == ["a.jpg", "NaN, Infinity.jpg"]
        ((second,), (third, _)) = (row["boxes"] for row in rows)
        assert corners(second) == (2, 2, 10, 8) and third["area"] == 80
        assert listed.problems.counts == {reasons.BOX_NOT_FINITE: 1}
