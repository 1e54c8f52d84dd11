"""Detections of a split are the same for any batch size and number of threads."""

import threading

import numpy as np
import pytest
import torch

from trainer.data.shard_index import ShardDataset
from trainer.evaluation.inference import in_images, predict_split
from trainer.launching.distributed import SINGLE
from trainer.model.architecture import build
from trainer.model.deployment import Detections


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
        alone = predict_split(Watched().predict, dataset, config, SINGLE, reentrant=False)
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


def test_an_error_in_a_thread_is_raised(shards, tiny):
    def fail(images):
        raise ValueError("no memory")

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with pytest.raises(ValueError, match="no memory"):
            predict_split(fail, ShardDataset(shards, "train"), tiny(), SINGLE)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_boxes_come_back_to_the_image_and_are_clipped():
    detections = Detections(
        torch.tensor([[[10.0, 20.0, 30.0, 96.0], [0.0, 0.0, 0.0, 0.0]]]), torch.tensor([[0.5, 0.0]]),
        torch.tensor([[3, -1]]), torch.tensor([1]),
    )  # fmt: skip
    (result,) = in_images(detections, [42], [(0.5, 0.5, 0.5, 0.5)], {42: np.array([50, 150])}).to_coco()
    assert result == {"image_id": 42, "category_id": 3, "bbox": [20.0, 40.0, 30.0, 110.0], "score": 0.5}
