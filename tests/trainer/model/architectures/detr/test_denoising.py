"""Denoising queries: transformers' layout, and random numbers of each image alone."""

import pytest
import torch
from transformers.models.d_fine import modeling_d_fine

from trainer.model.architectures.detr.denoising import denoising

COUNTS = [5, 0, 2]


@pytest.fixture
def made(batch):
    """Make the denoising queries of some images of a batch."""
    sample = batch(COUNTS)

    def make(rows=slice(None), queries=20, label_noise=0.5, box_noise=1.0):
        part = sample.part(rows)
        return sample, denoising(
            sample.centred()[rows], sample.labels[rows], part.counts, part.keys, 3, part.most,
            queries=queries, label_noise=label_noise, box_noise=box_noise,
        )  # fmt: skip

    return make


def test_without_noise_it_is_what_transformers_makes(made):
    sample, ours = made(label_noise=0.0, box_noise=0.0)
    targets = [
        {"class_labels": labels[:count], "boxes": boxes[:count]}
        for labels, boxes, count in zip(sample.labels, sample.centred(), COUNTS, strict=True)
    ]
    labels, references, mask, described = modeling_d_fine.get_contrastive_denoising_training_group(
        targets, 3, 30, lambda labels: labels, 20, 0.0, 0.0
    )
    assert torch.equal(ours.labels, labels.long())
    # Where it adds no noise it leaves the boxes as they are; with noise it gives logits, as we always do.
    torch.testing.assert_close(ours.references.sigmoid(), references.double(), rtol=0, atol=2e-5)
    assert torch.equal(ours.visible(30), mask == 0)
    assert ours.groups == described["dn_num_group"] == 4
    for (queries, _), theirs in zip(ours.matched, described["dn_positive_idx"], strict=True):
        assert torch.equal(queries, theirs)
    assert [len(queries) for queries, _ in ours.matched] == [20, 0, 8]


def test_noise_is_as_large_as_asked(made):
    sample, ours = made(queries=2000)
    (queries, targets), real = ours.matched[0], sample.labels[0]
    # Half of a half of the labels is drawn anew, of which a third is what it was.
    changed = (ours.labels[0, queries] != real[targets]).double().mean().item()
    assert changed == pytest.approx(0.25 * 2 / 3, abs=0.04)
    centre, size = sample.centred()[0, :, :2], sample.centred()[0, :, 2:]

    def moved(queries):
        """How far left and upper sides moved, as a share of half the box, where nothing stopped them."""
        boxes = ours.references[0, queries].sigmoid()
        low, before = boxes[:, :2] - boxes[:, 2:] / 2, (centre - size / 2)[targets]
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
