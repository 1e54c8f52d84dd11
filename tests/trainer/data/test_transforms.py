"""Geometry and colour of a sample, followed on pictures whose answer is known."""

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import torch

from trainer.config import LoaderConfig
from trainer.data.transforms import FILL, color_map, letterbox, move_boxes, random_view, render, whole_view

CONFIG = LoaderConfig(image_size=96, flip=0.0)


class Sample(NamedTuple):
    image: torch.Tensor
    boxes: np.ndarray
    labels: np.ndarray


def augment(image, boxes, labels, config, generator):
    view = random_view(image.shape[-1], image.shape[-2], config, generator)
    # What a decoder that divides the sides gives, nearly: means of squares.
    small = torch.nn.functional.avg_pool2d(image.float(), view.divisor, ceil_mode=True).to(torch.uint8)
    pixels = np.empty((config.image_size, config.image_size, 3), np.uint8)
    render(small.flip(0) if view.flip else small, view, pixels)
    square = torch.from_numpy(pixels).permute(2, 0, 1)
    # One of two images, of which the other is seen as a whole and has no box.
    views = [whole_view(*image.shape[:0:-1], config.image_size), view]
    inside, kept = move_boxes(boxes, np.ones(len(boxes), np.int64), views, config.image_size)
    return Sample(square, inside, labels[kept])


def picture(height, width, box):
    """A black image with a white rectangle where the box is."""
    image = torch.zeros(3, height, width, dtype=torch.uint8)
    x1, y1, x2, y2 = box
    image[:, y1:y2, x1:x2] = 255
    return image, np.array([box], np.float32), np.array([1])


def white_box(image):
    """Extent of what is bright in a square."""
    rows, columns = torch.nonzero(image[0] > 180, as_tuple=True)
    return [int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1]


@pytest.mark.parametrize(("height", "width", "scale"), [(48, 96, 1.0), (200, 100, 0.48), (30, 20, 3.2)])
def test_letterbox_keeps_the_aspect_and_fills_the_rest(height, width, scale):
    square, found = letterbox(torch.full((3, height, width), 200, dtype=torch.uint8), 96)
    assert found == pytest.approx(scale) and square.shape == (3, 96, 96)
    inside_height, inside_width = round(height * scale), round(width * scale)
    assert (square[:, :inside_height, :inside_width] == 200).all()
    assert (square[:, inside_height:] == FILL).all() and (square[:, :, inside_width:] == FILL).all()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("flips", [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0)])
def test_boxes_follow_the_pixels(seed, flips):
    config = dataclasses.replace(CONFIG, flip=flips[0], flip_vertical=flips[1], scale=[0.6, 1.6])
    image, boxes, labels = picture(120, 90, (20, 30, 60, 70))
    sample = augment(image, boxes, labels, config, np.random.default_rng(seed))
    if len(sample.boxes):
        assert sample.boxes[0].tolist() == pytest.approx(white_box(sample.image), abs=1.6)
        assert (sample.boxes >= 0).all() and (sample.boxes <= 96).all()


def test_flips_move_the_box_to_the_other_side():
    image, boxes, labels = picture(96, 96, (0, 0, 20, 10))
    config = dataclasses.replace(CONFIG, flip=1.0, flip_vertical=1.0)
    sample = augment(image, boxes, labels, config, np.random.default_rng(0))
    assert sample.boxes.tolist() == [[76.0, 86.0, 96.0, 96.0]]


@pytest.mark.parametrize("flips", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_every_pixel_and_channel_is_where_the_flips_put_it(flips):
    image = torch.randint(0, 256, (3, 50, 96), dtype=torch.uint8, generator=torch.manual_seed(0))
    config = dataclasses.replace(CONFIG, flip=float(flips[0]), flip_vertical=float(flips[1]))
    sample = augment(image, np.zeros((0, 4), np.float32), np.zeros(0, np.int64), config,
                     np.random.default_rng(0))  # fmt: skip
    square = sample.image.flip([axis for axis, flip in ((2, flips[0]), (1, flips[1])) if flip])
    top = next(row for row in range(96) if (square[:, row] != FILL).any())
    assert torch.equal(square[:, top : top + 50], image)
    square[:, top : top + 50] = FILL
    assert (square == FILL).all()


def test_a_box_that_is_cropped_away_is_dropped_with_its_label():
    image = torch.zeros(3, 96, 96, dtype=torch.uint8)
    boxes = np.array([[0, 0, 6, 6], [30, 30, 66, 66]], np.float32)
    config = dataclasses.replace(CONFIG, scale=[2.0, 2.0])
    kept = [augment(image, boxes, np.array([3, 4]), config, np.random.default_rng(s)) for s in range(30)]
    assert any(sample.labels.tolist() == [4] for sample in kept)
    assert all(len(sample.boxes) == len(sample.labels) for sample in kept)


def test_an_image_without_boxes_stays_without():
    sample = augment(
        torch.zeros(3, 50, 80, dtype=torch.uint8), np.zeros((0, 4), np.float32), np.zeros(0, np.int64),
        dataclasses.replace(CONFIG, flip=1.0, scale=[0.5, 2.0]), np.random.default_rng(1),
    )  # fmt: skip
    assert sample.boxes.shape == (0, 4) and sample.image.shape == (3, 96, 96)


def test_no_colour_change_is_no_map():
    assert color_map(CONFIG, np.random.default_rng(0)) is None


def applied(colour, **limits):
    matrix = color_map(dataclasses.replace(CONFIG, **limits), np.random.default_rng(4))
    return matrix[:, :3] @ np.array(colour) + matrix[:, 3]


def test_hue_and_saturation_leave_grey_alone():
    assert applied([0.4, 0.4, 0.4], hue=0.5, saturation=0.9) == pytest.approx([0.4] * 3, abs=2e-3)


def test_brightness_scales_and_contrast_turns_about_mid_grey():
    bright = applied([0.2, 0.4, 0.6], brightness=0.5)
    assert bright / bright[0] == pytest.approx(np.array([1, 2, 3]), abs=1e-5)
    assert applied([0.5, 0.5, 0.5], contrast=0.5) == pytest.approx([0.5] * 3, abs=1e-6)


def test_hue_changes_the_colour_but_not_the_luma():
    turned = applied([0.8, 0.2, 0.1], hue=0.3)
    luma = np.array([0.299, 0.587, 0.114])
    assert abs(turned - [0.8, 0.2, 0.1]).max() > 0.05
    assert luma @ turned == pytest.approx(luma @ [0.8, 0.2, 0.1], abs=2e-3)
