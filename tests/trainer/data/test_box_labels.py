"""Boxes with their names in images, and fonts."""

import itertools

import numpy as np
from PIL import Image

from trainer.data.box_labels import LabeledBox, draw_boxes, text_renderer

CANVAS = (400, 300)


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


def test_long_names_are_cut_at_either_end():
    letters = text_renderer(12)
    for end, most in itertools.product((False, True), (0, 20, 60)):
        text = letters.shorten("photographs/of/cats/one.jpg", most, end=end)
        assert letters.width(text) <= max(most, letters.width("…"))
    assert letters.shorten("abcdefghijkl", 50).startswith("abc")
    assert letters.shorten("abcdefghijkl", 50, end=True).endswith("jkl")
    assert letters.shorten("a\tb\nc", 500) == "a b c"
