import json
import re

import pytest

from trainer.config import DataConfig
from trainer.data import problems as reasons
from trainer.data.annotations import build, clean
from trainer.data.problems import Problems
from trainer.data.sources.base import UNKNOWN, Box, Category, Entry, Listing
from trainer.errors import DataError

CATEGORIES = [Category("cat", 3), Category("dog", 17), Category("cow", 90)]


def entry(name: str, *categories: int) -> Entry:
    boxes = [Box(category, (1.0, 2.0, 3.0, 4.0), 0.0, 0) for category in categories]
    return Entry(name, name, 10, 10, boxes)


def listing(**splits: list[Entry]) -> Listing:
    return Listing(list(CATEGORIES), splits, "")


def test_labels_are_contiguous_and_keep_the_original_ids():
    forms, _ = build(listing(train=[entry("a.jpg", 0, 1, 2)], val=[entry("b.jpg", 2)]), DataConfig())
    assert forms["train"]["categories"] == forms["val"]["categories"]
    assert forms["train"]["categories"] == [
        {"id": 0, "name": "cat", "original_id": 3},
        {"id": 1, "name": "dog", "original_id": 17},
        {"id": 2, "name": "cow", "original_id": 90},
    ]
    assert [box["category_id"] for box in forms["train"]["annotations"]] == [0, 1, 2]
    assert [box["category_id"] for box in forms["val"]["annotations"]] == [2]


def test_ids_are_unique_over_splits_and_annotation_ids_begin_at_1():
    forms, entries = build(
        listing(train=[entry("a.jpg", 0), entry("b.jpg", 1, 2)], val=[entry("a.jpg", 2)]), DataConfig()
    )
    images = [image["id"] for form in forms.values() for image in form["images"]]
    boxes = [box["id"] for form in forms.values() for box in form["annotations"]]
    assert images == [1, 2, 3] and boxes == [1, 2, 3, 4]
    assert [item.file_name for item in entries["train"]] == [
        image["file_name"] for image in forms["train"]["images"]
    ]


def test_classes_filter_by_name_and_order():
    forms, _ = build(
        listing(train=[entry("a.jpg", 0, 1, 2)], val=[entry("b.jpg", 1)]), DataConfig(classes=["cow", "cat"])
    )
    assert [item["name"] for item in forms["train"]["categories"]] == ["cow", "cat"]
    assert [box["category_id"] for box in forms["train"]["annotations"]] == [1, 0]
    assert forms["val"]["annotations"] == [] and len(forms["val"]["images"]) == 1


def test_unknown_classes_are_an_error_that_lists_the_known():
    with pytest.raises(DataError, match="unknown: sheep") as caught:
        build(listing(train=[entry("a.jpg", 0)]), DataConfig(classes=["cat", "sheep"]))
    assert "cat, dog, cow" in caught.value.fix


def test_a_class_without_boxes_is_kept_and_noted():
    found = listing(train=[entry("a.jpg", 0)], val=[entry("b.jpg", 1)])
    forms, _ = build(found, DataConfig())
    assert len(forms["train"]["categories"]) == 3
    assert found.problems.examples[reasons.CLASS_WITHOUT_BOXES] == ["dog", "cow"]


def test_no_box_at_all_is_an_error():
    with pytest.raises(DataError, match="no training image has a box of cat, dog, cow"):
        build(listing(train=[entry("a.jpg"), entry("b.jpg", UNKNOWN)]), DataConfig())
    with pytest.raises(DataError, match="no training image has a box of cow"):
        build(listing(train=[entry("a.jpg", 0)]), DataConfig(classes=["cow"]))


@pytest.mark.parametrize(
    "names",
    [
        ["a.jpg", "a.png", "A.JPG"],
        ["x/1.jpg", "y/1.jpg", "x_1.jpg"],
        ["a.b.c.jpg", "a_b_c.jpg"],
        ["猫.jpg", "犬.jpg", "é.jpg", "e.jpg"],
        ["a b.jpg", "a_b.jpg", "a-b.jpg"],
        ["n" * 300 + "1.jpg", "n" * 300 + "2.jpg"],
        [".jpg", "...", "_.png"],
        ["noextension", "noextension.jpg"],
    ],
)
def test_keys_are_safe_and_unique(names):
    forms, _ = build(listing(train=[entry(name, 0) for name in names]), DataConfig(val_fraction=0.0))
    images = forms["train"]["images"]
    keys = [image["file_name"].partition(".")[0] for image in images]
    assert len({key.lower() for key in keys}) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,80}", key) for key in keys)
    assert {image.get("original_file_name", image["file_name"]) for image in images} == set(names)


def test_plain_names_stay_as_they_are():
    forms, _ = build(listing(train=[entry("IMG_0001-a.JPG", 0)]), DataConfig())
    assert forms["train"]["images"][0]["file_name"] == "IMG_0001-a.jpg"


def carved(count: int, fraction: float) -> set[str]:
    found = listing(train=[entry(f"{number}.jpg", 0) for number in range(count)])
    forms, _ = build(found, DataConfig(val_fraction=fraction))
    assert sum(len(form["images"]) for form in forms.values()) == count
    return {image["file_name"] for image in forms.get("val", {"images": []})["images"]}


def test_val_is_carved_stably():
    first, more = carved(1000, 0.1), carved(1200, 0.1)
    assert 70 < len(first) < 130
    assert first < more and all(int(name[:-4]) >= 1000 for name in more - first)


@pytest.mark.parametrize(
    ("count", "fraction", "expected"), [(1, 0.5, 0), (2, 0.001, 1), (2, 1.0, 1), (50, 0.0, 0), (50, 1.0, 49)]
)
def test_val_of_small_sets(count, fraction, expected):
    assert len(carved(count, fraction)) == expected


def test_a_val_split_that_is_there_is_left_alone():
    forms, _ = build(
        listing(train=[entry("a.jpg", 0)] * 1, val=[entry("v.jpg")]), DataConfig(val_fraction=0.9)
    )
    assert [image["file_name"] for image in forms["val"]["images"]] == ["v.jpg"]


def test_no_training_images_is_an_error():
    with pytest.raises(DataError, match="no training images"):
        build(listing(val=[entry("a.jpg", 0)]), DataConfig())


def annotation(*bbox: float, category: int = 0, area: float = 0.0) -> dict:
    return {"id": 1, "image_id": 1, "category_id": category, "bbox": list(bbox), "area": area, "iscrowd": 0}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (annotation(1, 1, 0, 5), reasons.BOX_WITHOUT_AREA),
        (annotation(1, 1, 5, -2), reasons.BOX_WITHOUT_AREA),
        (annotation(1, 1, 0.05, 5), reasons.BOX_WITHOUT_AREA),
        (annotation(20, 1, 5, 5), reasons.BOX_OUTSIDE),
        (annotation(-9, 1, 9, 5), reasons.BOX_OUTSIDE),
        (annotation(1, 1, 5, 5, category=-1), reasons.BOX_UNKNOWN_CATEGORY),
        (annotation(1, 1, 5, 5, category=2), reasons.BOX_UNKNOWN_CATEGORY),
        (annotation(), reasons.BOX_NOT_FINITE),
        (annotation(1, 1, float("nan"), 5), reasons.BOX_NOT_FINITE),
        (annotation(1, float("inf"), 5, 5), reasons.BOX_NOT_FINITE),
    ],
)
def test_bad_boxes_are_dropped_and_counted(bad, reason):
    problems = Problems()
    kept = clean([bad, annotation(1, 2, 3, 4)], 20, 10, 2, problems, "x.jpg")
    assert [box["bbox"] for box in kept] == [[1, 2, 3, 4]]
    assert problems.counts == {reason: 1}
    assert problems.examples[reason][0].startswith("x.jpg")
    assert reason in reasons.BAD_BOXES


def test_boxes_that_stick_out_are_clipped():
    problems = Problems()
    kept = clean([annotation(-2, -3, 30, 8, area=200.0)], 20, 10, 1, problems, "x.jpg")
    assert kept[0]["bbox"] == [0.0, 0.0, 20.0, 5.0]
    assert kept[0]["area"] == 100.0
    assert problems.counts == {reasons.BOX_CLIPPED: 1}
    problems.check("x", images=1, boxes=1, max_bad_fraction=0.0)


def test_the_area_of_the_source_is_kept():
    kept = clean([annotation(0, 0, 5, 5, area=7.5), annotation(0, 0, 5, 5)], 20, 10, 1, Problems(), "x")
    assert [box["area"] for box in kept] == [7.5, 25]


def test_too_much_that_is_bad_lists_the_first_ten():
    problems = Problems()
    for number in range(30):
        problems.add(reasons.BOX_WITHOUT_AREA, f"image{number:02}")
    problems.check("set", images=10, boxes=1000, max_bad_fraction=0.03)
    with pytest.raises(DataError) as caught:
        problems.check("set", images=10, boxes=1000, max_bad_fraction=0.029)
    assert "30 of 1000 boxes are bad" in caught.value.message
    assert "image09" in caught.value.message and "image10" not in caught.value.message


def test_problems_survive_json_and_add_up():
    one, two = Problems(), Problems()
    for number in range(8):
        one.add(reasons.IMAGE_MISSING, f"a{number}")
    two.merge(json.loads(json.dumps(one.to_json())))
    two.merge(one.to_json())
    assert two.counts == {reasons.IMAGE_MISSING: 16}
    assert len(two.examples[reasons.IMAGE_MISSING]) == 10
