"""The noise of denoising queries. Their layout: test_detr_criterion.py."""

import pytest
import torch

from trainer.model.detr.denoising import make_denoising_queries

COUNTS = [5, 0, 2]


@pytest.fixture
def made(batch):
    """Make the denoising queries of some images of a batch."""
    sample = batch(COUNTS)

    def make(rows=slice(None), queries=20, unfold=True):
        part = sample.context(rows)
        return sample, make_denoising_queries(
            sample.centered()[rows],
            sample.labels[rows],
            part.keys,
            3,
            part.max_targets,
            queries=queries,
            label_noise=0.5,
            box_noise=1.0,
            unfold=unfold,
        )

    return make


def test_noise_is_as_large_as_asked(made):
    sample, ours = made(queries=2000, unfold=False)
    real, targets = sample.labels[0], ours.targets[0, 0]
    (queries,) = (targets >= 0).nonzero(as_tuple=True)
    targets = targets[queries]
    # Half of a half of the labels is drawn anew, of which a third is what it was.
    changed = (ours.labels[0, queries] != real[targets]).double().mean().item()
    assert changed == pytest.approx(0.25 * 2 / 3, abs=0.04)
    center, size = sample.centered()[0, :, :2], sample.centered()[0, :, 2:]

    def moved(queries):
        """How far left and upper sides moved, as a share of half the box, where nothing stopped them."""
        boxes = ours.references[0, queries].sigmoid()
        low, before = boxes[:, :2] - boxes[:, 2:] / 2, (center - size / 2)[targets]
        shares = (low - before) / (size / 2)[targets]
        return shares.abs()[(before > size[targets]) & (boxes[:, 2:] > 1e-3)]

    inside, outside = moved(queries), moved(queries + max(COUNTS))
    assert len(inside) > 500
    assert inside.max() < 1.01 and inside.mean().item() == pytest.approx(0.5, abs=0.1)
    assert outside.min() > 0.99 and outside.mean().item() == pytest.approx(1.5, abs=0.1)


def test_an_image_has_the_same_noise_in_any_batch(made):
    _, together = made()
    _, alone = made(slice(2, 3))
    assert torch.equal(together.labels[2:], alone.labels)
    assert torch.equal(together.references[2:], alone.references)
    assert not torch.equal(together.references[0, :2], together.references[2, :2])


def test_more_targets_than_queries_are_one_group(made):
    _, ours = made(queries=3)
    assert ours.groups == 1 and ours.labels.shape == (3, 10)


def test_sides_that_passed_each_other_are_a_box_of_dfine_and_a_line_of_rtdetr(made):
    """Opposite sides pass each other in a quarter of the negative queries, in each direction."""
    boxes = [made(queries=2000, unfold=unfold)[1].references.sigmoid()[0] for unfold in (True, False)]
    lines = [(each[:, 2:] < 2e-5).double().mean().item() for each in boxes]
    assert lines[0] < 0.01 and lines[1] == pytest.approx(0.25 / 2, abs=0.03)
    same = boxes[1][:, 2:] > 2e-5
    assert torch.equal(boxes[0][:, 2:][same], boxes[1][:, 2:][same])
