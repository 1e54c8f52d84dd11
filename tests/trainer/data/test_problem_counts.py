import pytest

from trainer.base.errors import DataError
from trainer.data import problem_counts as reasons
from trainer.data.problem_counts import EXAMPLES, Problems


def of(**counts: int) -> Problems:
    """Problems by names of constants."""
    counted = Problems()
    for name, count in counts.items():
        for number in range(count):
            counted.add(getattr(reasons, name), f"{name} {number}")
    return counted


@pytest.mark.parametrize(
    ("bad", "listed", "fraction", "passes"),
    [
        (0, 0, 0.0, True),
        (5, 100, 0.05, True),
        (6, 100, 0.05, False),
        (1, 100, 0.0, False),
        (3, 3, 1.0, True),
        (1, 12, 0.02, True),
        (2, 12, 0.02, False),
        (1, 3, 0.02, False),
    ],
)
def test_what_share_may_be_bad(bad, listed, fraction, passes):
    for name, counts in (("IMAGE_MISSING", {"images": listed}), ("BOX_OUTSIDE", {"boxes": listed})):
        counted = of(**{name: bad})
        arguments = {"images": 0, "boxes": 0, "max_bad_fraction": fraction} | counts
        if passes:
            counted.check("the source", **arguments)
        else:
            with pytest.raises(DataError, match=f"the source: {bad} of {listed} (images|boxes) are bad"):
                counted.check("the source", **arguments)


def test_an_error_names_ten_cases_and_what_is_harmless_counts_for_nothing():
    counted = of(IMAGE_MISSING=8, IMAGE_UNREADABLE=8, BOX_CLIPPED=90)
    with pytest.raises(DataError) as caught:
        counted.check("x", images=100, boxes=100, max_bad_fraction=0.1)
    assert caught.value.message.count("\n") == 10 and "image unreadable: IMAGE_UNREADABLE 1" in str(
        caught.value
    )
    of(BOX_CLIPPED=90).check("x", images=100, boxes=100, max_bad_fraction=0.0)


def test_those_of_parts_add_up():
    one, other = of(IMAGE_MISSING=7, BOX_OUTSIDE=1), of(IMAGE_MISSING=7)
    one.merge(other.cases())
    assert one.counts == {reasons.IMAGE_MISSING: 14, reasons.BOX_OUTSIDE: 1}
    assert len(one.examples[reasons.IMAGE_MISSING]) == EXAMPLES
    assert one.summary() == "box outside the image: 1, image missing: 14" and Problems().summary() == ""
    again = Problems()
    again.merge(one.cases())
    assert again == one
