"""Boxes with their names in images: colours, places of the names, and letters that no font has."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from PIL import Image, ImageDraw

from trainer import report
from trainer.data import box_labels as module
from trainer.data.box_labels import (
    COLOURS,
    LabelledBox,
    _luminance,
    draw_boxes,
    ink,
    place_labels,
    text_renderer,
)

CANVAS = (400, 300)
SIGHT = {
    "usual": np.eye(3),
    # Machado, Oliveira and Fernandes 2009, severity 1.0, on linear light.
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]]
    ),
}


def seen(colour, sight):
    """A colour as CIE L*a*b*, which has distances as people see them."""
    rgb = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(SIGHT[sight] @ linear, 0, 1) / to_xyz.sum(axis=1)
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def nearest(colours, sight):
    return min(
        np.linalg.norm(seen(one, sight) - seen(other, sight))
        for one, other in itertools.combinations(colours, 2)
    )


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_are_told_apart_whatever_colours_an_eye_sees(sight):
    assert nearest(COLOURS, sight) > 12


@pytest.mark.parametrize("page", ["evaluation_page.css.jinja", "shards_page.html.jinja"])
def test_so_are_the_curves_of_both_pages_on_white_and_on_dark(page):
    text = (Path(report.__file__).parent / page).read_text()
    parts = text.split("@media (prefers-color-scheme: dark)")[:2]
    light, dark = (re.findall(r"--series-\d: (#\w{6})", part) for part in parts)
    assert len(light) == len(dark) in (3, 8)
    for colours, card in ((light, "#ffffff"), (dark, "#1a2029")):
        assert min(nearest(colours, sight) for sight in SIGHT) > 12
        contrasts = [_contrast(one, card) for one in colours]
        assert min(contrasts) > 2.2 and min(contrasts[:3]) > 3


def _contrast(one, other):
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("paper", COLOURS)
def test_names_are_read_on_their_colour(paper):
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


def test_the_same_box_again_and_again_covers_least_where_there_is_no_room():
    labels = rectangles([(10.0, 10.0, 30.0, 30.0)] * 12, (60, 20), canvas=(64, 44))
    assert all(x >= 0 and y >= 0 and right <= 64 and low <= 44 for x, y, right, low in labels)
    assert covered(labels[0], labels[1]) < 60 * 20 / 3


def test_an_image_that_is_lower_than_a_line_of_text_is_drawn_nevertheless():
    image = Image.new("RGB", (30, 6), "white")
    draw_boxes(image, [LabelledBox((2.0, 1.0, 9.0, 4.0), 0, "name of a class")], line=2, size=12)
    assert np.asarray(image).min() < 200


def test_first_boxes_lie_on_top_and_no_frame_crosses_a_name():
    image = Image.new("RGB", CANVAS, "#808080")
    boxes = [
        LabelledBox((100.0, 100.0, 200.0, 200.0), 0, "one"),
        LabelledBox((110.0, 60.0, 190.0, 220.0), 5, "two"),
    ]
    draw_boxes(image, boxes, line=3, size=14)
    assert image.getpixel((100, 150)) == (0x00, 0x72, 0xB2)
    name = np.asarray(image)[84:99, 100:130]
    assert not (name == (0xD5, 0x5E, 0x00)).all(axis=2).any(), "a frame of the other box"
    assert (name == (0x00, 0x72, 0xB2)).all(axis=2).any()


@pytest.mark.parametrize("ground", ["#000000", "#ffffff", *COLOURS])
def test_every_frame_is_seen_on_every_picture(ground):
    for label in range(len(COLOURS)):
        image = Image.new("RGB", (60, 60), ground)
        draw_boxes(image, [LabelledBox((20.0, 30.0, 50.0, 55.0), label, "")], line=2, size=12)
        around = np.asarray(image)[40, 17:24]
        lightness = [_luminance("#{:02x}{:02x}{:02x}".format(*pixel)) for pixel in around]
        assert (max(lightness) + 0.05) / (min(lightness) + 0.05) > 1.5


MISSING = "\U000e0fff"
"""A code point that is no character, and so in no font."""


def ink_of(text, size=24):
    canvas = Image.new("L", (600, 60))
    text_renderer(size).write(ImageDraw.Draw(canvas), (5, 5), text, fill=255)
    return np.asarray(canvas)


def forget():
    for function in vars(module).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


@pytest.fixture
def fonts(tmp_path, monkeypatch):
    """A machine with no font of its own but those that are put into a folder."""
    for name in ("XDG_DATA_HOME", "XDG_DATA_DIRS", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(module, "_MAC_FOLDERS", ())
    folder = tmp_path / "fonts" / "deep"
    folder.mkdir(parents=True)
    forget()
    yield folder
    forget()


def write_font(path, letters, *, empty=False):
    """A font in which each of some letters is a square, or nothing."""
    builder, names = FontBuilder(1000, isTTF=True), [f"letter{ord(letter)}" for letter in letters]
    pen = TTGlyphPen(None)
    if not empty:
        for move, point in (
            (pen.moveTo, (0, 0)),
            *((pen.lineTo, at) for at in ((0, 900), (900, 900), (900, 0))),
        ):
            move(point)
        pen.closePath()
    square, none = pen.glyph(), TTGlyphPen(None).glyph()
    builder.setupGlyphOrder([".notdef", *names])
    builder.setupCharacterMap(dict(zip(map(ord, letters), names, strict=True)))
    builder.setupGlyf({".notdef": none, **dict.fromkeys(names, square)})
    builder.setupHorizontalMetrics(dict.fromkeys([".notdef", *names], (1000, 0)))
    builder.setupHorizontalHeader(ascent=900, descent=-100)
    builder.setupNameTable({"familyName": path.stem, "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)


@pytest.mark.parametrize("text", ["γάτα", "кошка", "élevée", "چای", "חתול", "Łódź", "ñandú", "ệ"])
def test_letters_of_many_scripts_need_no_font_of_the_system(fonts, text):
    pictures = [ink_of(letter).tobytes() for letter in dict.fromkeys(text)]
    assert len(set(pictures)) == len(pictures), "empty boxes are all alike"
    assert "[" not in "".join(part for _, part in module._parts(text))


def test_letters_that_dejavu_lacks_are_of_a_font_of_the_system(fonts):
    write_font(fonts / "Wide.ttf", "猫犬")
    parts = module._parts("a 猫犬 b")
    assert [part for _, part in parts] == ["a ", "猫犬", " b"]
    assert [path.name for path, _ in parts] == ["DejaVuSans.ttf", "Wide.ttf", "DejaVuSans.ttf"]
    assert ink_of("猫").any() and text_renderer(20).width("猫") == 20


def test_what_no_font_has_is_spelled_out(fonts):
    (fonts / "broken.ttf").write_text("no font")
    write_font(fonts / "Empty.ttf", "猫", empty=True)
    assert module._parts("🐈 of 猫犬")[0][1] == "[cat] of [U+732B 72AC]"
    assert module._parts(MISSING)[0][1] == "[U+E0FFF]"
    assert (ink_of("猫") == ink_of("[U+732B]")).all()


def test_the_system_is_looked_through_once_for_a_letter(fonts, monkeypatch):
    for number in range(3):
        write_font(fonts / f"Other{number}.ttf", "犬")
    write_font(fonts / "NotoSansCJK-Regular.ttf", "猫犬")
    asked, has = [], module._has
    monkeypatch.setattr(module, "_has", lambda path, letter: asked.append(path.name) or has(path, letter))
    assert [path.name for path, _ in module._parts("猫")] == ["NotoSansCJK-Regular.ttf"]
    assert asked == ["DejaVuSans.ttf", "NotoSansCJK-Regular.ttf"], "those with many letters first"
    module._parts("猫 again")
    assert asked.count("NotoSansCJK-Regular.ttf") == 1
    assert len(module._system_fonts()) == 4 and module._system_fonts() is module._system_fonts()


def test_accents_stay_on_their_letters_and_variants_without_a_shape_are_left_out(fonts):
    assert module._parts("e\u0301")[0][1] == "é"
    assert module._parts("x\u0301")[0][1] == "x\u0301"
    assert module._parts("☀\ufe0f")[0][1].replace("\ufe0f", "") == "☀"


def test_nothing_of_a_name_breaks_the_line(fonts):
    for text in ("a\tb", "a\nb", "a\x1bb"):
        assert module._parts(text)[0][1] == "a b"


def test_long_names_are_cut_at_the_end_that_matters_less(fonts):
    letters = text_renderer(12)
    for end, most in itertools.product((False, True), (0, 20, 60)):
        text = letters.shortened("photographs/of/猫s/one.jpg", most, end=end)
        assert letters.width(text) <= max(most, letters.width("…"))
    assert letters.shortened("abcdefghijkl", 50).startswith("abc")
    assert letters.shortened("abcdefghijkl", 50, end=True).endswith("jkl")
    assert letters.shortened("short", 500) == "short"


def test_width_and_height_are_those_of_the_picture(fonts):
    ink = np.argwhere(ink_of("Ågj кошка"))
    (top, left), (bottom, right) = ink.min(axis=0), ink.max(axis=0)
    letters = text_renderer(24)
    assert top >= 5 and bottom < 5 + letters.height and bottom - top > letters.height - 4
    assert abs((right - left) - letters.width("Ågj кошка")) < 6
