"""Boxes with their names in images: colors, places of the names, and fonts."""

import itertools
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from PIL import Image

from trainer.data import box_labels
from trainer.data.box_labels import (
    COLORS,
    LabeledBox,
    _luminance,
    draw_boxes,
    ink,
    place_labels,
    text_renderer,
)

CANVAS = (400, 300)


# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear light.
def _contrast(one, other):
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("paper", COLORS)
def test_names_are_read_on_their_color(paper):
    assert _contrast(paper, ink(paper)) >= 4.5  # WCAG 2, level AA.


def covered(one, other):
    wide = min(one[2], other[2]) - max(one[0], other[0])
    high = min(one[3], other[3]) - max(one[1], other[1])
    return max(wide, 0) * max(high, 0)


def rectangles(boxes, size, canvas=CANVAS):
    places = place_labels(boxes, [size] * len(boxes), canvas)
    return [(x, y, x + size[0], y + size[1]) for x, y in places]


def test_a_name_stands_above_its_box_or_inside_at_the_upper_border():
    assert place_labels([(20.0, 60.0, 90.0, 90.0)], [(40, 15)], CANVAS) == [(20, 45)]
    assert place_labels([(20.0, 5.0, 90.0, 90.0)], [(40, 15)], CANVAS) == [(20, 5)]
    assert place_labels([(380.0, 60.0, 399.0, 90.0)], [(40, 15)], CANVAS) == [(360, 45)]


def test_names_of_boxes_on_one_another_do_not_hide_each_other():
    boxes = [(100.0 + 3 * n, 100.0 + 2 * n, 180.0 + 3 * n, 170.0 + 2 * n) for n in range(8)]
    labels = rectangles(boxes, (70, 16))
    assert not any(covered(*pair) for pair in itertools.combinations(labels, 2))
    for label in labels:
        assert label[0] >= 0 and label[1] >= 0 and label[2] <= CANVAS[0] and label[3] <= CANVAS[1]


def test_an_image_that_is_lower_than_a_line_of_text_is_drawn_nevertheless():
    image = Image.new("RGB", (30, 6), "white")
    draw_boxes(image, [LabeledBox((2.0, 1.0, 9.0, 4.0), 0, "name of a class")], line=2, size=12)
    assert np.asarray(image).min() < 200


def test_first_boxes_lie_on_top_and_no_frame_crosses_a_name():
    image = Image.new("RGB", CANVAS, "#808080")
    boxes = [
        LabeledBox((100.0, 100.0, 200.0, 200.0), 0, "one"),
        LabeledBox((110.0, 60.0, 190.0, 220.0), 5, "two"),
    ]
    draw_boxes(image, boxes, line=3, size=14)
    assert image.getpixel((100, 150)) == (0x00, 0x72, 0xB2)
    name = np.asarray(image)[84:99, 100:130]
    assert not (name == (0xD5, 0x5E, 0x00)).all(axis=2).any(), "a frame of the other box"
    assert (name == (0x00, 0x72, 0xB2)).all(axis=2).any()


def test_a_text_takes_a_font_that_has_its_letters(monkeypatch, tmp_path):
    (tmp_path / "broken.ttf").write_text("no font")
    other = Path(matplotlib.get_data_path(), "fonts", "ttf", "STIXGeneral.ttf")
    monkeypatch.setattr(box_labels, "_system_fonts", lambda: [tmp_path / "broken.ttf", other])
    box_labels._font_with.cache_clear()
    assert box_labels._font_with(frozenset("ño кошка")).name == "DejaVuSans.ttf"
    missing = box_labels._characters(other) - box_labels._characters(box_labels._dejavu())
    assert box_labels._font_with(frozenset({"a", chr(min(missing))})) == other
    assert box_labels._font_with(frozenset("\U000e0fff")).name == "DejaVuSans.ttf"  # In no font.
    box_labels._font_with.cache_clear()


def test_long_names_are_cut_at_either_end():
    letters = text_renderer(12)
    for end, most in itertools.product((False, True), (0, 20, 60)):
        text = letters.shortened("photographs/of/cats/one.jpg", most, end=end)
        assert letters.width(text) <= max(most, letters.width("…"))
    assert letters.shortened("abcdefghijkl", 50).startswith("abc")
    assert letters.shortened("abcdefghijkl", 50, end=True).endswith("jkl")
    assert letters.shortened("a\tb\nc", 500) == "a b c"
