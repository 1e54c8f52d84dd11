import json

from trainer.data.ground_truth import Classes, GroundTruthBuilder, to_coco
from trainer.data.raw_manifest import Category

CLASSES = Classes([Category(0, "Käfer", 3)], {})


def row(number: int, boxes: int) -> dict:
    annotations = [
        {"category_id": 0, "bbox": [1, 2, 3, box], "area": 6, "iscrowd": 0} for box in range(boxes)
    ]
    extra = {"extra": {"verified": {"Käfer": 1, "gone": 0}}} if number % 2 else {}
    size = {"image_id": number, "file_name": f"{number}.jpg", "width": 9, "height": 9}
    return {**size, **extra, "annotations": annotations, "offset": 1}


def test_what_is_written_block_by_block_is_what_all_at_once_gives():
    rows = [row(number, number % 3) for number in range(1, 30)]
    builder = GroundTruthBuilder(CLASSES)
    for begin in range(0, 29, 10):
        block = rows[begin : begin + 10][::-1]
        for shard in (block[::2], block[1::2]):
            builder.add(begin // 10, shard)
    written = json.loads(builder.to_json())
    assert written == to_coco(rows, CLASSES)
    assert [box["id"] for box in written["annotations"]] == list(range(1, 31))
    assert written["images"][0]["verified"] == [0] and "verified" not in written["images"][1]


def test_what_is_verified_holds_for_classes_above_or_below():
    names = ["Animal", "Cat", "Dog", "Tree"]
    categories = [Category(label, name, f"/m/{label}") for label, name in enumerate(names)]
    classes = Classes(categories, {"1": [0], "2": [0]})
    assert classes.verified_labels({"Cat": 1, "gone": 1}) == [0, 1]
    assert classes.verified_labels({"Animal": 0}) == [0, 1, 2]
    assert classes.verified_labels({"Animal": 1, "Dog": 0, "Tree": 0}) == [0, 2, 3]
    written = json.loads(GroundTruthBuilder(classes).to_json())
    assert written == to_coco([], classes)
    assert written["hierarchy"] == {"1": [0], "2": [0]} and "hierarchy" not in to_coco([], CLASSES)


NAMES = ["Animal", "Cat", "Dog", "Person", "Man", "Tree"]
HIERARCHY = {"1": [0], "2": [0], "4": [3]}
