"""Letters in pictures: which font each is of, and what is written where no font has it."""

import itertools

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from PIL import Image, ImageDraw

from trainer.data import box_labels as module
from trainer.data.box_labels import lettering

MISSING = "\U000e0fff"
"""A code point that is no character, and so in no font."""


def ink_of(text, size=24):
    canvas = Image.new("L", (600, 60))
    lettering(size).write(ImageDraw.Draw(canvas), (5, 5), text, fill=255)
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
    assert ink_of("猫").any() and lettering(20).width("猫") == 20


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
    letters = lettering(12)
    for end, most in itertools.product((False, True), (0, 20, 60)):
        text = letters.shortened("photographs/of/猫s/one.jpg", most, end=end)
        assert letters.width(text) <= max(most, letters.width("…"))
    assert letters.shortened("abcdefghijkl", 50).startswith("abc")
    assert letters.shortened("abcdefghijkl", 50, end=True).endswith("jkl")
    assert letters.shortened("short", 500) == "short"


def test_width_and_height_are_those_of_the_picture(fonts):
    ink = np.argwhere(ink_of("Ågj кошка"))
    (top, left), (bottom, right) = ink.min(axis=0), ink.max(axis=0)
    letters = lettering(24)
    assert top >= 5 and bottom < 5 + letters.height and bottom - top > letters.height - 4
    assert abs((right - left) - letters.width("Ågj кошка")) < 6
