"""Detections of a split: the same for any batch size and number of threads, one of each object in tiles."""

import threading

import numpy as np
import pytest
import torch

from trainer.base.errors import ResourceError
from trainer.data.shard_index import ShardDataset
from trainer.evaluation.inference import merge_tiles, predict_share, predict_split, to_image_boxes
from trainer.evaluation.truth_and_predictions import Predictions
from trainer.launching.distributed import SINGLE
from trainer.model.architecture import Detections, build


def test_parallel_passes_give_the_same_and_restore_the_thread_count(shards, tiny, monkeypatch):
    torch.manual_seed(0)
    dataset, config = ShardDataset(shards, "train"), tiny(evaluation__batch_size=4)
    detector, threads = build(config.model, 5).eval(), torch.get_num_threads()
    seen = set()

    class Watched:
        def predict(self, images):
            seen.add((len(images), torch.get_num_threads(), threading.current_thread() is main))
            return detector.predict(images)

    main = threading.main_thread()
    try:
        torch.set_num_threads(2)
        alone = predict_share(Watched().predict, dataset, config, SINGLE, reentrant=False)
        assert seen == {(4, 2, True)}
        seen.clear()
        shared = predict_split(Watched().predict, dataset, config, SINGLE)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    # The same number of images at once in total, and one thread for each pass.
    assert seen == {(2, 1, False)}
    assert shared.image_ids.tolist() == alone.image_ids.tolist()
    assert shared.scores == pytest.approx(alone.scores, abs=1e-5)


@pytest.mark.parametrize(
    ("error", "shown"),
    [(ValueError("no weights"), ValueError), (RuntimeError("could not create a primitive"), ResourceError)],
)
def test_an_error_in_a_thread_is_raised(shards, tiny, error, shown):
    def fail(images):
        raise error

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with pytest.raises(shown):
            predict_split(fail, ShardDataset(shards, "train"), tiny(), SINGLE)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_boxes_come_back_to_the_image_and_those_in_the_padding_are_left_out():
    detections = Detections(
        torch.tensor([[[30.0, 20.0, 60.0, 96.0], [10.0, 20.0, 30.0, 96.0], [0.0, 0.0, 0.0, 0.0]]]),
        torch.tensor([[0.9, 0.5, 0.0]]),
        torch.tensor([[3, 3, -1]]),
        torch.tensor([2]),
    )
    sizes, windows = {42: np.array([50, 150])}, [(0, 0, 48, 150)]
    found, shown = to_image_boxes(detections, [42], [(0.5, 0.5, 0.5, 0.5)], sizes, windows)
    assert [column.tolist() for column in found.columns()] == [[42], [3], [[20.0, 40.0, 30.0, 110.0]], [0.5]]
    assert shown.tolist() == [list(windows[0])]


SIZES = {7: np.array([180, 100])}
LEFT, RIGHT = (0, 0, 100, 100), (80, 0, 100, 100)  # They share 80 to 100.


def merged(*found):
    """Corners, scores and labels of what is left of detections (corners, score, tile, label)."""
    corners = np.array([corners for corners, *_ in found], float)
    boxes = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1)
    columns = [np.array(column) for column in zip(*((s, t, label) for _, s, t, label in found), strict=True)]
    left = merge_tiles(Predictions(np.full(len(found), 7), columns[2], boxes, columns[0]), columns[1], SIZES)
    ends = left.boxes[:, :2] + left.boxes[:, 2:]
    return [
        ([*b[:2], *e], s) for b, e, s in zip(left.boxes.tolist(), ends.tolist(), left.scores, strict=True)
    ]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        # Whole in both: the box of the more certain one.
        ([((82, 5, 96, 20), 0.8, LEFT, 1), ((83, 5, 97, 20), 0.6, RIGHT, 1)], [((82, 5, 96, 20), 0.8)]),
        # Whole in one, cut in the other, which is more certain: the whole box.
        ([((85, 5, 100, 20), 0.9, LEFT, 1), ((85, 5, 120, 20), 0.6, RIGHT, 1)], [((85, 5, 120, 20), 0.9)]),
        # Cut by both.
        ([((10, 5, 100, 50), 0.5, LEFT, 1), ((80, 6, 170, 50), 0.7, RIGHT, 1)], [((10, 5, 170, 50), 0.7)]),
        # Other classes, other objects, and two detections of one tile stay.
        ([((82, 5, 96, 20), 0.8, LEFT, 1), ((82, 5, 96, 20), 0.6, RIGHT, 2)], None),
        ([((82, 5, 96, 20), 0.8, LEFT, 1), ((82, 30, 96, 50), 0.6, RIGHT, 1)], None),
        ([((82, 5, 96, 20), 0.8, LEFT, 1), ((82, 5, 97, 20), 0.7, LEFT, 1)], None),
        # A small object in front of a large one of its class.
        ([((60, 5, 96, 90), 0.9, LEFT, 1), ((84, 40, 94, 50), 0.6, RIGHT, 1)], None),
    ],
    ids=["both", "one", "neither", "classes", "objects", "one tile", "in front"],
)  # fmt: skip
def test_detections_of_one_object_are_merged(found, expected):
    expected = expected or [(corners, score) for corners, score, *_ in found]
    for order in (found, found[::-1]):
        got = sorted(merged(*order))
        assert got == sorted(([*map(float, corners)], score) for corners, score in expected)


@pytest.mark.parametrize("box", [(40, 30, 60, 50), (60, 20, 150, 70), (2, 3, 235, 165), (70, 55, 92, 77)])
def test_a_split_is_detected_in_tiles_as_in_whole_images(box, tiny, monkeypatch):
    """By a detector that sees a white rectangle, or the part of it that is in a tile."""
    config = tiny(loader__image_size=96)
    pixels = np.zeros((170, 240, 3), np.uint8)
    pixels[box[1] : box[3], box[0] : box[2]] = 255

    class Dataset:
        image_ids, sizes = np.array([5, 9]), np.array([[240, 170], [240, 170]])

        def __len__(self):
            return 2

        def prefetch(self, indices):
            pass

        def read(self, index):
            return b"", {
                "image_id": (5, 9)[index],
                "file_name": "a",
                "width": 240,
                "height": 170,
                "annotations": [],
            }

    def decode_into(target, jpeg, divisor=1, **_):
        target[...] = pixels

    def predict(images):
        corners, num = torch.zeros(len(images), 1, 4), torch.zeros(len(images), dtype=torch.int64)
        for row, image in enumerate(images):
            y, x = torch.nonzero(image[0] > 127, as_tuple=True)
            if len(x):
                corners[row, 0], num[row] = torch.tensor([x.min(), y.min(), x.max() + 1, y.max() + 1]), 1
        return Detections(corners, torch.full((len(images), 1), 0.5), torch.zeros(len(images), 1).long(), num)

    monkeypatch.setattr("trainer.data.decoding.decode_into", decode_into)
    whole = predict_split(predict, Dataset(), config, SINGLE)
    tiled = predict_split(predict, Dataset(), config, SINGLE, tile=(96, 0.2))
    assert whole.image_ids.tolist() == tiled.image_ids.tolist() == [5, 9]
    expected = [*box[:2], box[2] - box[0], box[3] - box[1]]
    assert np.abs(whole.boxes - expected).max() < 2.6  # Shrunk to 96 pixels.
    assert np.abs(tiled.boxes - expected).max() == 0
