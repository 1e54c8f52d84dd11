import json

import pytest

from trainer.base.errors import DataError
from trainer.data import problem_counts as reasons
from trainer.data.problem_counts import Problems
from trainer.data.shard_writer import clean

NAN = float("nan")


def annotation(*bbox: float, category: int = 0, area: float = 0.0) -> dict:
    return {"category_id": category, "bbox": list(bbox), "area": area, "iscrowd": 0}


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
        (annotation(NAN, NAN, NAN, NAN), reasons.BOX_NOT_FINITE),
        (annotation(1, 1, NAN, 5), reasons.BOX_NOT_FINITE),
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


def test_boxes_below_a_side_are_left_out_and_are_no_error():
    problems = Problems()
    boxes = [annotation(1, 1, 3, 9), annotation(1, 1, 4, 4), annotation(18, 1, 4, 9)]
    kept = clean(boxes, 20, 10, 2, problems, "x.jpg", min_side=4)
    assert [box["bbox"] for box in kept] == [[1, 1, 4, 4]]
    assert problems.counts == {reasons.BOX_SMALL: 2} and reasons.BOX_SMALL not in reasons.BAD_BOXES


def test_what_arithmetic_leaves_outside_is_not_counted():
    problems = Problems()
    box = {"category_id": 0, "bbox": [0.1, -1e-13, 9.9, 10 + 2e-13], "area": 0.0, "iscrowd": 0}
    (kept,) = clean([box], 10, 10, 1, problems, "a.jpg")
    assert kept["bbox"] == [0.1, 0, 9.9, 10] and problems.counts == {}
    clean([box | {"bbox": [0.1, 0, 9.91, 10]}], 10, 10, 1, problems, "a.jpg")
    assert problems.counts == {reasons.BOX_CLIPPED: 1}
