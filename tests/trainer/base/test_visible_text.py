"""Names of other people's classes as lines of tables."""

import pytest

from trainer.base.visible_text import aligned, cells, one_line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("tab\tname", "tab name"),
        ("two\nlines\r", "two lines "),
        ("\x1b[31mred", " [31mred"),
        ("turned \u202eback", "turned  back"),
        ("e\u0301le\u0300ve", "élève"),
        ("چای\u200cخانه", "چای\u200cخانه"),
        ("猫 🐈", "猫 🐈"),
    ],
)
def test_every_character_only_takes_its_place(text, line):
    assert one_line(text) == line


@pytest.mark.parametrize(
    "text", ["cat", "猫", "a\tb", "very long name of a class", "猫猫猫猫猫猫猫", "e\u0301", ""]
)
@pytest.mark.parametrize("right", [False, True])
def test_columns_stay_where_they_are(text, right):
    cell = aligned(text, 10, right=right)
    assert cells(cell) == 10 and "\t" not in cell
    assert ("…" in cell) == (cells(text) > 10)
    assert (cell.startswith(" ") if right else cell.endswith(" ")) or cells(text) >= 9


def test_a_letter_of_two_columns_counts_as_two():
    assert (cells("猫"), cells("cat")) == (2, 3)
    assert aligned("猫", 4) == "猫  " and aligned("猫", 4, right=True) == "  猫"
