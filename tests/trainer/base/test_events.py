"""Events are read as they were written, and nothing else is one."""

import math

import pytest

from trainer.base import events


def test_a_metric_that_is_not_a_number_is_read_back():
    event = events.ValidationScored(metrics={"coco/AP": 0.3, "coco/APs": math.nan})
    read = events.parse(events.encode(event))
    assert isinstance(read, events.ValidationScored) and math.isnan(read.metrics["coco/APs"])


@pytest.mark.parametrize(
    "line", ["", "{", '{"event":', '{"event":"other"}', '{"event":"scored","metrics":3}']
)
def test_other_lines_are_no_events(line):
    assert events.parse(line) is None
