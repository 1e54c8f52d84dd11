"""How a contact sheet is laid out; what is on it: tests/pipelines/commands/test_data.py."""

import numpy as np
from PIL import Image

from trainer.data.data_views import Picture
from trainer.data.preview import TILE, sheet


def test_a_name_is_right_below_its_picture_and_no_frame_crosses_a_label():
    wide = Image.new("RGB", (200, 100), (1, 2, 3))
    boxes = [(0, [10, 40, 150, 50], False), (1, [15, 20, 150, 50], False)]
    drawn = sheet([Picture("a.jpg", wide, boxes), Picture("b.jpg", wide, [])], ["first", "second"])
    assert drawn.height < TILE
    pixels = np.asarray(drawn)
    caption = pixels[8 + TILE // 2 : 8 + TILE // 2 + 18, 8:50]
    assert (caption < 100).any(), "dark letters on paper"
    # The second box's left side, x = 8 + 24, would run through the first one's label at y = 64 - 12.
    label = pixels[8 + 64 - 10 : 8 + 64 - 2, 8 + 16 : 8 + 40]
    assert not (label == (209, 73, 91)).all(axis=2).any()
