"""Matching: transformers' assignment, computed for all layers at once."""

import pytest
import torch
from transformers import DFineConfig
from transformers.loss.loss_rt_detr import RTDetrHungarianMatcher

from trainer.model.architectures.detr import hungarian

WEIGHTS = hungarian.Weights(2.0, 5.0, 2.0, 0.25, 2.0)
COUNTS = [4, 0, 7]


@pytest.fixture
def predictions():
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 3, 40, 5, generator=draw)
    boxes = torch.rand(2, 3, 40, 4, generator=draw) * 0.4 + 0.1
    targets = torch.rand(3, 7, 4, generator=draw) * 0.4 + 0.1
    labels = torch.randint(0, 5, (3, 7), generator=draw)
    for row, count in enumerate(COUNTS):
        labels[row, count:], targets[row, count:] = -1, 0
    return logits, boxes, targets, labels


def test_assignment_is_that_of_transformers(predictions):
    logits, boxes, targets, labels = predictions
    costs = hungarian.costs(logits, boxes, targets, labels, WEIGHTS)
    assigned = hungarian.assign(hungarian.start(costs)(), COUNTS, torch.device("cpu"))
    matcher = RTDetrHungarianMatcher(DFineConfig(num_labels=5))
    each = [
        {"class_labels": names[:count], "boxes": real[:count]}
        for names, real, count in zip(labels, targets, COUNTS, strict=True)
    ]
    for layer in range(2):
        expected = matcher({"logits": logits[layer], "pred_boxes": boxes[layer]}, each)
        assert [len(queries) for queries, _ in assigned[layer]] == COUNTS
        for ours, theirs in zip(assigned[layer], expected, strict=True):
            assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def test_what_is_not_finite_is_taken_last(predictions):
    logits, boxes, targets, labels = predictions
    logits[0, 0, :35] = torch.nan
    costs = hungarian.costs(logits, boxes, targets, labels, WEIGHTS)
    (queries, _), *_ = hungarian.assign(costs, COUNTS, torch.device("cpu"))[0]
    assert (queries >= 35).all() and len(queries) == 4


def test_more_targets_than_queries(predictions):
    logits, boxes, targets, labels = (part[..., :3, :] if part.ndim == 4 else part for part in predictions)
    costs = hungarian.costs(logits, boxes, targets, labels, WEIGHTS)
    first, *_ = hungarian.assign(costs, COUNTS, torch.device("cpu"))
    assert [len(queries) for queries, _ in first] == [3, 0, 3]
