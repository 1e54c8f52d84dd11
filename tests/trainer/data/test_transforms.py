"""Geometry and colour of a sample, followed on pictures whose answer is known."""

import dataclasses

import numpy as np
import pytest
import torch

from trainer.config.schema import LoaderConfig
from trainer.data.transforms import (
    FILL,
    View,
    color_map,
    letterbox,
    move_boxes,
    render,
    sample_draws,
)

CONFIG = LoaderConfig(image_size=96, flip=0.0)


def drawn(image, view, size):
    pixels = np.full((size, size, 3), 7, np.uint8)
    render(image.flip(0) if view.flip else image, view, pixels)
    return torch.from_numpy(pixels).permute(2, 0, 1)


@pytest.mark.parametrize(("height", "width", "scale"), [(48, 96, 1.0), (200, 100, 0.48), (30, 20, 3.2)])
def test_letterbox_keeps_the_aspect_and_fills_the_rest(height, width, scale):
    square, factor = letterbox(torch.full((3, height, width), 200, dtype=torch.uint8), 96)
    assert factor == pytest.approx(scale) and square.shape == (3, 96, 96)
    inside_height, inside_width = round(height * scale), round(width * scale)
    assert (square[:, :inside_height, :inside_width] == 200).all()
    assert (square[:, inside_height:] == FILL).all() and (square[:, :, inside_width:] == FILL).all()


def plainly(image, view, size):
    """The picture of a view, with an operation for each step of it."""
    left, top, width, height = view.crop
    x, y, place_width, place_height = view.place
    seen = image[:, top : top + height, left : left + width]
    seen = torch.nn.functional.interpolate(
        seen[None], (place_height, place_width), mode="bilinear", antialias=True
    )
    square = torch.full((3, size, size), FILL, dtype=torch.uint8)
    square[:, y : y + place_height, x : x + place_width] = seen[0]
    return square.flip([axis for axis, flip in ((2, view.flip), (1, view.flip_vertical)) if flip])


@pytest.mark.parametrize("flips", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    ("crop", "place"),
    [
        ((0, 0, 61, 47), (0, 5, 96, 74)),  # as wide as the square
        ((0, 0, 61, 47), (3, 0, 40, 31)),
        ((0, 0, 61, 47), (35, 49, 61, 47)),  # as it is
        ((9, 6, 37, 41), (0, 0, 96, 96)),
        ((7, 0, 48, 47), (11, 2, 48, 47)),
        ((60, 46, 1, 1), (95, 95, 1, 1)),
    ],
)
def test_every_view_is_drawn_pixel_by_pixel_as_the_plain_operations_do(crop, place, flips):
    image = torch.randint(0, 256, (3, 47, 61), dtype=torch.uint8, generator=torch.manual_seed(0))
    view = View(1, crop, place, *flips, scale=1.0)
    assert torch.equal(drawn(image, view, 96), plainly(image, view, 96))


@pytest.mark.parametrize("width", [1, 7, 8, 17])
def test_rows_of_any_length_are_turned_around(width):
    image = torch.randint(0, 256, (3, 4, width), dtype=torch.uint8, generator=torch.manual_seed(width))
    view = View(1, (0, 0, width, 4), (5, 2, width, 4), True, False, scale=1.0)
    assert torch.equal(drawn(image, view, 24), plainly(image, view, 24))


@pytest.mark.parametrize(("outside", "kept"), [(14, 1), (16, 0)])
def test_a_box_is_kept_while_a_quarter_of_it_is_visible(outside, kept):
    view = View(1, (outside, 0, 96, 96), (0, 0, 96, 96), False, False, scale=1.0)
    boxes, labels = move_boxes([{"bbox": [0, 0, 20, 20], "category_id": 0, "iscrowd": 0}], view, (96, 96))
    assert len(boxes) == len(labels) == kept


def applied(colour, **limits):
    matrix = color_map(dataclasses.replace(CONFIG, **limits), sample_draws(4, 0, 0)[5:])
    return matrix[:, :3] @ np.array(colour) + matrix[:, 3]


def test_brightness_scales_and_contrast_turns_about_mid_grey():
    bright = applied([0.2, 0.4, 0.6], brightness=0.5)
    assert bright / bright[0] == pytest.approx(np.array([1, 2, 3]), abs=1e-5)
    assert applied([0.5, 0.5, 0.5], contrast=0.5) == pytest.approx([0.5] * 3, abs=1e-6)


def test_hue_changes_the_colour_but_not_the_luma():
    turned = applied([0.8, 0.2, 0.1], hue=0.3)
    luma = np.array([0.299, 0.587, 0.114])
    assert abs(turned - [0.8, 0.2, 0.1]).max() > 0.05
    assert luma @ turned == pytest.approx(luma @ [0.8, 0.2, 0.1], abs=2e-3)


def test_the_randomness_of_samples_stays_what_it_is():
    # A run that goes on under another release is to see the same pictures.
    assert sample_draws(7, 2, 1_743_041)[::4] == pytest.approx(
        [0.0483496170, 0.6719576409, 0.6852725188], abs=1e-9
    )
